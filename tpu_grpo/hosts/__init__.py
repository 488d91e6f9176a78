"""What a process knows about the machine it runs on, settled before jax starts."""

from tpu_grpo.hosts.platform import choose_platform

__all__ = ["choose_platform"]
