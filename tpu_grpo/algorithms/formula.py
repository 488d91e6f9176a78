"""Writes the objective of a run as a formula in one line, from the formulas of its parts.

    mean_it [ sg(w)*(-min(r*A, clip(r, 0.8, 1.28)*A)) + 0.001*k ]; w = ...; r = p/p_engine; A = R - mean_g(R); k = ...

The brackets hold the loss of token t of completion i; the definitions of its names follow. Formulas are valid
Python, so that a test can evaluate them and compare them with the program. Their names are

    p, p_engine, p_old, p_ref    a token's probability under the policy now, the engine, the trainer before the update
                                 and the reference
    mean_i, mean_it, mean_p      over completions, over all their tokens, over prompts
    R, A                         a completion's total reward, and its advantage
    mean_t, prod_t, all_t        over the tokens of the completion; mean_g, std_g over the completions of the prompt;
                                 mean_step, std_step over those of the step, mean_tokens, std_tokens over its tokens
    sg                           no gradient

A class describes its part in the attributes, or properties, ``formula`` (the loss of a token) and
``advantage_formula``: an expression, and after each semicolon the definition of a name in it.
"""

import re
from collections.abc import Mapping
from typing import Any

from tpu_grpo.algorithms.combined import RunAlgorithm
from tpu_grpo.algorithms.penalties import entropy_formula, kl_formula
from tpu_grpo.config import LossAggregation, RunConfig

MEANS: Mapping[LossAggregation, tuple[str, str]] = {
    "sequence-mean-token-mean": ("mean_i mean_t [ ", " ]"),
    "token-mean": ("mean_it [ ", " ]"),
    "prompt-mean-token-mean": ("mean_p mean_it [ ", " ]"),
    "sequence-mean-token-scale": ("mean_i sum_t [ ", " ] / {max_new_tokens}"),
}
"""What stands before and after the loss of a token."""


def objective_line(config: RunConfig, algorithm: RunAlgorithm) -> str:
    """Return the loss of a whole step, which the update minimizes, with the numbers of its settings."""
    section = config.algorithm
    old = "p_engine" if section.old_policy == "rollout" else "p_old"
    token, *definitions = pieces(token_formula(algorithm.objective, old))
    factors: list[str] = []
    if section.old_policy == "trainer" and section.correction is None:
        factors.append(f"min(p_old/p_engine, {section.upper_importance:g})")
    if algorithm.correction is not None:
        weight, *more = pieces(algorithm.correction.formula)
        factors.append("w")
        definitions += [f"w = {weight}", *more]
    if factors:
        token = f"sg({'*'.join(factors)})*({token})"
    kl, of_advantage, kl_names = kl_formula(section, old)
    entropy, entropy_names = entropy_formula(section)
    token, definitions = token + kl + entropy, [*definitions, *kl_names, *entropy_names]
    if re.search(r"\br\b", "; ".join([token, *definitions])):
        definitions.append(f"r = p/{old}")
    kind = type(algorithm.baseline).__name__
    advantage, *more = pieces(getattr(algorithm.baseline, "advantage_formula", f"{kind}.advantages(R)"))
    advantage = f"({advantage}){of_advantage}" if " if " in advantage and of_advantage else advantage + of_advantage
    definitions += [f"A = {advantage}", *more, _probability(config)]
    before, after = MEANS[algorithm.aggregation]
    return "; ".join([before + token + after.format(max_new_tokens=config.rollout.max_new_tokens), *definitions])


def token_formula(objective: Any, old: str) -> str:
    """Return a class's formula of its token losses, or the call of its method if it has no formula."""
    return getattr(objective, "formula", f"{type(objective).__name__}.token_losses(log(p), log({old}), A)")


def pieces(formula: str) -> list[str]:
    """Split a formula into an expression and the definitions of its names."""
    return [piece.strip() for piece in formula.split(";")]


def _probability(config: RunConfig) -> str:
    temperature = config.rollout.temperature
    softmax = f"softmax(logits{'' if temperature == 1.0 else f' / {temperature:g}'})"
    if not config.algorithm.filtered_ratio:
        return f"p = {softmax}"
    filters = " and ".join(f"{name}={value:g}" for name, value in config.rollout.filters.items())
    return f"p = {softmax} over the tokens that {filters} kept"
