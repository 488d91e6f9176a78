"""Importance weights and masks that correct for differences between engine and trainer, for any algorithm.

rho is the trainer's probability of a token divided by the engine's. The trainer's probability is that of the old policy
(``algorithm.old_policy: trainer``) or of the current policy (``rollout``). The settings ``algorithm.correction`` and
``algorithm.correction_mode`` choose the ratio and the weight:

    correction   ratio of a token                  source
    token        rho                               truncated: Yao et al. 2025; masked: IcePop
    sequence     product over the sequence         Liu et al. 2025, "When Speed Kills Stability"
    geometric    geometric mean over the sequence  Liu et al. 2025; a filter, not an importance weight

    mode         weight of a token
    truncate     clip(ratio, importance_floor, importance_cap)
    mask         0 if the ratio is out of bounds; otherwise the ratio, or 1 for geometric and for ``rollout`` (where
                 the objective's own ratio divides by the engine's probability)

Two more filters drop whole sequences. A veto drops a sequence if any token's rho is out of the veto's bounds.
Off-policy sequence masking (OPSM, DeepSeek-V3.2, arXiv 2512.02556) drops a sequence of negative advantage if its mean
of log(engine's / current policy's probability) is above ``opsm``.

Weights multiply the token losses but not the KL penalty, and no gradient flows through them. Means over tokens still
divide by the number of all tokens. Suffixes: B training rows, T tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from tpu_grpo.algorithms.algorithm import PerToken, Sequences, limited_exp
from tpu_grpo.config import AlgorithmSection
from tpu_grpo.records.errors import ConfigError

GEOMETRIC_BOUNDS = (0.99, 1.01)
"""The default bounds of the geometric mean, which SkyRL recommends to start with. The other ratios have no floor by
default, and a cap of 2."""


class CorrectionSums(NamedTuple):
    """Sums over the tokens that count in the loss: float32 scalars, which are added over micro-batches."""

    tokens: Any
    bounded: Any
    """The number of tokens whose ratio is outside of the bounds, and was clipped or masked."""
    vetoed: Any
    opsm: Any
    weight: Any
    weight_square: Any


@dataclass(frozen=True)
class Correction:
    """Computes the weights that token losses are multiplied by."""

    numbers: ClassVar[tuple[str, ...]] = ("bounds", "veto", "opsm")

    ratio: Literal["token", "sequence", "geometric"] | None
    mode: Literal["truncate", "mask"]
    bounds: tuple[float, float]
    old_policy: Literal["rollout", "trainer", "tunix"]
    veto: tuple[float, float] | None
    opsm: float | None

    @property
    def formula(self) -> str:
        """The formula of a token's weight, and the definitions of its names."""
        names = {"token": "rho", "sequence": "prod_t(rho)", "geometric": "exp(mean_t(log(rho)))"}
        weighs = self.mode == "truncate" or self._weighs
        value, conditions = "q" if weighs else "1", []
        low, high = map("{:g}".format, self.bounds)
        if self.ratio is None:
            value = "1"
        elif self.mode == "truncate":
            value = f"clip(q, {low}, {high})"
        else:
            conditions.append(f"{low} <= q <= {high}")
        if self.veto is not None:
            conditions.append(f"all_t({self.veto[0]:g} <= rho <= {self.veto[1]:g})")
        if self.opsm is not None:
            conditions.append(f"(A >= 0 or mean_t(log(p_engine/p)) <= {self.opsm:g})")
        condition = f" if {' and '.join(conditions)} else 0" if conditions else ""
        definitions = [] if self.ratio is None else [f"q = {names[self.ratio]}"]
        if self.ratio is not None or self.veto is not None:
            definitions.append(f"rho = {'p_old' if self.old_policy == 'trainer' else 'p'}/p_engine")
        return "; ".join([value + condition, *definitions])

    @property
    def _weighs(self) -> bool:
        """Whether tokens that are not masked are weighted by their ratio, not by 1."""
        return self.old_policy == "trainer" and self.ratio in ("token", "sequence")

    def weights(
        self, now_BT: PerToken, old_BT: PerToken, engine_BT: PerToken, advantages_BT: PerToken, sequences: Sequences
    ) -> tuple[PerToken, CorrectionSums]:
        """Compute the weight of every token from the log-probabilities of the current policy, the old policy and the
        engine; 0 for tokens that do not count in the loss."""
        counts_BT, now_BT = sequences.counts_BT, jax.lax.stop_gradient(now_BT)
        log_ratio_BT = (old_BT if self.old_policy == "trainer" else now_BT) - engine_BT
        weights_BT, bounded_BT = self._bounded(log_ratio_BT, sequences)
        vetoed_BT = opsm_BT = jnp.zeros_like(counts_BT)
        if self.veto is not None:
            ratio_BT = limited_exp(log_ratio_BT)
            beyond_BT = (ratio_BT < self.veto[0]) | (ratio_BT > self.veto[1])
            vetoed_BT = sequences.sum(beyond_BT.astype(jnp.float32)) > 0.0
        if self.opsm is not None:
            opsm_BT = (advantages_BT < 0.0) & (sequences.mean(engine_BT - now_BT) > self.opsm)
        weights_BT = jnp.where(counts_BT & ~vetoed_BT & ~opsm_BT, weights_BT, 0.0)

        def counted(values_BT: Bool[Array, "B T"]) -> Float[Array, ""]:
            return (values_BT & counts_BT).sum(dtype=jnp.float32)

        return weights_BT, CorrectionSums(
            tokens=counted(counts_BT),
            bounded=counted(bounded_BT),
            vetoed=counted(vetoed_BT),
            opsm=counted(opsm_BT),
            weight=weights_BT.sum(),
            weight_square=jnp.square(weights_BT).sum(),
        )

    def _bounded(self, log_ratio_BT: PerToken, sequences: Sequences) -> tuple[PerToken, Bool[Array, "B T"]]:
        """Return the weights before veto and OPSM, and a mask of the ratios outside of the bounds."""
        match self.ratio:
            case None:
                return jnp.ones_like(log_ratio_BT), jnp.zeros_like(log_ratio_BT, bool)
            case "token":
                ratio_BT = limited_exp(log_ratio_BT)
            case "sequence":
                ratio_BT = limited_exp(sequences.sum(log_ratio_BT))
            case "geometric":
                ratio_BT = limited_exp(sequences.mean(log_ratio_BT))
        bounded_BT = (ratio_BT < self.bounds[0]) | (ratio_BT > self.bounds[1])
        if self.mode == "truncate":
            return jnp.clip(ratio_BT, *self.bounds), bounded_BT
        return jnp.where(bounded_BT, 0.0, ratio_BT if self._weighs else 1.0), bounded_BT


