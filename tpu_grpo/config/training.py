"""Which parameters of the policy are trained, when not all of them are."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from tpu_grpo.config.layers import parse_layers
from tpu_grpo.config.section import PositiveInt, Section


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value  # YAML's 5 is a number


def _readable(value: str) -> str:
    parse_layers(value)
    return value


LayerRanges = Annotated[str, BeforeValidator(_as_text), AfterValidator(_readable)]


class LoraSection(Section):
    """Adapters (Hu et al. 2021, arXiv 2106.09685): W + A B alpha / rank, of which only A and B are trained."""

    rank: PositiveInt | None = None
    """Width of A and height of B; no adapters when unset."""
    alpha: float = Field(default=16.0, gt=0.0)
    """Scales the adapters, by alpha / rank."""
    targets: str = r"(q|k|v|o|gate|up|down)_proj"
    """Regular expression; modules in whose path it is found get an adapter, e.g. layers.3.attn.q_proj. The default
    takes all projections of attention and MLP; experts have none."""
    layers: LayerRanges | None = None
    """Layers that get adapters, e.g. 20-31 or 0-3,28-31; all when unset."""
    path: Path | None = None
    """Adapters to start from: a directory that a run left under adapters/; they must have been made with this rank and
    alpha, for the same modules."""

    @field_validator("targets")
    @classmethod
    def _is_an_expression(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(
                f"must be a regular expression, got {value!r} ({error}); an example: attn.(q|v)_proj"
            ) from error
        return value
