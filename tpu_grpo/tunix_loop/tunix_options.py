"""Reads and checks ``algorithm.name=tunix:NAME`` and its options, which have Tunix's names, before anything is built.

tunix:grpo                 a policy loss of Tunix's registry, with the options of its GRPOConfig
tunix:dapo, tunix:drgrpo   the loss grpo with the options of DAPOConfig or DrGRPOConfig
tunix:mine.py:my_loss      the file is imported first, and registers the user's losses or advantage estimators
"""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float
from pydantic import TypeAdapter, ValidationError
from tunix.rl import function_registry
from tunix.rl.grpo.dapo_learner import DAPOConfig
from tunix.rl.grpo.drgrpo_learner import DrGRPOConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig

from tpu_grpo.algorithms import RunAlgorithm
from tpu_grpo.algorithms.checks import try_advantages
from tpu_grpo.config import AlgorithmSection, DataSection, OptimizerSection
from tpu_grpo.config.plugins import did_you_mean, load_source
from tpu_grpo.records.errors import ConfigError

_CONFIGS: Mapping[str, type[Any]] = {"dapo": DAPOConfig, "drgrpo": DrGRPOConfig}
_UNDECLARED: Mapping[str, Any] = {"epsilon_high": float, "epsilon_c": float}
"""Options that Tunix's loss reads and GRPOConfig does not declare."""
_OURS: Mapping[str, str] = {"num_generations": "algorithm.group_size", "policy_loss_fn": "algorithm.name"}
"""Options of Tunix that are settings of this package."""
_HONOURED = {"name", "options", "group_size", "mini_batch_prompts", "micro_batch_prompts", "old_policy", "truncated"}
"""The algorithm section's settings that Tunix's learner uses; with old_policy=trainer it also uses importance_cap."""
_BY_TUNIX: Mapping[str, str] = {
    "beta": "beta",
    "iterations": "num_iterations",
    "clip_low": "epsilon",
    "clip_high": "epsilon_high",
    "dual_clip": "epsilon_c",
    "advantage": "advantage_estimator",
    "loss_aggregation": "loss_agg_mode",
    "kl_estimator": "kl_loss_mode",
}
"""The option of Tunix that corresponds to each setting of the algorithm section."""


