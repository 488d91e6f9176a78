"""Describes a model family: the settings of config.json that it supports, its leaves, and its model in Tunix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from importlib import import_module
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from tpu_grpo.models.families.leaves import Leaf, Shape
from tpu_grpo.models.families.rope import Scaling, is_known_scaling, scaling_of

if TYPE_CHECKING:
    from jax.typing import DTypeLike

Remat = Literal["none", "block", "decoder"]


@dataclass(frozen=True)
class DecoderConfig:
    """The settings of a config.json that determine the computation of a decoder, under Hugging Face's names.

    A family with further settings has a subclass.
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
    rope_scaling: Mapping[str, Any] | None = None

    @property
    def scaling(self) -> Scaling | None:
        """The scaling of the rotary positions; None if they are not scaled."""
        return scaling_of(self.rope_scaling)

    @property
    def query_width(self) -> int:
        """The width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def query_widths(self) -> int:
        """The width of all query heads of all layers together."""
        return self.query_width * self.num_hidden_layers

    @property
    def global_kv_heads(self) -> int:
        """The number of key-value heads in layers without a window."""
        return self.num_key_value_heads

    @property
    def kv_width(self) -> int:
        """The width of all key heads together, or of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def widest_head(self) -> int:
        """The width of heads, in the layers where they are widest."""
        return self.head_dim

    @property
    def experts(self) -> tuple[int, int]:
        """The number of a layer's experts, and how many of them a token uses: (1, 0) in a model without experts."""
        return 1, 0

    def contradiction(self) -> str | None:
        """Describe settings that contradict each other, with their values; None if there are none."""
        if self.num_attention_heads % self.num_key_value_heads:
            return (
                f"num_key_value_heads must divide num_attention_heads={self.num_attention_heads}, got "
                f"{self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            return f"head_dim must be even, got {self.head_dim}"
        return None


@dataclass(frozen=True, kw_only=True)
class MoeConfig(DecoderConfig):
    """The settings of a decoder with experts; ``intermediate_size`` is unused, because there are no dense layers."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int

    @property
    def experts(self) -> tuple[int, int]:
        """See `DecoderConfig`."""
        return self.num_experts, self.num_experts_per_tok

    def contradiction(self) -> str | None:
        """Describe contradicting settings, also fewer experts than a token needs."""
        if self.num_experts_per_tok > self.num_experts:
            return f"num_experts_per_tok must be <= num_experts={self.num_experts}, got {self.num_experts_per_tok}"
        return super().contradiction()


@dataclass(frozen=True)
class SettingRule:
    """A rule for a setting that Tunix or sglang-jax ignores, although it changes what the model computes."""

    setting: str
    accepted: str
    """The accepted values in words, to follow "must be"."""
    accepts: Callable[[Any], bool]
    remedy: str
    required: bool = False
    """Whether the setting must be given, because Hugging Face's default is not an accepted value."""


@dataclass(frozen=True)
class Family:
    """A model family: what its config.json and its tensors must be, and how Tunix builds its models."""

    model_type: str
    architecture: str
    config: type[DecoderConfig]
    rules: tuple[SettingRule, ...]
    defaults: Mapping[str, Any]
    """Hugging Face's values for settings of ``config`` that may be left out. If ``head_dim`` is not among them, its
    default is ``hidden_size / num_attention_heads``."""
    leaves: Callable[[Any], tuple[Leaf, ...]]
    """Takes a config and returns the leaves (parameter arrays) of Tunix's model, in the order of a checkpoint."""
    divisible: Mapping[str, tuple[str, ...]]
    """For each mesh axis (fsdp and tp of the trainer, tensor of the sampler), the settings that the axis's size must
    divide. The sampler can repeat key-value heads; tpu_grpo/models/checkpoint.py checks their number."""
    package: str
    """Tunix's package of the model, such as tunix.models.qwen3."""
    model: str
    """The name of Tunix's class of the model."""
    sampler: str = ""
    """The name of sglang-jax's class of the model, if it differs from ``architecture``."""
    fused: Callable[[Any], Mapping[str, tuple[str, ...]]] = lambda _: {}
    """Takes a config and returns the fused tensors that a checkpoint may hold, with the names of their parts in order.
    ``*`` stands for the layer's number."""
    own_fields: Callable[[Any], dict[str, Any]] = lambda _: {}
    """Takes a config and returns fields of Tunix's config to add or to override."""
    sampler_fields: Callable[[Any], dict[str, Any]] = lambda _: {}
    """Takes a config and returns settings that sglang-jax's model has under other names than Hugging Face."""
    renamed: Callable[[str], str | None] = lambda name: name
    """Takes the name of a stored tensor, and returns its name in ``leaves``; None for a tensor to leave out."""
    is_fused: bool = False
    """Whether the published checkpoints hold the fused tensors."""

    def all_leaves(self, config: DecoderConfig) -> list[Leaf]:
        """Return all leaves of the model, layer by layer, in the order of a checkpoint."""
        found: list[Leaf] = []
        for in_layers, group in groupby(self.leaves(config), lambda leaf: "*" in leaf.source):
            leaves, layers = list(group), range(config.num_hidden_layers)
            there = (leaf.of_layer(i) for i in layers for leaf in leaves if leaf.layers is None or i in leaf.layers)
            found += there if in_layers else leaves
        return found

    def tensor_shapes(self, config: DecoderConfig) -> dict[str, Shape]:
        """Return the shape of every tensor that a checkpoint must hold, by name; fused tensors are given as parts."""
        return {name: leaf.shape for leaf in self.all_leaves(config) for name in leaf.tensors}

    def fused_tensors(self, config: DecoderConfig) -> dict[str, tuple[str, ...]]:
        """Return the fused tensors of all layers, each with the names of its parts."""
        return {
            name.replace("*", layer): tuple(part.replace("*", layer) for part in parts)
            for layer in map(str, range(config.num_hidden_layers))
            for name, parts in self.fused(config).items()
        }

    def model_class(self) -> Any:
        """Return Tunix's class of the model, which takes its ``model_config``."""
        return getattr(import_module(f"{self.package}.model"), self.model)

    def model_config(self, config: DecoderConfig, dtype: DTypeLike, remat: Remat, flash_block: int | None) -> Any:
        """Return Tunix's config of the model; values for which it has no field, even after `_extended`, are left out.

        ``dtype`` is the dtype of parameters and computation. ``flash_block`` is flash attention's block size in tokens;
        None means dot attention.
        """
        import jax.numpy as jnp

        model: Any = import_module(f"{self.package}.model")
        values = {
            "num_layers": config.num_hidden_layers,
            "vocab_size": config.vocab_size,
            "embed_dim": config.hidden_size,
            "hidden_dim": config.intermediate_size,
            "num_heads": config.num_attention_heads,
            "head_dim": config.head_dim,
            "num_kv_heads": config.num_key_value_heads,
            "rope_theta": config.rope_theta,  # Tunix's annotation is int, but a float is as exact
            "rope_scaling": config.scaling,
            "norm_eps": config.rms_norm_eps,
            "use_tied_embedding": config.tie_word_embeddings,
            "weight_tying": config.tie_word_embeddings,
            "remat_config": model.RematConfig[remat.upper()],
            "dtype": jnp.dtype(dtype),
            "param_dtype": jnp.dtype(dtype),
        } | (own := self.own_fields(config))
        if flash_block is not None:
            values |= dict(zip(FLASH, (True, flash_block), strict=True))
        extended = _extended(model.ModelConfig, ("rope_theta", "rope_scaling", "norm_eps", *FLASH, *own))
        names = {each.name for each in fields(extended)}
        return extended(**{name: value for name, value in values.items() if name in names})


FLASH = ("use_flash_attention", "flash_attention_block_size")
"""Tunix's names of the settings of flash attention."""


@cache
def _extended(model_config: type, names: tuple[str, ...]) -> Any:
    """Subclass a ``ModelConfig`` to add named fields that it lacks; tpu_grpo/models/tunix_repairs.py reads them."""
    known: Any = model_config
    lacking = [name for name in names if name not in {own.name for own in fields(known)}]
    return make_dataclass(
        f"Published{known.__name__}",
        [(name, object, field(default=None)) for name in lacking],
        bases=(known,),
        frozen=known.__dataclass_params__.frozen,
        module=known.__module__,
    )


def off(setting: str, remedy: str = "the libraries do not have it, so train a checkpoint without it") -> SettingRule:
    """Make the rule that a setting must be false, 0 or null."""
    return SettingRule(setting, "false, 0 or null", lambda value: not value, remedy)


def null(setting: str, remedy: str) -> SettingRule:
    """Make the rule that a setting must be null."""
    return SettingRule(setting, "null", lambda value: value is None, remedy)


NO_ROPE_SCALING = null(
    "rope_scaling",
    "the libraries do not scale its positions: set it to null to train within the original context length",
)
SCALING = SettingRule(
    "rope_scaling",
    "null, or of rope_type llama3 with factor >= 1, 0 < low_freq_factor < high_freq_factor and "
    "original_max_position_embeddings >= 1, or of rope_type yarn with factor >= 1, original_max_position_embeddings "
    ">= 1 and no other settings than those of transformers",
    is_known_scaling,
    "the libraries have no other scaling: set it to null to train within the original context length",
)
NO_ATTENTION_BIAS = off("attention_bias")
NO_WINDOW = null(
    "sliding_window", "the libraries attend to everything: set it to null if no sequence exceeds the window"
)

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
"""The rules of every family with silu and full attention."""
