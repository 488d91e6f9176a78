"""Says what a run needs of a TPU slice, before it starts and without one: memory by stage, seconds by step.

slices.py         the devices of a slice, which programs are compiled for
programs.py       the run's programs, compiled
figures_cache.py  what the compiler said of programs that were compiled before
resident.py       bytes that stay on a device between programs
budget.py         memory of each stage, from both
estimate.py       seconds of a step
plan.py           all of these together
suggestions.py    settings to change when a stage does not fit, compiled as well
report.py         a plan as text and as JSON
child_process.py  a plan in a process that may be killed
"""
