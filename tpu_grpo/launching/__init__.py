"""Runs on Cloud TPU slices, from a machine that has gcloud and no TPU.

    slices.py        names of slices -> accelerator type, runtime version, workers, environment
    settings.py      which TPU, where, how: every setting once
    commands.py      the gcloud commands, as words
    gcloud.py        running them: printed first, errors explained (explanations.py)
    machine.py       the slice itself: create, look, wait, delete
    worker.sh        what runs on every worker; workers.py calls it
    code.py, jobs.py what workers get: the checkout; a run with its environment and secrets
    launcher.py      setup, run, logs, stop
    babysit.py       all of it again after a preemption
    flags.py, cli.py the command line

Knows nothing of jax; of the rest of the package only the config.
"""
