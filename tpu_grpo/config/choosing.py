"""The settings of which prompts are sampled, and which of their groups are learnt from."""

from itertools import pairwise
from typing import Annotated

from pydantic import Field, model_validator

from tpu_grpo.config.section import PositiveInt, Section

Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class DynamicSection(Section):
    """These settings fill a step with groups of different rewards (dynamic sampling, DAPO, arXiv 2503.14476)."""

    extra: float = Field(default=0.0, ge=0.0)
    """Sample this share of data.prompts_per_step more prompts in every round, rounded up. The first prompts_per_step
    groups of different rewards are learnt from, in the order of the prompts."""
    rounds: PositiveInt = 1
    """Sample up to this many rounds, as long as there are fewer such groups. If there are too few after the last,
    groups of equal rewards fill the step with weight 0."""

    @property
    def is_on(self) -> bool:
        """Say whether more than the prompts of a step may be sampled."""
        return self.extra > 0.0 or self.rounds > 1


class PoolsSection(Section):
    """These settings sample prompts more or less often by their past pass rate."""

    edges: tuple[float, ...] = ()
    """Divide prompts by pass rate into pools: [0.25, 0.75] makes three, up to 0.25, up to 0.75, and above."""
    weights: tuple[Probability, ...] = ()
    """Sample a prompt whose turn has come with this probability, by its pool, e.g. [0.2, 1, 0.2]; else pass it over.
    Prompts that were never sampled always are."""

    @model_validator(mode="after")
    def _weights_fit(self) -> "PoolsSection":
        if not self.edges and not self.weights:
            return self
        if any(upper <= lower for lower, upper in pairwise(self.edges)):
            raise ValueError(f"edges must ascend, got {list(self.edges)}; sort them, and name each once")
        if len(self.weights) != len(self.edges) + 1:
            raise ValueError(
                f"weights must be one more than edges, got {list(self.weights)} for {list(self.edges)}; there is a "
                "pool below each edge and one above the last"
            )
        if not any(self.weights):
            raise ValueError(f"weights must not all be 0, got {list(self.weights)}; no prompt would come twice")
        return self


class RetireSection(Section):
    """These settings stop sampling prompts that the policy has learnt."""

    at: float | None = None
    """Call a prompt passed if its pass rate is at least this, e.g. 0.9; none is retired when unset."""
    times: PositiveInt = 2
    """Never sample a prompt again once it was passed this many times in a row."""
