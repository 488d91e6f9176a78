"""The parts of a run, built from its config, and what belongs to the run as a whole.

early.py         what can be known before anything heavy is imported
model.py         where the model is, and whether it can do what the config asks;  data.py: the run's prompts
parts.py         every stage, each built once: read this
meshes.py        which devices do what
engines.py       engines that take the trainer's parameters
probe.py         proof that engines and trainer hold the same policy
failures.py      an update whose loss or gradient is not finite, kept;  replay.py: done again
saved.py         a checkpoint that a user names, and its policy;  exporting.py: a policy leaves for others to load
answering.py     a model that answers the prompts of people
timeline.py      what host and devices do in chosen steps, recorded
directory.py     run.dir: made, continued, or moved aside
earlier.py       what lies there before the start: a run that is done, that goes on, or another one
changes.py       what is not as it was when a run is continued
lock.py          one process at a time has it; owner.py: which one that is
sharing.py       and all hosts see the same one
fingerprints.py  what hosts must agree on before anything is built
abstract.py      the same parts without arrays, for programs to be compiled from
"""
