"""Defines the record of a model family, and the settings of a config.json that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tpu_grpo.models.families.layouts import WeightRule
from tpu_grpo.models.families.publishing import TensorRule

if TYPE_CHECKING:
    import jax
    from flax import nnx
    from jax.typing import DTypeLike

Shape = tuple[int, ...]
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
    tensor_shapes: Callable[[Any], dict[str, Shape]]
    """Takes a config and returns the shape of every tensor that a checkpoint must hold, by name."""
    ignored_tensors: Callable[[Any], frozenset[str]]
    """Takes a config and returns the tensors that a checkpoint may hold and that Hugging Face ignores as well."""
    divisible: Mapping[str, tuple[str, ...]]
    """For each axis of the trainer's mesh (fsdp, tp) and for the sampler's (tensor), the settings that its size must
    divide. The key-value heads on the sampler are checked elsewhere, because the sampler can repeat them."""
    model_config: Callable[[Any, DTypeLike, Remat, int | None], Any]
    """Returns Tunix's config of the model from (config, dtype of parameters and computation, remat, tokens of a block
    of flash attention); without a block, attention is dot."""
    model_class: Callable[[], Any]
    """Returns Tunix's class of the model, which takes that config."""
    load: Callable[[Path, Any, jax.sharding.Mesh, DTypeLike], nnx.Module]
    """Loads a model with Tunix's loader from (directory, Tunix's config, mesh, dtype)."""
    flash_attention: bool
    """Whether Tunix's model has flash attention."""
    weight_rules: Callable[[Any], tuple[WeightRule, ...]]
    """Takes a config and returns which leaf of Tunix's model becomes which leaf of sglang-jax's."""
    tensor_rules: Callable[[Any], tuple[TensorRule, ...]]
    """Takes a config and returns which leaf of Tunix's model is which tensors of a checkpoint."""
