"""Starts and watches runs on Cloud TPU slices, from a machine that has gcloud and no TPU.

The command line is ``tpu_grpo/cli/launch.py``. This package imports no jax; of tpu_grpo it imports only config,
records/errors.py and hosts/authentication.py.
"""
