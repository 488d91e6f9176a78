"""Checks the algorithm before models are built: its settings must go together, and its class must implement `Algorithm`
and return the right shapes in a trial call."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from tpu_grpo.algorithms.algorithm import ON_REQUEST, Algorithm, Sequences, TokenLosses, asked, requested
from tpu_grpo.config import AlgorithmSection, LossAggregation, RolloutSection
from tpu_grpo.records.errors import ConfigError

LONG_ANSWER = 128
"""If completions may have more tokens, `notices` warns that the product of their ratios will often be out of bounds."""
USUAL_GAP = 0.01
"""The usual difference, in nats, between the engine's and the trainer's log-probability of a token in bfloat16."""


def notices(algorithm: AlgorithmSection, rollout: RolloutSection) -> list[str]:
    """Return warnings about the run's settings; each names the settings and what to do."""
    found, filters, tokens = [], rollout.filters, rollout.max_new_tokens
    if filters and not algorithm.filtered_ratio:
        shown = " and ".join(f"rollout.{name}={value:g}" for name, value in filters.items())
        found.append(
            f"{shown} biases the ratio: tokens are drawn among those that it keeps, and the ratio is of the full "
            "distributions; set algorithm.filtered_ratio=true for that among the kept tokens"
        )
    if algorithm.correction == "sequence" and tokens > LONG_ANSWER:
        gap = USUAL_GAP * tokens
        found.append(
            f"algorithm.correction=sequence multiplies up to rollout.max_new_tokens={tokens} ratios: {USUAL_GAP} nats "
            f"a token become a factor of e^{gap:.1f} = {math.exp(min(gap, 700.0)):.3g}, beyond any bound, and most "
            "long completions are cut or masked; algorithm.correction=geometric does not grow with length"
        )
    return found


def check_penalties(section: AlgorithmSection) -> None:
    """Raise ConfigError if settings of the KL penalty (see `KL_ESTIMATES`) or entropy bonus do not go together."""
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


METHODS: Mapping[str, tuple[str, ...]] = {
    "advantages": ("rewards_PG",),
    "token_losses": ("logprobs_BT", "old_logprobs_BT", "advantages_BT"),
}
"""The methods of an algorithm, and the names of the arguments that each is called with."""


def build(
    name: str, found: Any, settings: Mapping[str, Any], options: Mapping[str, Any], bounds: Sequence[str]
) -> Algorithm:
    """Construct an algorithm with the settings that it has parameters for, and with all of the options.

    A setting that is None is not passed, so that the class's default applies. If a setting named in ``bounds`` is not
    None, the class must have a parameter for it.

    Raises:
        ConfigError: if ``found`` is not a class, lacks a method or an aggregation, does not take an option or a bound,
            or its constructor raises.
    """
    if not inspect.isclass(found):
        raise ConfigError(
            f"algorithm {name} must be a class with the methods {' and '.join(METHODS)}, got a {type(found).__name__}; "
            "name a class"
        )
    for method, arguments in METHODS.items():
        _check_method(name, found, method, arguments)
    modes = get_args(LossAggregation)
    if (aggregation := getattr(found, "aggregation", None)) not in modes:
        raise ConfigError(
            f"algorithm {name} must have an attribute aggregation that is one of {', '.join(modes)}, got "
            f"{aggregation!r}; set it in the class"
        )
    arguments = _constructor_arguments(name, found, settings, options)
    for bound in bounds:
        if (value := settings.get(bound)) is not None and bound not in arguments:
            raise ConfigError(
                f"algorithm.{bound}={value} needs an algorithm that bounds its ratio so, and {name} does not; leave it "
                "out, or choose one that does, like grpo, dapo or gspo"
            )
    return _called(name, found.__name__, lambda: found(**arguments))