def open_correction(section: AlgorithmSection) -> Correction | None:
    """Build the correction, or return None if neither ratio, veto nor OPSM is set. Raises ConfigError for settings that
    do not go together."""
    ratio, mode = section.correction, section.correction_mode
    default = GEOMETRIC_BOUNDS if ratio == "geometric" else (0.0, section.upper_importance)
    low = default[0] if section.importance_floor is None else section.importance_floor
    high = default[1] if section.importance_cap is None else section.importance_cap
    if ratio is None and section.importance_floor is not None:
        raise ConfigError(
            f"algorithm.importance_floor={low} needs algorithm.correction, got none; set it to token, sequence or "
            "geometric"
        )
    if ratio is not None and low >= high:
        raise ConfigError(
            f"algorithm.importance_floor must be < importance_cap = {high}, got {low}; else nothing is left between"
        )
    if ratio == "geometric" and mode == "truncate":
        raise ConfigError(
            "algorithm.correction=geometric needs algorithm.correction_mode=mask, got truncate; a geometric mean tells "
            "which sequences to leave out, and is no importance weight"
        )
    if ratio is not None and mode == "truncate" and section.old_policy == "rollout":
        raise ConfigError(
            "algorithm.correction_mode=truncate needs algorithm.old_policy=trainer, got rollout; the algorithm's own "
            "ratio is then taken against the engine, and would count twice: set old_policy, or correction_mode=mask"
        )
    veto = None
    if section.veto_low is not None or section.veto_high is not None:
        veto = (section.veto_low or 0.0, np.inf if section.veto_high is None else section.veto_high)
    if ratio is None and veto is None and section.opsm is None:
        return None
    return Correction(ratio, mode, (low, high), section.old_policy, veto, section.opsm)


def correction_metrics(sums: Sequence[CorrectionSums]) -> dict[str, float]:
    """Compute the metrics ``correction/*`` over all micro-batches of a step."""
    total = CorrectionSums(*np.asarray(sums, np.float64).sum(axis=0))
    tokens = max(total.tokens, 1.0)
    return {
        "correction/bounded_fraction": float(total.bounded / tokens),
        "correction/vetoed_fraction": float(total.vetoed / tokens),
        "correction/opsm_fraction": float(total.opsm / tokens),
        "correction/effective_sample_size": float(total.weight**2 / max(tokens * total.weight_square, 1e-300)),
    }
