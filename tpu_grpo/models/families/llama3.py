"""The family of Llama 3, 3.1 and 3.2: no norms of heads, no biases, rotary positions that may be scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from tpu_grpo.models.families.decoder import DIVISIBLE, attention, decoder, mlp, norms, tunix_sizes
from tpu_grpo.models.families.family import (
    COMMON,
    NO_ATTENTION_BIAS,
    DecoderConfig,
    Family,
    Remat,
    SettingRule,
    number,
    off,
)
from tpu_grpo.models.families.rope import Llama3Scaling

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


@cache
def _tunix_config_class() -> type:
    """Extend Tunix's ``ModelConfig`` by the scaling that it lacks, and that ``models/tunix_repairs.py`` honours."""
    from tunix.models.llama3.model import ModelConfig

    @dataclass(frozen=True)
    class ScaledModelConfig(ModelConfig):
        rope_scaling: Llama3Scaling | None = None

    return ScaledModelConfig


def _model_config(config: LlamaConfig, dtype: DTypeLike, remat: Remat, flash_block: int | None) -> Any:
    from tunix.models.llama3 import model

    del dtype, flash_block  # it has neither field: it computes in the dtype of the parameters, with dot attention
    return _tunix_config_class()(
        **tunix_sizes(config),
        weight_tying=config.tie_word_embeddings,
        remat_config=model.RematConfig[remat.upper()],
        rope_scaling=config.scaling,
    )


LLAMA3 = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    config=LlamaConfig,
    rules=(*COMMON, _SCALING, NO_ATTENTION_BIAS, off("mlp_bias")),
    defaults={"tie_word_embeddings": False, "rope_scaling": None},
    leaves=lambda config: decoder(config, (*norms(config), *attention(config), *mlp(config))),
    divisible=DIVISIBLE,
    package="tunix.models.llama3",
    model="Llama3",
    model_config=_model_config,
    flash_attention=False,
)
