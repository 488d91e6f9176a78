"""The KL penalty and the entropy bonus: which of their settings exclude each other, and their formulas.

With x = log(policy / reference) of a sampled token, the estimates of KL(policy || reference) are

    k1    x                 its mean is the divergence; as a loss its gradient is zero in expectation
    k2    x^2 / 2           its gradient is right for tokens that the current policy sampled
    k3    exp(-x) - 1 + x   its mean is the divergence, but its gradient is that of KL(reference || policy)

(http://joschu.net/blog/kl-approx.html). Multiplied by the ratio to the old policy, k1 and k3 have the right gradient.
So has k1 in the reward, where it is a cost of the token, without a gradient of its own.
"""

from collections.abc import Mapping

from tpu_grpo.config import AlgorithmSection
from tpu_grpo.records.errors import ConfigError

KL_ESTIMATES: Mapping[str, str] = {
    "kl": "log(p/p_ref)",
    "mse_kl": "log(p/p_ref)**2 / 2",
    "low_var_kl": "p_ref/p - 1 - log(p_ref/p)",
}


def check_penalties(section: AlgorithmSection) -> None:
    """Refuse settings that exclude each other. Raises ConfigError for the first of them."""
    for name in ("kl_unbiased", "reference_reset_every", "kl_in"):
        if (value := getattr(section, name)) not in (False, None, "loss") and section.beta == 0.0:
            shown = "true" if value is True else value
            raise ConfigError(
                f"algorithm.{name}={shown} needs a KL penalty, got algorithm.beta=0; set beta, or leave it out"
            )
    if section.kl_in == "reward" and section.kl_unbiased:
        raise ConfigError(
            "algorithm.kl_unbiased=true needs algorithm.kl_in=loss, got reward; k1 in the reward has the gradient of "
            "the KL divergence already: leave it out"
        )
    if section.kl_in == "reward" and section.kl_estimate != "kl":
        raise ConfigError(
            f"algorithm.kl_in=reward needs kl_estimator k1, got {section.kl_estimator}; as a reward, only k1 has the "
            "gradient of the KL divergence: leave kl_estimator out"
        )
    if section.kl_unbiased and section.kl_estimate == "mse_kl":
        raise ConfigError(
            f"algorithm.kl_unbiased=true needs kl_estimator k3 or k1, got {section.kl_estimator}; its mean is not the "
            "KL divergence, with or without the ratio: choose another"
        )
    if section.entropy_step is not None and section.entropy_target is None:
        raise ConfigError(
            f"algorithm.entropy_step={section.entropy_step:g} needs algorithm.entropy_target, got none; set it, or "
            "leave entropy_step out: the coefficient is entropy_bonus all the time"
        )


def kl_formula(section: AlgorithmSection, old: str) -> tuple[str, str, list[str]]:
    """Return the terms of the KL penalty in a token's loss and in its advantage, and the definitions of their names."""
    if not section.beta:
        return "", "", []
    weight, reset = f"{section.beta:g}*", section.reference_reset_every
    reference = [] if reset is None else [f"p_ref = p after the last step that {reset} divides"]
    if section.kl_in == "reward":
        return "", f" + {weight}(mean_step(k) - k)", [f"k = log({old}/p_ref)", *reference]
    ratio = "r*" if section.kl_unbiased else ""
    return f" + {weight}{ratio}k", "", [f"k = {KL_ESTIMATES[section.kl_estimate]}", *reference]


def entropy_formula(section: AlgorithmSection) -> tuple[str, list[str]]:
    """Return the term of the entropy bonus in a token's loss, and the definitions of its names."""
    if section.entropy_target is not None:
        step, target = f"{section.entropy_change:g}", f"{section.entropy_target:g}"
        adapted = (
            f"c = {section.entropy_bonus:g} at first, + {step} after an update of mean H <= {target}, else - {step} "
            "(>= 0) and unused in the next update"
        )
        return " - c*H", ["H = entropy of p", adapted]
    return (f" - {section.entropy_bonus:g}*H", ["H = entropy of p"]) if section.entropy_bonus else ("", [])