@dataclasses.dataclass(frozen=True)
class Estimator:
    """Computes advantages with an estimator of Tunix's registry."""

    function: Callable[..., Any]

    def advantages(self, rewards_PG: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """Return the function's result in the shape of the rewards; a result of another size stays unchanged."""
        rewards_B, group = np.ma.filled(rewards_PG, np.nan).ravel(), rewards_PG.shape[1]
        found = np.asarray(of_scored(self.function)(rewards=rewards_B, num_generations=group), np.float64)
        return found.reshape(rewards_PG.shape) if found.shape == (rewards_PG.size,) else found


def of_scored(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an estimator of Tunix so that it leaves out unscored rows, whose reward is NaN: if there are any, it gets
    the scored rows of one group at a time. Other rows, and the only scored row of a group, have the advantage 0."""

    def estimate(rewards: Any, num_generations: int) -> Any:
        if not np.isnan(rewards_B := np.asarray(rewards)).any():
            return function(rewards=rewards, num_generations=num_generations)
        found_B = np.zeros(len(rewards_B))
        for group in np.arange(len(rewards_B)).reshape(-1, num_generations):
            if len(scored := group[~np.isnan(rewards_B[group])]) > 1:
                found_B[scored] = function(rewards=rewards_B[scored], num_generations=len(scored))
        return found_B

    return estimate


def open_tunix(section: AlgorithmSection, data: DataSection, optimizer: OptimizerSection) -> RunAlgorithm:
    """Read the options of Tunix's learner into an algorithm, whose ``objective`` is Tunix's config object.

    Raises:
        ConfigError: for a loss or estimator that is not registered, an option that Tunix does not have or refuses, an
            estimator that raises or returns a wrong shape or NaN, and settings that only this package's learner uses.
    """
    assert section.tunix is not None
    source, _, name = section.tunix.rpartition(":")
    if source:
        load_source(source, "algorithm", ConfigError)
    kind = _CONFIGS.get(name, GRPOConfig)
    _check_registered("algorithm.name=tunix:NAME", name, "policy_loss_fn", _CONFIGS)
    _check_honoured(section, data, optimizer)
    settings = _settings(kind, name, section)
    estimator = settings.advantage_estimator
    _check_registered("algorithm.options.advantage_estimator", estimator, "advantage_estimator")
    _check_registered("algorithm.options.reward_manager", settings.reward_manager, "reward_manager")
    baseline = Estimator(function_registry.get_advantage_estimator(estimator))
    if "values" in inspect.signature(baseline.function).parameters:
        raise ConfigError(
            "algorithm.options.advantage_estimator must need no critic, which GRPO does not have, got "
            f"{estimator}, which takes a critic's values; take grpo, rloo or drgrpo"
        )
    try_advantages(f"{section.name} with advantage_estimator={estimator}", baseline, section.group_size)
    return RunAlgorithm(settings, baseline, settings.loss_agg_mode)


def _settings(kind: type[Any], name: str, section: AlgorithmSection) -> Any:
    declared = {field.name for field in dataclasses.fields(kind) if field.init}
    types, given = {**typing.get_type_hints(kind), **_UNDECLARED}, dict[str, Any]()
    known = sorted((declared | _UNDECLARED.keys()) - _OURS.keys())
    for option, value in section.options.items():
        if option in _OURS:
            raise ConfigError(f"algorithm.options.{option} is {_OURS[option]} here, got {value}; set that, and drop it")
        if option not in known:
            raise ConfigError(
                f"algorithm.options.{option} is no option of Tunix's {kind.__name__}; "
                f"{did_you_mean(option, known)}(it has {', '.join(known)})"
            )
        try:
            given[option] = TypeAdapter(types[option]).validate_python(value)
        except ValidationError as error:
            raise ConfigError(
                f"algorithm.options.{option} must be {types[option]} for Tunix's {kind.__name__}, got {value!r}; "
                "correct it"
            ) from error
    arguments = {option: value for option, value in given.items() if option in declared}
    arguments |= {"policy_loss_fn": name} if kind is GRPOConfig else {}
    try:
        settings = kind(num_generations=section.group_size, **arguments)
    except ValueError as error:
        raise ConfigError(f"Tunix's {kind.__name__} refuses algorithm.options={section.options}: {error}") from error
    for option in given.keys() - declared:
        setattr(settings, option, given[option])
    if settings.num_iterations < 1:
        raise ConfigError(f"algorithm.options.num_iterations must be >= 1, got {settings.num_iterations}; raise it")
    settings.beta = settings.beta or 0.0  # with DAPO's None, Tunix would compute the reference without using it
    return settings


def _check_registered(setting: str, name: str, category: str, others: Collection[str] = ()) -> None:
    names = [*function_registry.default_registry.list_functions(category), *others]
    if name not in names:
        raise ConfigError(
            f"{setting} must be in Tunix's registry of {category}, got {name}; {did_you_mean(name, names)}(there: "
            f"{', '.join(names)}; your own: name=tunix:path.py:NAME imports a file that registers it)"
        )


def _check_honoured(section: AlgorithmSection, data: DataSection, optimizer: OptimizerSection) -> None:
    honoured = _HONOURED | ({"importance_cap"} if section.old_policy == "trainer" else set())
    refused = [
        (f"algorithm.{name}={getattr(section, name)}", _BY_TUNIX.get(name))
        for name, field in AlgorithmSection.model_fields.items()
        if name not in honoured and getattr(section, name) != field.default
    ]
    refused += [("data.dynamic", None)] * data.dynamic.is_on
    refused += [("optimizer.state=compact", None)] * optimizer.compact
    for setting, option in refused:
        remedy = "leave it out" if option is None else f"Tunix's name is algorithm.options.{option}"
        raise ConfigError(
            f"{setting} is honoured by this package's own learner alone, and algorithm.name={section.name} trains with "
            f"Tunix's; {remedy}, or take another algorithm.name"
        )
    micro, whole = section.micro_batch_prompts, section.mini_batch_prompts or data.prompts_per_step
    if micro is not None and whole % micro:
        raise ConfigError(
            f"algorithm.micro_batch_prompts must divide the {whole} prompts of an update with Tunix's learner, got "
            f"{micro}; take a divisor"
        )
