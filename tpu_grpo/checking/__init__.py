"""Checks a machine, or all hosts of a slice, row by row: what `tpu-grpo check` prints."""
