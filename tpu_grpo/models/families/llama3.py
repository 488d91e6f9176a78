"""Defines the family of Llama 3, 3.1 and 3.2: no norms of heads, no biases, rotary positions that may be scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from tpu_grpo.models.families import decoder
from tpu_grpo.models.families.family import DecoderConfig, Family, Remat, SettingRule, Shape
from tpu_grpo.models.families.rope import Llama3Scaling
from tpu_grpo.models.families.settings import COMMON, NO_ATTENTION_BIAS, number, off

if TYPE_CHECKING:
    from jax.typing import DTypeLike


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """The settings of a decoder whose rotary positions may be scaled."""

    rope_scaling: Mapping[str, Any] | None

    @property
    def scaling(self) -> Llama3Scaling | None:
        """The scaling of the positions, None where they are not scaled."""
        return None if self.rope_scaling is None else Llama3Scaling.from_setting(self.rope_scaling)


def _known_scaling(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict) or value.get("rope_type", value.get("type")) != "llama3":
        return False
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    numbers: list[Any] = [value.get(name) for name in names]
    if not all(map(number, numbers)):
        return False
    factor, low, high, original = numbers
    return factor >= 1 and 0 < low < high and original >= 1


_SCALING = SettingRule(
    "rope_scaling",
    "null, or of rope_type llama3 with factor >= 1, 0 < low_freq_factor < high_freq_factor and "
    "original_max_position_embeddings >= 1",
    _known_scaling,
    "the libraries have no other scaling: set it to null to train within the original context length",
)


def _tensors(config: LlamaConfig) -> dict[str, Shape]:
    layer = decoder.norm_shapes(config) | decoder.attention_shapes(config) | decoder.mlp_shapes(config)
    return decoder.decoder_shapes(config, layer)


@cache
def _tunix_config_class() -> type:
    """Extend Tunix's ``ModelConfig`` by the scaling that it lacks, and that ``models/repairs.py`` honours."""
    from tunix.models.llama3.model import ModelConfig

    @dataclass(frozen=True)
    class ScaledModelConfig(ModelConfig):
        rope_scaling: Llama3Scaling | None = None

    return ScaledModelConfig


def _model_config(config: LlamaConfig, dtype: DTypeLike, remat: Remat, flash_block: int | None) -> Any:
    from tunix.models.llama3 import model

    del dtype, flash_block  # it has neither field: it computes in the dtype of the parameters, with dot attention
    return _tunix_config_class()(
        **decoder.tunix_sizes(config),
        weight_tying=config.tie_word_embeddings,
        remat_config=model.RematConfig[remat.upper()],
        rope_scaling=config.scaling,
    )


_PUBLISHED = (*decoder.PUBLISHED_NORMS, *decoder.PUBLISHED_ATTENTION, *decoder.PUBLISHED_MLP)
_WEIGHTS = (*decoder.EMBEDDINGS_AND_NORMS, *decoder.ATTENTION, *decoder.MLP)

LLAMA3 = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    config=LlamaConfig,
    rules=(*COMMON, _SCALING, NO_ATTENTION_BIAS, off("mlp_bias")),
    defaults={"tie_word_embeddings": False, "rope_scaling": None},
    tensor_shapes=_tensors,
    ignored_tensors=decoder.tied_head,
    divisible=decoder.DIVISIBLE,
    model_config=_model_config,
    model_class=decoder.tunix_class("tunix.models.llama3.model", "Llama3"),
    load=decoder.tunix_loader("tunix.models.llama3.params"),
    flash_attention=False,
    weight_rules=lambda _: _WEIGHTS,
    tensor_rules=lambda config: decoder.published_decoder(config, _PUBLISHED),
)
