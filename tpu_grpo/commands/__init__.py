"""What the command line can do, a file per command; each parses its arguments, calls, prints and returns an exit code.

train.py     scripts/run.py, with dry_run.py for --dry-run
evaluate.py  scripts/eval.py
data.py      scripts/data.py
plan.py      scripts/plan.py
launch.py    scripts/launch.py
"""
