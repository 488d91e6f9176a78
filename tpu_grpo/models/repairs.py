"""Repairs of Tunix's models, applied by ``apply()`` when a model is loaded, never at import.

Reviewed for google-tunix 0.1.7. There is one repair:

**RoPE's base.** ``tunix.models.qwen3.model.Attention.block`` calls ``apply_rope`` without ``rope_theta``, so that every
model rotates with the default 1e6, whatever its ``ModelConfig`` says. A checkpoint with another base (5e6 in the
2507 releases of Qwen3-4B) would silently be another model in training than in sampling. The repair wraps both
functions: while a module's ``block`` runs, which is also while it is traced, ``apply_rope`` takes that module's
``config.rope_theta``. So models of different bases live in one process, and a call from elsewhere keeps its default.
"""

import functools
import importlib.metadata
from contextvars import ContextVar
from typing import Any

from tpu_grpo.errors import ConfigError

TUNIX_VERSION = "0.1.7"
_MARK = "repaired_by_tpu_grpo"

_rope_theta: ContextVar[float | None] = ContextVar("rope_theta", default=None)
"""The base of the attention module that is running on this thread."""


def apply() -> None:
    """Repair Tunix in this process; a second call does nothing.

    The functions as Tunix ships them stay reachable as ``__wrapped__`` of the repaired ones.

    Raises:
        ConfigError: when another version of google-tunix is installed than the one the repairs were reviewed for.
    """
    _require_reviewed_version()
    from tunix.models.qwen3 import model as qwen3

    if getattr(qwen3.apply_rope, _MARK, False):
        return
    qwen3.apply_rope = _with_current_theta(qwen3.apply_rope)
    qwen3.Attention.block = _setting_theta(qwen3.Attention.block)


def _require_reviewed_version() -> None:
    installed = importlib.metadata.version("google-tunix")
    if installed != TUNIX_VERSION:
        raise ConfigError(
            f"google-tunix must be {TUNIX_VERSION}, got {installed}; install google-tunix=={TUNIX_VERSION}, or review "
            f"the repairs in {__name__} for {installed} and raise TUNIX_VERSION there"
        )


def _with_current_theta(original: Any) -> Any:
    @functools.wraps(original)
    def apply_rope(inputs: Any, positions: Any, head_dim: int, rope_theta: float | None = None) -> Any:
        theta = _rope_theta.get() if rope_theta is None else rope_theta
        given = {} if theta is None else {"rope_theta": theta}
        return original(inputs, positions, head_dim, **given)

    setattr(apply_rope, _MARK, True)
    return apply_rope


def _setting_theta(original: Any) -> Any:
    @functools.wraps(original)
    def block(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _rope_theta.set(self.config.rope_theta)
        try:
            return original(self, *args, **kwargs)
        finally:
            _rope_theta.reset(token)

    return block
