"""The record of a model family: the settings of a config.json that it takes, its leaves, and how Tunix builds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tpu_grpo.models.families.leaves import Leaf, Shape, WeightRule, of_all_layers

if TYPE_CHECKING:
    import jax
    from flax import nnx
    from jax.typing import DTypeLike

Remat = Literal["none", "block", "decoder"]


@dataclass(frozen=True)
class DecoderConfig:
    """The settings of a config.json that decide what a decoder computes, under Hugging Face's names.

    A family with more of them has a subclass.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool

    @property
    def query_width(self) -> int:
        """The width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """The width of all key heads together, or of all value heads."""
        return self.num_key_value_heads * self.head_dim

    def contradiction(self) -> str | None:
        """Return a rule that the settings break together, and their values; None if they break none."""
        if self.num_attention_heads % self.num_key_value_heads:
            return (
                f"num_key_value_heads must divide num_attention_heads={self.num_attention_heads}, got "
                f"{self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            return f"head_dim must be even, got {self.head_dim}"
        return None


@dataclass(frozen=True)
class SettingRule:
    """A rule for a setting that the libraries ignore, although other values change what the model computes."""

    setting: str
    accepted: str
    """The accepted values in words, to follow "must be"."""
    accepts: Callable[[Any], bool]
    remedy: str
    required: bool = False
    """Whether Hugging Face takes a value that is not accepted where the setting is left out."""


@dataclass(frozen=True)
class Family:
    """A model family: what its config.json and its tensors must be, and how Tunix builds its models."""

    model_type: str
    architecture: str
    config: type[DecoderConfig]
    rules: tuple[SettingRule, ...]
    defaults: Mapping[str, Any]
    """Hugging Face's values for settings of ``config`` that may be left out. A ``head_dim`` that is not here
    is ``hidden_size / num_attention_heads`` where it is left out."""
    leaves: Callable[[Any], tuple[Leaf, ...]]
    """Takes a config and returns the leaves of Tunix's model in the order of a checkpoint."""
    divisible: Mapping[str, tuple[str, ...]]
    """For each axis of the trainer's mesh (fsdp, tp) and for the sampler's (tensor), the settings that its size must
    divide. The key-value heads on the sampler are checked elsewhere, because the sampler can repeat them."""
    package: str
    """Tunix's package of the model, such as tunix.models.qwen3."""
    model: str
    """The name of Tunix's class of the model."""
    model_config: Callable[[Any, DTypeLike, Remat, int | None], Any]
    """Returns Tunix's config of the model from (config, dtype of parameters and computation, remat, tokens of a block
    of flash attention); without a block, attention is dot."""
    flash_attention: bool
    """Whether Tunix's model has flash attention."""
    loader: Callable[[Path, Any, jax.sharding.Mesh, DTypeLike], nnx.Module] | None = None
    """Loads a model as `load` does, if Tunix's own loader does not."""

    def all_leaves(self, config: DecoderConfig) -> list[Leaf]:
        """Return the leaves of all layers, in the order of a checkpoint."""
        return list(of_all_layers(self.leaves(config), config.num_hidden_layers))

    def tensor_shapes(self, config: DecoderConfig) -> dict[str, Shape]:
        """Return the shape of every tensor that a checkpoint must hold, by name."""
        return {name: leaf.shape for leaf in self.all_leaves(config) for name in leaf.tensors}

    def weight_rules(self, config: DecoderConfig) -> tuple[WeightRule, ...]:
        """Return which leaf of Tunix's model becomes which leaf of sglang-jax's."""
        return tuple(
            WeightRule(leaf.source, target, transform, leaf.input_axis)
            for leaf in self.leaves(config)
            for target, transform in leaf.targets
        )

    def model_class(self) -> Any:
        """Return Tunix's class of the model, which takes its ``model_config``."""
        return getattr(import_module(f"{self.package}.model"), self.model)

    def load(self, directory: Path, model_config: Any, mesh: jax.sharding.Mesh, dtype: DTypeLike) -> nnx.Module:
        """Load a model with Tunix's loader; ``model_config`` is Tunix's."""
        import jax.numpy as jnp

        if self.loader is not None:
            return self.loader(directory, model_config, mesh, dtype)
        params: Any = import_module(f"{self.package}.params")
        return params.create_model_from_safe_tensors(str(directory), model_config, mesh, dtype=jnp.dtype(dtype))


# --- rules for config.json that families share -----------------------------------------------------------------------


def off(setting: str, remedy: str = "the libraries do not have it, so train a checkpoint without it") -> SettingRule:
    """Make the rule that a setting must be false, 0 or null."""
    return SettingRule(setting, "false, 0 or null", lambda value: not value, remedy)


def null(setting: str, remedy: str) -> SettingRule:
    """Make the rule that a setting must be null."""
    return SettingRule(setting, "null", lambda value: value is None, remedy)


def number(value: Any) -> bool:
    """Whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


NO_ROPE_SCALING = null(
    "rope_scaling",
    "the libraries do not scale its positions: set it to null to train within the original context length",
)
NO_ATTENTION_BIAS = off("attention_bias")

PLAIN = (
    null(
        "rope_parameters",
        "the libraries have one base of positions for all layers: it must hold a rope_theta, no other than one at the "
        "top level",
    ),
    SettingRule("partial_rotary_factor", "1", lambda value: value in (1, None), "Tunix's model rotates whole heads"),
    off("attention_dropout", "Tunix's model has no dropout: set it to 0"),
    off("quantization_config", "train the unquantized checkpoint"),
)
"""The rules of every family."""

COMMON = (
    *PLAIN,
    SettingRule("hidden_act", "silu", lambda value: value == "silu", "the libraries always compute silu"),
    off("use_sliding_window", "the libraries attend to everything: set it to false if no sequence exceeds the window"),
    SettingRule(
        "layer_types",
        "full_attention in every layer",
        lambda value: value is None or (isinstance(value, list) and all(kind == "full_attention" for kind in value)),
        "the libraries attend to everything in every layer",
    ),
)
"""The rules of every family that computes silu and attends to everything."""
