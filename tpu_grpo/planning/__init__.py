"""Says what a run needs of a TPU slice, before it starts and without one: memory by stage, seconds by step.

slices.py         the devices of a slice, which programs are compiled for
programs.py       the run's programs, compiled
figures_cache.py  what the compiler said of programs that were compiled before
resident.py       bytes that stay on a device between programs
budget.py         memory of each stage, from both
estimate.py       seconds of a step, of all of these:
  rates.py          the constants, and where they come from
  sizes.py          what a model costs, by arithmetic
  engine_steps.py   a step of an engine, and a round of the engines of a host
  decoding.py       the decoding of completions of different lengths
  lengths.py        the lengths of completions with a given mean
  training.py       the learner's passes
plan.py           all of these together
suggestions.py    settings to change when a stage does not fit, compiled as well
report.py         a plan as text and as JSON
child_process.py  a plan in a process that may be killed
"""
