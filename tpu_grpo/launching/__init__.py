"""Starts and watches runs on Cloud TPU slices, from a machine that has gcloud or kubectl, and no TPU.

The command line is ``tpu_grpo/cli/launch.py``. This package imports no jax; of tpu_grpo it imports only
tpu_grpo/config, tpu_grpo/records/errors.py and tpu_grpo/hosts/authentication.py.
"""
