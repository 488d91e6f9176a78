"""Starts and watches runs on Cloud TPU slices, from a machine that has gcloud and no TPU.

The command line is ``tpu_grpo/cli/launch.py``. This package does not use jax, and of
tpu_grpo only the config.
"""
