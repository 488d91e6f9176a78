"""What the policy learns: prompts, the rewards of completions, environments, and held-out prompts with theirs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerFast

from tpu_grpo.algorithms import open_algorithm
from tpu_grpo.config import RewardSpec, RunConfig
from tpu_grpo.data import PromptStream, open_evaluation_prompts, prompts_digest
from tpu_grpo.engine.sampler import Sampler
from tpu_grpo.environments.episodes import Environments
from tpu_grpo.hosts import Hosts
from tpu_grpo.observe.evaluation import GREEDY, Evaluation, EvaluationSamples, EvaluationSettings, evaluate
from tpu_grpo.records.errors import ConfigError, RewardError
from tpu_grpo.records.stages import Prompt
from tpu_grpo.rewards import DistributedRewards, RewardSet, open_rewards, repeats_itself
from tpu_grpo.rewards.final_answer import final_answer
from tpu_grpo.run.data import OpenData, open_data
from tpu_grpo.run.environments import load_environments, open_environments, tools_of


@dataclass(frozen=True)
class Task:
    """What the policy learns: prompts, the rewards of completions, and held-out prompts for evaluation."""

    prompts: PromptStream
    rewards: DistributedRewards
    held_out: "HeldOut | None"
    """None if the config has no held-out prompts."""
    environments: Environments | None = None
    """With what prompts begin conversations; None if completions are single answers."""

    def close(self) -> None:
        """Close the rewards and environments, and end their processes."""
        self.rewards.close()
        if self.held_out is not None:
            self.held_out.close()
        if self.environments is not None:
            self.environments.close()


@dataclass(frozen=True)
class HeldOut:
    """Prompts that are kept for evaluation, with the rewards that score their answers."""

    prompts: tuple[Prompt, ...]
    rewards: DistributedRewards
    settings: EvaluationSettings
    best: str
    """The value, as mode/reward, whose maximum decides which step is the best."""
    environments: Environments | None = None
    """With what prompts begin conversations; those of the run, if there is one."""

    def close(self) -> None:
        """Close the rewards and environments, and end their processes."""
        self.rewards.close()
        if self.environments is not None:
            self.environments.close()


def open_task(
    config: RunConfig, tokenizer: PreTrainedTokenizerFast, hosts: Hosts, data: OpenData | None = None
) -> Task:
    """Open rewards, and prompts unless ``data`` holds them, and check that prompts have the columns that rewards need.

    The hosts divide the scoring among them.
    """
    data = data or open_data(config, tokenizer)
    prompts = data.prompts
    _agree_on_prompts({part.name: part.rendered.digest for part in prompts.parts}, hosts)
    rewards = open_rewards(config.rewards, prompts.columns, config.run.max_steps)
    _check_token_rewards(config, rewards)
    held_out = _open_held_out(config, data.held_out, hosts, rewards)
    judges = [rewards] if held_out is None else [rewards, held_out.rewards.rewards]
    environments = open_environments(config, tokenizer, data.environments, keep=_asked_for(config, judges))
    held_out = held_out and replace(held_out, environments=environments)
    return Task(prompts, DistributedRewards(rewards, hosts, _compared(config.rewards)), held_out, environments)


def _asked_for(config: RunConfig, judges: Sequence[RewardSet]) -> bool:
    """Say whether a reward asks for environments as they were at the end; refuse it where there are none."""
    asking = [name for rewards in judges for name in rewards.of_environments]
    if asking and not config.environment.is_on:
        raise RewardError(
            f"{', '.join(asking)} must have conversations with environments, got environment.name unset; set it, or "
            "take other rewards"
        )
    return any(rewards.keeps_environments for rewards in judges)


def _check_token_rewards(config: RunConfig, rewards: RewardSet) -> None:
    """Refuse what gives single tokens an advantage of their own, if the algorithm would spread it over all."""
    credits = [f"{list(rewards.token_rewards)} give single ones"] if rewards.token_rewards else []
    if config.environment.is_on and config.environment.turn_credit == "turn":
        credits.append("environment.turn_credit=turn gives those of a turn")
    if credits and not getattr(open_algorithm(config.algorithm).objective, "credits_tokens", True):
        raise ConfigError(
            f"algorithm.name={config.algorithm.name} spreads over all tokens of a completion what "
            f"{' and what '.join(credits)}, because its ratio is of the whole completion; set "
            "algorithm.options={per_token: true}, or take another algorithm"
        )


def open_held_out(config: RunConfig, tokenizer: PreTrainedTokenizerFast, hosts: Hosts) -> HeldOut | None:
    """Open the held-out prompts, their rewards and environments; None if the config has no held-out prompts."""
    loaded = load_environments(config)
    prompts = open_evaluation_prompts(config.evaluation, config.data, tokenizer, tools_of(loaded))
    if (held_out := _open_held_out(config, prompts, hosts, None)) is None:
        return None
    keep = _asked_for(config, [held_out.rewards.rewards])
    return replace(held_out, environments=open_environments(config, tokenizer, loaded, keep=keep))


def _open_held_out(
    config: RunConfig, prompts: tuple[Prompt, ...] | None, hosts: Hosts, rewards: RewardSet | None
) -> HeldOut | None:
    """Open the rewards of held-out prompts.

    If evaluation uses the rewards of the run, these are scored by the worker processes of ``rewards``.
    """
    section = config.evaluation
    settings = EvaluationSettings.of(section, config.rollout.temperature)
    if prompts is None:
        return None
    _agree_on_prompts({"the evaluation": prompts_digest(prompts)}, hosts)
    specs, columns = config.rewards if section.rewards is None else section.rewards, tuple(prompts[0].columns)
    if section.rewards is None and rewards is not None:
        judges = rewards.for_columns(columns)
    else:
        judges = open_rewards(specs, columns, config.run.max_steps)
    best = section.best or f"{GREEDY}/{specs[0].shown}"
    return HeldOut(prompts, DistributedRewards(judges, hosts, _compared(specs)), settings, best)


def _compared(specs: Sequence[RewardSpec]) -> list[str]:
    """List the rewards that hosts can compare, because they give the same value whenever they are called."""
    return [spec.shown for spec in specs if repeats_itself(spec)]


def _agree_on_prompts(digests: Mapping[str, str], hosts: Hosts) -> None:
    """Check that hosts read, generated or downloaded the same prompts."""
    if hosts.count > 1:
        hosts.agree_all({f"prompts of {name}": digest for name, digest in digests.items()})


def evaluate_policy(
    sampler: Sampler, held_out: HeldOut, step: int
) -> tuple[Evaluation, tuple[EvaluationSamples, EvaluationSamples]]:
    """Evaluate the policy that the sampler's engines hold; returns the estimates and the samples they are of."""
    return evaluate(
        sampler.answer, held_out.rewards.begin, held_out.prompts, held_out.settings, final_answer, step=step
    )
