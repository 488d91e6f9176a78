"""Starts and watches runs on Cloud TPU slices, from a machine that has gcloud and no TPU.

    tpus.py          what is known of each generation; names of slices -> accelerator type, hosts, topology
    options.py       the verbs and their flags
    commands.py      the gcloud commands, as words
    gcloud.py        running them: printed first, errors explained (explanations.py)
    tpu_slice.py     the slice itself: create, look, wait, delete
    worker.sh        what runs on every worker; workers.py calls it
    code.py, jobs.py what workers get: the checkout; a run with its environment and secrets
    launcher.py      setup, start, logs, stop
    babysit.py       all of it again after a preemption

The command line is ``tpu_grpo/cli/launch.py``. This room knows nothing of jax, and of the rest only the config.
"""
