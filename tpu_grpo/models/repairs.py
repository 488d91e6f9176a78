"""Repairs Tunix's models where they would compute something else than the checkpoint says.

``apply()`` replaces functions of Tunix by wrappers of them, for the whole process. Loading a model calls it, and
importing this module changes nothing. Each wrapper is made by a function here, and reaches Tunix's own function as
``__wrapped__``. The repairs were reviewed for google-tunix 0.1.7:

**Rotary positions.** In ``tunix.models.qwen3.model`` and ``tunix.models.llama3.model``, ``Attention.block`` calls
``apply_rope`` without ``rope_theta``. Every model then rotates with the default 1e6, whatever its ``ModelConfig`` says,
and scaled positions are not supported. A checkpoint with another base (5e6 in the 2507 releases of Qwen3-4B, 5e5 in
Llama 3) would silently be another model in training than in sampling. The repair wraps both functions: while a module's
``block`` runs or is traced, ``apply_rope`` takes ``rope_theta`` and, where it is set, ``rope_scaling`` from that
module's ``config``. Models of different positions can therefore live in one process, and a call from elsewhere keeps
its default.

**Logits in float32.** ``Llama3`` returns logits in the dtype of the parameters. Tunix's other models return float32, as
the log-probabilities need. The repair casts them.

**Experts without tensor parallelism.** ``MoELayer`` gathers and reduce-scatters over the axis ``tp`` even when it has
one device, and libtpu 0.0.42.1 aborts when it compiles that. Nothing is wrapped for this: ``fitted_config`` leaves the
axis out of the model's config.
"""

import dataclasses
import functools
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from tpu_grpo.families.rope import inverse_timescales
from tpu_grpo.families.tunix_version import require_reviewed_tunix

_MARK = "repaired_by_tpu_grpo"

_config: ContextVar[Any] = ContextVar("config", default=None)
"""The config of Tunix's attention module that is running in this context, None outside of one."""


def apply() -> None:
    """Repair Tunix in this process; a second call does nothing.

    Raises:
        ConfigError: when another version of google-tunix is installed than the one the repairs were reviewed for.
    """
    require_reviewed_tunix()
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen3 import model as qwen3

    if getattr(qwen3.apply_rope, _MARK, False):
        return
    modules: tuple[Any, ...] = (qwen3, llama3)
    for module in modules:
        module.apply_rope = _with_current_positions(module.apply_rope)
        module.Attention.block = _with_config_in_context(module.Attention.block)
    llama3.Llama3.__call__ = _with_float32_logits(llama3.Llama3.__call__)


def fitted_config(model_config: Any, mesh: Mesh) -> Any:
    """Return Tunix's config of a model, changed where the mesh needs it."""
    if not getattr(model_config, "num_experts", None) or mesh.shape["tp"] > 1:
        return model_config
    shardings = model_config.shd_config
    whole = dataclasses.replace(shardings, act_btd=(*shardings.act_btd[:-1], None))
    return dataclasses.replace(model_config, shd_config=whole)


def _with_current_positions(original: Any) -> Any:
    @functools.wraps(original)
    def apply_rope(inputs: Any, positions: Any, head_dim: int, rope_theta: float | None = None) -> Any:
        config = _config.get()
        if rope_theta is not None:
            return original(inputs, positions, head_dim, rope_theta)
        if config is None:
            return original(inputs, positions, head_dim)
        scaling = getattr(config, "rope_scaling", None)
        if scaling is None:
            return original(inputs, positions, head_dim, config.rope_theta)
        return _rotate(inputs, positions, inverse_timescales(head_dim, config.rope_theta, scaling))

    setattr(apply_rope, _MARK, True)
    return apply_rope


def _rotate(inputs: Any, positions: Any, inverse_timescales: Any) -> Any:
    """Turn dimensions i and i + H/2 of heads [B, L, N, H] by position [B, L] times inverse timescale [H/2]."""
    angles = positions[..., None, None] * jnp.asarray(inverse_timescales, jnp.float32)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(inputs, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(inputs.dtype)


def _with_config_in_context(original: Any) -> Any:
    @functools.wraps(original)
    def block(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _config.set(self.config)
        try:
            return original(self, *args, **kwargs)
        finally:
            _config.reset(token)

    return block


def _with_float32_logits(original: Any) -> Any:
    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        logits, cache = original(self, *args, **kwargs)
        return logits.astype(jnp.float32), cache

    return __call__
