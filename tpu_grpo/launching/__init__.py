"""Starts and watches runs on Cloud TPU slices, from a machine that has gcloud and no TPU.

The command line is ``tpu_grpo/cli/launch.py``. This room knows nothing of jax, and of the rest only the config.
"""
