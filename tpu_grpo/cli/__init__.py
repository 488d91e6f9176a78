"""This room is the command line, a file per command; each parses its arguments, calls, prints and returns an exit code.

main.py      tpu-grpo, which hands on to the others
train.py     scripts/run.py, with dry_run.py for --dry-run; on_end.py tells people how it ended
evaluate.py  scripts/eval.py, with checkpoint_evaluation.py for the work
export.py    scripts/export.py, with checkpoint_export.py for the work
report.py    scripts/report.py
sample.py    scripts/sample.py, with naming.py, talking.py, chat.py and answers.py for the work
data.py      scripts/data.py, with preview.py for the work
rewards.py   scripts/rewards.py
environment.py  scripts/environment.py, with playing.py for the work
plan.py      scripts/plan.py
launch.py    scripts/launch.py
starting.py  what they have in common: the config of their words, jax's platform, the hosts of the run

What imports jax lies beside a command's file and is imported once the platform is chosen.
"""
