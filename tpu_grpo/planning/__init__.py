"""What a run needs of a TPU slice, before it starts and without one: memory by stage, time by step.

slices.py      the devices of a slice, which programs are compiled for
programs.py    the run's programs, compiled
sizes.py       what lies on a device between programs
budget.py      both together: each stage against the chip's memory
estimate.py    seconds of a step
changes.py     what to change when a stage does not fit, compiled as well
plan.py        all of it
report.py      as text and as JSON
cli.py         scripts/plan.py
"""
