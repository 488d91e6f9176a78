"""GRPO on TPU pod slices: Tunix learns, in-process sglang-jax engines sample, one program runs on every host."""

__version__ = "0.1.0"