def try_out(name: str, algorithm: Algorithm, group_size: int) -> None:
    """Call ``advantages`` and ``token_losses`` with a group of equal rewards and with ratios beyond the clip. Raises
    ConfigError for an exception, a wrong shape, numbers that are not finite, or a loss without a gradient."""
    try_advantages(name, algorithm, group_size)
    logprobs_BT = jnp.asarray([[-0.5, -1.0], [-1.5, -2.0], [-2.5, -3.0]])
    known = {"sequences": Sequences(jnp.ones((3, 2), jnp.int32), jnp.ones((3, 2), bool))}
    losses = partial(
        algorithm.token_losses,
        old_logprobs_BT=logprobs_BT + jnp.asarray([[0.5, -0.5], [-0.5, 0.5], [0.0, 0.0]]),
        advantages_BT=jnp.asarray([[1.0, 1.0], [-1.0, -1.0], [0.5, 0.5]]),
        **asked(algorithm.token_losses, known),
    )
    answer = _called(name, "token_losses", lambda: losses(logprobs_BT=logprobs_BT))
    if not isinstance(answer, TokenLosses):
        raise ConfigError(
            f"algorithm {name}: token_losses must return TokenLosses(loss_BT, clipped_BT), got a "
            f"{type(answer).__name__}; see tpu_grpo/algorithms/grpo.py"
        )
    for part, values in answer._asdict().items():
        _check_numbers(name, f"{part} of token_losses", values, logprobs_BT.shape)
    gradient = jax.grad(lambda logprobs_BT: losses(logprobs_BT=logprobs_BT).loss_BT.sum())
    gradient_BT = _called(name, "the gradient of token_losses", lambda: jax.jit(gradient)(logprobs_BT))
    _check_numbers(name, "the gradient of loss_BT by logprobs_BT", gradient_BT, logprobs_BT.shape)
    if not jnp.any(gradient_BT):
        raise ConfigError(
            f"algorithm {name}: loss_BT must depend on logprobs_BT, got a gradient of zero everywhere; without one "
            "nothing is learnt"
        )


def try_advantages(name: str, algorithm: Any, group_size: int) -> None:
    """Call ``advantages`` on two groups. Raises ConfigError for an exception, a wrong shape or non-finite numbers."""
    rewards_PG = np.stack([np.arange(group_size), np.zeros(group_size)]).astype(np.float64)
    known = {
        "lengths_PG": np.ones(rewards_PG.shape, np.int64),
        "rewards_NPG": rewards_PG[None],
        "weights_N": np.ones(1),
    }
    advantages_PG = _called(
        name,
        "advantages",
        lambda: np.asarray(algorithm.advantages(rewards_PG=rewards_PG, **asked(algorithm.advantages, known))),
    )
    _check_numbers(name, "what advantages returns", advantages_PG, rewards_PG.shape)


def _check_method(name: str, found: type, method: str, arguments: Sequence[str]) -> None:
    function = getattr(found, method, None)
    if not inspect.isfunction(function):
        raise ConfigError(
            f"algorithm {name} must have a method {method}({', '.join(arguments)}), got a class without; add one"
        )
    also = [each for each in requested(function) if each in ON_REQUEST[method]]
    try:
        inspect.signature(function).bind(None, **dict.fromkeys([*arguments, *also]))
    except TypeError as error:
        raise ConfigError(
            f"algorithm {name}: {method} must take ({', '.join(arguments)}) by these names, got "
            f"{inspect.signature(function)} ({error}); rename its parameters"
        ) from error


def _constructor_arguments(
    name: str, found: type, settings: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    parameters = inspect.signature(found).parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if taken := sorted(set(options) & set(settings)):
        raise ConfigError(f"algorithm.options must not hold {taken}, which are settings of algorithm; set them there")
    if unknown := [] if anything else [option for option in options if option not in named]:
        raise ConfigError(
            f"algorithm {name} does not take the options {unknown}; it takes: "
            f"{', '.join(n for n in named if n not in settings) or 'none'}"
        )
    given = {setting: value for setting, value in settings.items() if setting in named and value is not None}
    arguments = given | dict(options)
    if missing := [p.name for p in named.values() if p.default is p.empty and p.name not in arguments]:
        raise ConfigError(
            f"algorithm {name} requires {missing}, which are neither in algorithm.options nor among the settings it "
            f"can ask for ({', '.join(settings)}); set them in algorithm.options, or give them defaults"
        )
    return arguments


def _called(name: str, what: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except ConfigError:
        raise
    except Exception as error:  # user code may raise anything
        raise ConfigError(f"algorithm {name}: {what} raised {type(error).__name__}: {error}; repair it") from error


def _check_numbers(name: str, what: str, values: Any, shape: tuple[int, ...]) -> None:
    if np.shape(values) != shape:
        raise ConfigError(
            f"algorithm {name}: {what} must have the shape {shape} of what it is made from, got {np.shape(values)}; "
            "return one number for each"
        )
    if not np.all(np.isfinite(values)):
        raise ConfigError(
            f"algorithm {name}: {what} must be finite, got {np.asarray(values).tolist()}; guard divisions (a group of "
            "equal rewards has a standard deviation of 0) and logarithms"
        )
