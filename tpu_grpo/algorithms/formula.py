"""Writes the objective of a run as a formula in one line, from the formulas of its parts.

    mean_it [ sg(w)*(-min(r*A, clip(r, 0.8, 1.28)*A)) + 0.001*k ]; w = ...; r = p/p_engine; A = R - mean_g(R); k = ...

The brackets hold the loss of token t of completion i; definitions of the names follow. Formulas are valid Python, so
that a test can evaluate them and compare the results with the program's. The names are

    p, p_old, p_engine, p_ref    a token's probability under the policy now, the trainer's policy before the step's
                                 first update, the engine, and the reference
    p_NAME                       a token's probability under the teacher NAME
    mean_i, mean_it, mean_p      over completions, over all their tokens, over prompts
    R, A                         a completion's total reward, and its advantage
    mean_t, prod_t, all_t        over the tokens of a completion
    mean_g, std_g                over the completions of a prompt
    mean_step, std_step          over the completions of a step
    mean_tokens, std_tokens      over the tokens of a step
    sg                           stop_gradient

A class gives its formulas in the attributes or properties ``formula`` (the loss of a token) and
``advantage_formula``. Each is an expression and the definitions of names in it, separated by semicolons.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_grpo.algorithms.combined import RunAlgorithm
from tpu_grpo.config import AlgorithmSection, LossAggregation, RolloutSection, TeacherSpec

MEANS: Mapping[LossAggregation, tuple[str, str]] = {
    "sequence-mean-token-mean": ("mean_i mean_t [ ", " ]"),
    "token-mean": ("mean_it [ ", " ]"),
    "prompt-mean-token-mean": ("mean_p mean_it [ ", " ]"),
    "sequence-mean-token-sum": ("mean_i sum_t [ ", " ]"),
    "sequence-mean-token-scale": ("mean_i sum_t [ ", " ] / {max_new_tokens}"),
}
"""The text before and after the formula of a token's loss, by aggregation."""
KL_ESTIMATES: Mapping[str, str] = {
    "kl": "log(p/p_ref)",
    "mse_kl": "log(p/p_ref)**2 / 2",
    "low_var_kl": "p_ref/p - 1 - log(p_ref/p)",
}
"""The estimates of KL(policy || reference) from x = log(policy / reference) of a sampled token.

    k1, kl           x                 its mean is the divergence; as a loss its gradient is zero in expectation
    k2, mse_kl       x^2 / 2           its gradient is right for tokens that the current policy sampled
    k3, low_var_kl   exp(-x) - 1 + x   its mean is the divergence, but its gradient is that of KL(reference || policy)

See http://joschu.net/blog/kl-approx.html. Multiplied by the ratio to the old policy, k1 and k3 have the right gradient.
So has k1 as a cost in the reward, where no gradient flows through k1 itself.
"""


def objective_line(
    section: AlgorithmSection, rollout: RolloutSection, algorithm: RunAlgorithm, teachers: Sequence[TeacherSpec] = ()
) -> str:
    """Return the formula of the loss that a step minimizes, with the values of the settings."""
    old = "p_engine" if section.old_policy == "rollout" else "p_old"
    token, *definitions = pieces(token_formula(algorithm.objective, old))
    factors: list[str] = []
    if section.truncates_importance:
        factors.append(f"min(p_old/p_engine, {section.upper_importance:g})")
    if (share := section.top_entropy_quantile) < 1.0:
        factors.append("h")
        definitions.append(f"h = 1 for the {100 * share:g} % of the update's tokens with the highest entropy, else 0")
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
    if algorithm.top_k is None:
        pulls = [(t.weight, re.sub(r"\W", "_", t.shown)) for t in teachers if t.weight]
        advantage += "".join(f" + sg({weight:g}*log(p_{name}/p))" for weight, name in pulls)
    definitions += [f"A = {advantage}", *more, _probability(rollout, filtered=section.filtered_ratio)]
    before, after = MEANS[algorithm.aggregation]
    return "; ".join([before + token + after.format(max_new_tokens=rollout.max_new_tokens), *definitions])


def kl_formula(section: AlgorithmSection, old: str) -> tuple[str, str, list[str]]:
    """Return the KL penalty's term in a token's loss, its term in the advantage, and definitions of names in both."""
    if not section.beta:
        return "", "", []
    weight, reset = f"{section.beta:g}*", section.reference_reset_every
    reference = [] if reset is None else [f"p_ref = p after the last step that {reset} divides"]
    if section.kl_in == "reward":
        return "", f" + {weight}(mean_step(k) - k)", [f"k = log({old}/p_ref)", *reference]
    ratio = "r*" if section.kl_unbiased else ""
    return f" + {weight}{ratio}k", "", [f"k = {KL_ESTIMATES[section.kl_estimate]}", *reference]


def entropy_formula(section: AlgorithmSection) -> tuple[str, list[str]]:
    """Return the entropy bonus's term in a token's loss, and definitions of the names in it."""
    if section.entropy_target is not None:
        step, target = f"{section.entropy_change:g}", f"{section.entropy_target:g}"
        adapted = (
            f"c = {section.entropy_bonus:g} at first, + {step} after an update of mean H <= {target}, else - {step} "
            "(>= 0) and unused in the next update"
        )
        return " - c*H", ["H = entropy of p", adapted]
    return (f" - {section.entropy_bonus:g}*H", ["H = entropy of p"]) if section.entropy_bonus else ("", [])


def token_formula(objective: Any, old: str) -> str:
    """Return the formula of a class's token losses, or a call of ``token_losses`` if the class has no formula."""
    return getattr(objective, "formula", f"{type(objective).__name__}.token_losses(log(p), log({old}), A)")


def pieces(formula: str) -> list[str]:
    """Split a formula into an expression and the definitions of its names."""
    return [piece.strip() for piece in formula.split(";")]


def _probability(rollout: RolloutSection, *, filtered: bool) -> str:
    temperature = rollout.temperature
    softmax = f"softmax(logits{'' if temperature == 1.0 else f' / {temperature:g}'})"
    if not filtered:
        return f"p = {softmax}"
    filters = " and ".join(f"{name}={value:g}" for name, value in rollout.filters.items())
    return f"p = {softmax} over the tokens that {filters} kept"
