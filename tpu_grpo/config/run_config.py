"""The complete config: all sections, the sizes derived from them, and the rules that hold between sections.

Each rule raises a ValueError that names the rule, the value, and a remedy.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import model_validator

from tpu_grpo.config.data_sections import (
    BUILTIN_TASK,
    HUB,
    NO_DATA,
    DataSection,
    EvaluationSection,
    ReadingSection,
    RewardSpec,
    check_rewards,
)
from tpu_grpo.config.learning_sections import AlgorithmSection, OptimizerSection, TeacherSpec, UpdateSection
from tpu_grpo.config.section import Section
from tpu_grpo.config.sections import (
    CheckpointSection,
    EnvironmentSection,
    ExportSection,
    HostsSection,
    LoggingSection,
    LoraSection,
    MeshesSection,
    ModelSection,
    RolloutSection,
    RunSection,
)
from tpu_grpo.config.setting_names import EVERYTHING, listed_name, nearest, settings_of
from tpu_grpo.config.yaml_dialect import Dumper
from tpu_grpo.records.errors import ConfigError

CACHE_MARGIN_TOKENS = 2
"""sglang-jax cuts a completion short if the cache has fewer free tokens than this."""
PROMPT_MARGIN_TOKENS = 7
"""sglang-jax skips a prompt, and tries another, if the cache would then have fewer free tokens than this."""
MOST_ROWS = 2**20  # completions that are sampled at the same time; their list alone takes a gigabyte
MICRO_BATCHES, MICRO_BATCH_TOKENS = 8, 512
"""Unless micro_batch_prompts is set, a step has at most MICRO_BATCHES forward and backward passes, each of at least
MICRO_BATCH_TOKENS tokens per device. So short packed completions need fewer passes, and a pass still fills a device."""
SHARED_PROMPT_TOKENS = 64
"""Shorter prompts are not shared, unless algorithm.row_tokens asks for it. On a CPU, with 8 completions of 64 tokens,
sharing prompts of 32 tokens makes an update of benchmarks.update's model 1.1 times as long, and of 64, 0.95 times."""


class RunConfig(Section):
    """All sections of a run's config; a ValueError says which settings do not fit together."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    environment: EnvironmentSection = EnvironmentSection()
    rewards: tuple[RewardSpec, ...] = (RewardSpec(name="exact_answer"),)
    """Score completions with these rewards, summed with their weights. When unset: exact_answer, or with
    environment.name the environment's own reward (environment). algorithm.name=distill and gkd also take an empty
    list."""
    teachers: tuple[TeacherSpec, ...] = ()
    """Learn from these frozen models on the policy's own tokens (on-policy distillation), beside rewards or, with
    algorithm.name=distill or gkd, in their place. When empty, there is no teacher."""
    algorithm: AlgorithmSection = AlgorithmSection()
    optimizer: OptimizerSection = OptimizerSection()
    update: UpdateSection = UpdateSection()
    meshes: MeshesSection = MeshesSection()
    hosts: HostsSection = HostsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    export: ExportSection = ExportSection()
    logging: LoggingSection = LoggingSection()

    @model_validator(mode="before")
    @classmethod
    def _environments_give_rewards(cls, given: Any) -> Any:
        """If there is an environment, and no rewards are set, use the environment's reward as the only one."""
        named = _given(given, "environment", "name")
        return {**given, "rewards": [{"name": "environment"}]} if named and "rewards" not in given else given

    @model_validator(mode="before")
    @classmethod
    def _rounded_weights_are_corrected(cls, given: Any) -> Any:
        """With int8 weights in rollouts, use the trainer's old policy and truncated importance weights, unless set."""
        if _given(given, "rollout", "weights_dtype") != "int8" or _given(given, "algorithm", "old_policy"):
            return given
        section = given.get("algorithm", {})
        fields = section if isinstance(section, dict) else section.model_dump(exclude_unset=True)
        return {**given, "algorithm": {**fields, "old_policy": "trainer"}}

    @model_validator(mode="after")
    def _fits_together(self) -> "RunConfig":
        _names_are_known(self.checkpoint.allow_changes)
        _step_is_divided(self.data, self.algorithm, self.open_groups, self.row_tokens, self.context_tokens)
        _rewards_fit_together(self.rewards, self.algorithm)
        _teachers_can_teach(self.teachers, self.algorithm, self.data, self.rewards, self.meshes)
        _engine_can_sample(self.rollout, self.data, self.context_tokens, self.environment.is_on)
        _sampler_and_learner_fit(self.meshes, self.rollout, self.algorithm)
        _hosts_are_described(self.hosts)
        _parameters_are_stepped(self.model, self.optimizer)
        _one_kind_of_source(self.data)
        if self.has_held_out or self.evaluation_rewards:
            _evaluation_tells_something(self.evaluation, self.evaluation_rewards)
        _export_has_what_it_needs(self.export, self.model.lora, self.checkpoint.keep_best, self.has_held_out)
        if self.drops_uninformative:
            _groups_fit(self.algorithm)
        _steps_are_reached(self.run, self.logging.profile_steps)
        _histograms_are_shown(self.logging, self.algorithm)
        _conversations_have_a_template(self.environment, self.data, self.data_paths.values())
        self._older_groups_are_kept()
        return self

    def _older_groups_are_kept(self) -> None:
        carry, staleness = self.rollout.partial_extra, self.algorithm.staleness
        if carry and (excluded := self.excludes_partial_rollouts) is not None:
            raise ValueError(f"rollout.partial_extra={carry:g} does not go with {excluded}; leave one of them out")
        if staleness and (excluded := self.excludes_staleness) is not None:
            raise ValueError(f"algorithm.staleness={staleness} does not go with {excluded}; leave one of them out")
        if staleness and self.meshes.layout == "shared":
            raise ValueError(
                f"algorithm.staleness={staleness} needs meshes.layout=split, got shared, with which trainer and "
                "sampler use the same devices; set it, or leave algorithm.staleness out"
            )

    @property
    def run_dir(self) -> Path:
        """The directory of the run's files."""
        return (self.run.dir or Path("runs") / self.run.name).expanduser()

    @property
    def going_on(self) -> str:
        """A sentence that says how to continue a stopped run from its newest checkpoint."""
        if self.checkpoint.resume == "never":
            return (
                "start the command again with checkpoint.resume=auto to continue; with checkpoint.resume=never, as it "
                "is, it would start over"
            )
        return "start the same command again to continue"

    @property
    def batch_rows(self) -> int:
        """The number of completions that a step learns from, called B."""
        return self.data.prompts_per_step * self.algorithm.group_size

    @property
    def sampled_rows(self) -> int:
        """The number of completions sampled in a round; more than B with data.dynamic."""
        return self.data.prompts_per_round * self.algorithm.group_size

    @property
    def open_groups(self) -> int:
        """The number of groups that are sampled at the same time, P(1 + rollout.partial_extra), rounded up; 0 if every
        group is sampled within its own step."""
        outlive = self.rollout.partial_extra or self.algorithm.staleness
        return self.data.prompts_with(self.rollout.partial_extra) if outlive else 0

    @property
    def has_older_tokens(self) -> bool:
        """Whether a step may learn from tokens of earlier rollouts than its own."""
        return self.open_groups > 0 and (self.rollout.partial_extra > 0.0 or self.data.dynamic.is_on)

    @property
    def excludes_partial_rollouts(self) -> str | None:
        """A setting of this config that does not go with rollout.partial_extra, and the reason; None if there is
        none."""
        own = {
            "environment.name: a checkpoint cannot hold the processes of conversations": self.environment.is_on,
            "algorithm.routing_replay=true: the experts of older tokens are not kept": self.algorithm.routing_replay,
        }
        return self.excludes_staleness or next((why for why, given in own.items() if given), None)

    @property
    def excludes_staleness(self) -> str | None:
        """A setting of this config that does not go with algorithm.staleness, and the reason; None if there is none."""
        algorithm = self.algorithm
        own = {
            f"algorithm.name={algorithm.name}: Tunix's learner knows no older tokens": algorithm.tunix is not None,
            "algorithm.filtered_ratio=true: older tokens were filtered by older weights": algorithm.filtered_ratio,
            "data.dynamic.extra: a step keeps the groups that it does not need": self.data.dynamic.extra > 0.0,
        }
        return next((why for why, given in own.items() if given), None)

    @property
    def step_text(self) -> str:
        """A description of the completions that a step samples and learns from."""
        data = self.data
        rounds = f", of {data.prompts_per_round} in up to {data.dynamic.rounds} rounds" * data.dynamic.is_on
        return f"{data.prompts_per_step} prompts x {self.algorithm.group_size} completions{rounds}"

    @property
    def drops_uninformative(self) -> bool:
        """Whether groups with equal rewards are excluded from the loss and its denominators."""
        return self.algorithm.drop_uninformative or self.data.dynamic.is_on

    @property
    def evaluation_rewards(self) -> tuple[RewardSpec, ...]:
        """The rewards that score evaluations: evaluation.rewards, or the run's rewards when that is unset."""
        return self.rewards if self.evaluation.rewards is None else self.evaluation.rewards

    @property
    def has_held_out(self) -> bool:
        """Whether there are held-out prompts, from evaluation.path or from the built-in task."""
        return self.evaluation.path is not None or self.data.builtin is not None

    @property
    def row_tokens(self) -> int:
        """The number of tokens in a training row: algorithm.row_tokens, or the length of the longest sequence; if
        prompts are shared, that of a prompt and several of its longest completions."""
        count = self._longest_sharing
        return self.algorithm.row_tokens or self.context_tokens + (count - 1) * (self.rollout.max_new_tokens + 1)

    @property
    def shares_prompts(self) -> bool:
        """Whether completions of the same prompt may share one copy of it in a training row."""
        return self._longest_sharing > 1

    @property
    def _longest_sharing(self) -> int:
        """How many of the longest completions a training row can hold behind one copy of their prompt.

        Unless algorithm.row_tokens decides it, prompts are shared if they are at least as long as completions usually
        are, a third of the longest, because longer rows need more memory. Two or more completions then share one, so
        that a row has about as many tokens of completions as of prompts.
        """
        group, prompt, new = self.algorithm.group_size, self.data.max_prompt_tokens, self.rollout.max_new_tokens
        if self.algorithm.tunix is not None:
            return 1
        if (row := self.algorithm.row_tokens) is not None:
            return min(group, 1 + (row - self.context_tokens) // (new + 1))
        if prompt < max(SHARED_PROMPT_TOKENS, new / 3):
            return 1
        return min(group, 1 << max(1, (prompt // new).bit_length() - 1))

    @property
    def mini_batch_prompts(self) -> int:
        """The number of prompts in one update, of a mini-batch or of the whole step."""
        return self.algorithm.mini_batch_prompts or self.data.prompts_per_step

    @property
    def micro_batch_prompts(self) -> int:
        """The number of prompts in one forward and backward pass of Tunix's learner: of an update, unless it is set."""
        return self.algorithm.micro_batch_prompts or self.mini_batch_prompts

    @property
    def updates_per_step(self) -> int:
        """The number of optimizer updates per rollout."""
        return self.algorithm.passes * (self.data.prompts_per_step // self.mini_batch_prompts)

    @property
    def recomputes_old_policy(self) -> bool:
        """Whether a forward pass of its own computes the log-probabilities of algorithm.old_policy=trainer.

        If a step makes one update, the policy that this update starts from is the old policy, so that its own forward
        pass computes them. A KL penalty in the reward needs them earlier, because its mean is over the whole step.
        """
        algorithm = self.algorithm
        return algorithm.old_policy == "trainer" and (self.updates_per_step > 1 or algorithm.kl_in == "reward")

    @property
    def updates(self) -> int:
        """The number of optimizer updates of the run."""
        return self.run.max_steps * self.updates_per_step

    @property
    def update_rows(self) -> int:
        """The number of training rows in an update whose completions all have the longest length."""
        return self._full_rows(self.mini_batch_prompts * self.algorithm.group_size)

    def _full_rows(self, completions: int) -> int:
        """Return the number of training rows for ``completions`` completions that all have the longest length."""
        apart = -(-completions // (self.row_tokens // self.context_tokens))
        count, group = self._longest_sharing, self.algorithm.group_size
        together = self.context_tokens + (count - 1) * (self.rollout.max_new_tokens + 1)
        copies = completions // group * -(-group // count)
        return min(apart, -(-copies // (self.row_tokens // together)))

    def micro_batch_rows(self, devices: int) -> int:
        """Return the number of training rows in one forward and backward pass, a multiple of ``devices``."""
        prompts = self.algorithm.micro_batch_prompts
        if prompts is None:
            share = -(-self._full_rows(self.batch_rows) // MICRO_BATCHES)
            rows = max(share, MICRO_BATCH_TOKENS * devices // self.row_tokens)
        else:
            rows = self._full_rows(prompts * self.algorithm.group_size)
        return -(-min(rows, -(-self.update_rows // self.meshes.slices)) // devices) * devices

    def micro_batches(self, devices: int) -> int:
        """Return the largest number of forward and backward passes that a slice makes in one iteration over a step."""
        updates = self.data.prompts_per_step // self.mini_batch_prompts
        return updates * -(-self.update_rows // (self.micro_batch_rows(devices) * self.meshes.slices))

    @property
    def context_tokens(self) -> int:
        """The number of tokens in the longest sequence, prompt and completion together."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def data_paths(self) -> dict[str, str]:
        """The paths of all data, by setting: data.path, data.sources.0.path, or evaluation.path.1 (from a list)."""
        sources = {f"data.sources.{index}.path": source.path for index, source in enumerate(self.data.sources)}
        held_out = {} if self.evaluation.path is None else {"evaluation.path": self.evaluation.path}
        found: dict[str, str] = {}
        for name, given in ((sources or {"data.path": self.data.path}) | held_out).items():
            several = isinstance(given, tuple)
            found |= {f"{name}.{n}": path for n, path in enumerate(given)} if several else {name: str(given)}
        return found

    @property
    def needs_hub(self) -> bool:
        """Whether the model or data may have to be fetched from the hub."""
        return any(path.startswith(HUB) for path in (self.model.path, *self.data_paths.values()))

    @property
    def every_reward(self) -> tuple[RewardSpec, ...]:
        """The rewards of the run, and those that only evaluations have."""
        return (*self.rewards, *(self.evaluation.rewards or ()))

    @property
    def plugins(self) -> list[tuple[str, str, str]]:
        """(setting, kind, name) of each algorithm, optimizer, environment and reward, which may be the user's code."""
        found = [
            ("algorithm.name", "algorithm", self.algorithm.tunix or self.algorithm.name),
            ("optimizer.name", "optimizer", self.optimizer.name),
        ]
        found += [("environment.name", "environment", name) for name in self.environment.names.values()]
        for where, rewards in (("rewards", self.rewards), ("evaluation.rewards", self.evaluation.rewards or ())):
            found += [(f"{where}.{index}.name", "reward", reward.name) for index, reward in enumerate(rewards)]
        return found

    def values(self) -> dict[str, Any]:
        """Return the value of each setting, as JSON can hold it; entries of lists are numbered, as in
        rewards.0.weight."""
        return dict(_leaves(self.model_dump(mode="json"), [name for name, *_ in settings()]))

    def counted(self, prompts: int) -> "RunConfig":
        """Return the config with ``run.epochs`` converted to ``run.max_steps``, given the number of prompts. Raises
        ConfigError if a setting needs more steps than that."""
        if self.run.epochs is None:
            return self
        steps = max(1, math.ceil(round(self.run.epochs * prompts / self.data.prompts_per_step, 6)))
        run = self.run.model_copy(update={"max_steps": steps, "epochs": None})
        try:
            _steps_are_reached(run, self.logging.profile_steps)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return self.model_copy(update={"run": run})

    def to_yaml(self) -> str:
        """Return the resolved config as YAML, with every setting."""
        return yaml.dump(self.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, width=120)


def _given(given: Any, section: str, name: str) -> Any:
    """Return a setting as it was given, before validation; None if it was not."""
    found = given.get(section) if isinstance(given, dict) else None
    if isinstance(found, Section):
        found = found.model_dump(exclude_unset=True)
    return found.get(name) if isinstance(found, dict) else None


def settings() -> Iterator[tuple[str, str, str, str]]:
    """Yield every setting of a run as (name, type, default, meaning), in the order of the sections."""
    yield from settings_of(RunConfig)


def _leaves(tree: Mapping[str, Any], listed: Sequence[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if listed_name(name) not in listed:  # a section
            yield from _leaves(value, listed, f"{name}.")
        elif value and any(setting.startswith(listed_name(f"{name}.0.")) for setting in listed):  # a list of sections
            for index, entry in enumerate(value):
                yield from _leaves(entry, listed, f"{name}.{index}.")
        else:
            yield name, value


def known_names() -> list[str]:
    """List the names of all sections, including entries of lists, then those of all settings."""
    listed = [name for name, *_ in settings()]
    parts = [name.split(".")[:-1] for name in listed]
    return [*dict.fromkeys(".".join(around[:end]) for around in parts for end in range(1, len(around) + 1)), *listed]


# --- rules between sections ------------------------------------------------------------------------------------------


def _names_are_known(allow_changes: Sequence[str]) -> None:
    for name in allow_changes:
        if listed_name(name) not in (known := [EVERYTHING, *known_names()]):
            raise ValueError(
                "checkpoint.allow_changes must name settings or sections, such as optimizer.learning_rate or rewards, "
                f"got {name!r}; {nearest(name, known) or '`--help all` lists every setting'}"
            )


def _step_is_divided(data: DataSection, section: AlgorithmSection, open_groups: int, row: int, context: int) -> None:
    prompts, mini, micro = data.prompts_per_step, section.mini_batch_prompts, section.micro_batch_prompts
    if mini is not None and prompts % mini:
        divisor = max(size for size in range(1, min(mini, prompts) + 1) if prompts % size == 0)
        raise ValueError(
            f"algorithm.mini_batch_prompts must divide data.prompts_per_step={prompts}, so that all updates are of "
            f"one size, got {mini}; take e.g. {divisor}"
        )
    if micro is not None and micro > (mini or prompts):
        whole = f"data.prompts_per_step={prompts}" if mini is None else f"algorithm.mini_batch_prompts={mini}"
        raise ValueError(f"algorithm.micro_batch_prompts must be <= {whole}, got {micro}; lower it")
    if (rows := max(prompts, data.prompts_per_round, open_groups) * section.group_size) > MOST_ROWS:
        raise ValueError(
            f"data.prompts_per_step x algorithm.group_size must be at most {MOST_ROWS} completions, those of "
            f"data.dynamic.extra or rollout.partial_extra included, got {rows}; lower one of them"
        )
    if row < context:
        raise ValueError(
            f"algorithm.row_tokens must be >= data.max_prompt_tokens + rollout.max_new_tokens = {context}, got {row}; "
            "raise it, or leave it out"
        )


def _rewards_fit_together(rewards: Sequence[RewardSpec], algorithm: AlgorithmSection) -> None:
    if algorithm.learns_from_rewards and not rewards:
        raise ValueError(
            "rewards must name at least one reward, got none; add e.g. {name: exact_answer}, or learn from teachers "
            "alone with algorithm.name=distill or gkd"
        )
    if algorithm.learns_from_rewards and algorithm.group_size < 2:
        raise ValueError(
            f"algorithm.group_size must be >= 2, got {algorithm.group_size}; a group of one has no baseline. Only "
            "algorithm.name=distill and gkd, with teachers, need none"
        )
    check_rewards(rewards)


def _teachers_can_teach(
    teachers: Sequence[TeacherSpec],
    algorithm: AlgorithmSection,
    data: DataSection,
    rewards: Sequence[RewardSpec],
    meshes: MeshesSection,
) -> None:
    if not teachers and algorithm.learns_from_rewards:
        return
    shown = [teacher.shown for teacher in teachers]
    if not any(teacher.weight for teacher in teachers) and not algorithm.learns_from_rewards:
        raise ValueError(
            f"algorithm.name={algorithm.name} needs a teacher with a weight above 0, got "
            f"{f'none among {shown}' if shown else 'no teachers'}; add e.g. teachers: [{{path: ...}}]"
        )
    if twice := sorted({name for name in shown if shown.count(name) > 1}):
        raise ValueError(f"teachers must have names of their own in the metrics, got {twice} twice; give one a label")
    excluded = {
        f"algorithm.name={algorithm.name}: Tunix's learner knows no teacher": algorithm.tunix is not None,
        "algorithm.filtered_ratio=true: a teacher's likeliest tokens are others": algorithm.filtered_ratio,
        "algorithm.drop_uninformative=true: groups of equal rewards have a teacher, too": algorithm.drop_uninformative,
        "data.dynamic: groups of equal rewards have a teacher, too": data.dynamic.is_on,
        "algorithm.kl_in=reward and algorithm.name=gkd, which has no advantage": (
            algorithm.name == "gkd" and algorithm.kl_in == "reward"
        ),
    }
    if (why := next((why for why, given in excluded.items() if given), None)) is not None:
        raise ValueError(f"teachers do not go with {why}; leave one of them out")
    if not rewards and (data.pools.weights or data.retire.at is not None):
        raise ValueError("data.pools and data.retire need rewards, got rewards=[]; leave them out, or add a reward")
    if not algorithm.learns_from_rewards and algorithm.advantage is not None:
        raise ValueError(
            f"algorithm.advantage={algorithm.advantage} needs an algorithm that learns from rewards, got "
            f"{algorithm.name}; leave it out, or take e.g. grpo with teachers"
        )
    for teacher in teachers:
        _teacher_can_teach(teacher, data, meshes)


def _teacher_can_teach(teacher: TeacherSpec, data: DataSection, meshes: MeshesSection) -> None:
    rate, most, path = teacher.update_rate, teacher.max_prompt_tokens, teacher.path
    rules = {
        "must differ from the policy of the start, got neither path, hint nor update_rate; set one, or use "
        "algorithm.beta to stay near it": path or teacher.hint or rate,
        f"with update_rate={rate:g} must have no path, got {path}; a moving average begins as the policy: leave one of "
        "them out": not (rate and path),
        f"with update_rate={rate:g} must have dtype=float32, got bfloat16, whose rounding would lose small moves; "
        "leave dtype out": not rate or teacher.dtype != "bfloat16",
        f"with update_rate={rate:g} excludes offload=true, because a moving average changes in every step; leave one "
        "of them out": not (rate and teacher.offload),
        f"with max_prompt_tokens={most} must have a hint, got none; without, its prompts are the policy's: leave it "
        "out": teacher.hint or most is None,
        f"must have max_prompt_tokens >= data.max_prompt_tokens={data.max_prompt_tokens}, got {most}; a hint makes "
        "prompts longer: raise it": most is None or most >= data.max_prompt_tokens,
        "with mesh=sampler must have a path, got none, which is the trainer's own policy; set path to model.path, or "
        "leave mesh out": path or teacher.mesh == "trainer",
        f"with mesh=sampler needs meshes.layout=split and meshes.slices=1, got {meshes.layout} and {meshes.slices}; "
        "set them, or leave mesh out": (meshes.layout, meshes.slices) == ("split", 1) or teacher.mesh == "trainer",
    }
    if (broken := next((rule for rule, kept in rules.items() if not kept), None)) is not None:
        raise ValueError(f"the teacher {teacher.shown} {broken}")


def _engine_can_sample(rollout: RolloutSection, data: DataSection, context: int, has_turns: bool) -> None:
    page, prompt = rollout.page_size, context - 1 if has_turns else data.max_prompt_tokens  # for a last turn
    tokens = max(context + CACHE_MARGIN_TOKENS, prompt + PROMPT_MARGIN_TOKENS)
    needed = -(-tokens // page) * page
    if rollout.kv_tokens is not None and rollout.kv_tokens < needed:
        raise ValueError(
            f"rollout.kv_tokens must hold one whole request: >= {needed} tokens (data.max_prompt_tokens="
            f"{data.max_prompt_tokens} + rollout.max_new_tokens={rollout.max_new_tokens}, "
            f"{CACHE_MARGIN_TOKENS} spare, and {PROMPT_MARGIN_TOKENS} beside a prompt, whole pages of {page}), got "
            f"{rollout.kv_tokens}; raise it or shorten prompts or completions"
        )
    paddings, most = rollout.batch_paddings, rollout.max_running_requests
    if paddings and max(paddings) > most:
        raise ValueError(
            f"rollout.batch_paddings must be at most rollout.max_running_requests={most}, got {list(paddings)}; drop "
            "the larger ones, or raise the limit"
        )
    if rollout.temperature == 0.0:
        raise ValueError(
            "rollout.temperature must be > 0 for training, got 0.0; greedy completions of a group are all the same, so "
            "every advantage is zero. Try 1.0"
        )


def _sampler_and_learner_fit(meshes: MeshesSection, rollout: RolloutSection, algorithm: AlgorithmSection) -> None:
    if rollout.release_during_update and meshes.layout == "split":
        raise ValueError(
            "rollout.release_during_update=true needs meshes.layout=shared, got split; the engines then hold nothing "
            "on the trainer's devices: leave it false"
        )
    if meshes.sampler.hosts is not None and meshes.layout == "shared":
        raise ValueError(
            f"meshes.sampler.hosts={meshes.sampler.hosts} needs meshes.layout=split, got shared, with which all "
            "hosts sample; set it, or leave meshes.sampler.hosts out"
        )
    if meshes.slices > 1 and algorithm.tunix is not None:
        raise ValueError(
            f"meshes.slices={meshes.slices} needs this package's learner, got algorithm.name={algorithm.name}; use one "
            "slice, or take another algorithm.name"
        )
    if algorithm.filtered_ratio and not rollout.filters:
        raise ValueError(
            "algorithm.filtered_ratio=true needs rollout.top_k, top_p or min_p, got none of them; without a filter the "
            "ratio is exact: set one, or leave filtered_ratio out"
        )


def _hosts_are_described(hosts: HostsSection) -> None:
    if hosts.index >= hosts.count:
        raise ValueError(f"hosts.index must be below hosts.count={hosts.count}, got {hosts.index}; indices start at 0")
    if hosts.count > 1 and hosts.coordinator is None:
        raise ValueError(
            f"hosts.count={hosts.count} needs hosts.coordinator, got none; set it to host:port of process 0"
        )


def _parameters_are_stepped(model: ModelSection, optimizer: OptimizerSection) -> None:
    lora, layers = model.lora, model.train_layers
    if layers is not None and lora.rank is not None:
        raise ValueError(
            f"model.train_layers={layers} and model.lora.rank={lora.rank} exclude each other; for adapters in some "
            "layers use model.lora.layers"
        )
    for name in ("layers", "path"):
        if lora.rank is None and (value := getattr(lora, name)) is not None:
            raise ValueError(f"model.lora.{name}={value} needs model.lora.rank, got none; set it, e.g. to 16")
    if model.param_dtype == "bfloat16" and not optimizer.compact:
        raise ValueError(
            "model.param_dtype=bfloat16 needs optimizer.state=compact, got full; a step of 1e-6 is far below half a "
            "bit of a bfloat16 weight and would be lost: set it, or use model.param_dtype=float32"
        )
    if model.param_dtype == "bfloat16" and model.dtype != "bfloat16":
        raise ValueError(
            f"model.param_dtype=bfloat16 needs model.dtype=bfloat16, got {model.dtype}; use model.param_dtype=float32"
        )
    if optimizer.decay_steps and optimizer.schedule != "wsd":
        raise ValueError(
            f"optimizer.decay_steps={optimizer.decay_steps} needs optimizer.schedule=wsd, got {optimizer.schedule}; "
            "set it, or leave decay_steps at 0"
        )


def _one_kind_of_source(data: DataSection) -> None:
    if not data.sources:
        return
    if data.path != BUILTIN_TASK:
        raise ValueError(
            f"data.path={data.path} and data.sources exclude each other; make it one of the sources, {{path: ...}}"
        )
    for name in ReadingSection.model_fields:
        if value := getattr(data, name):
            raise ValueError(
                f"data.{name} must be set for each of data.sources, got {value} beside them; move it there"
            )
    names = [source.name for source in data.sources if source.name is not None]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"data.sources must have names of their own, got {twice} twice; rename one")


def _evaluation_tells_something(section: EvaluationSection, specs: Sequence[RewardSpec]) -> None:
    if section.rewards is not None:
        if not section.rewards:
            raise ValueError("evaluation.rewards must name at least one reward, got none; leave it unset for the run's")
        check_rewards(section.rewards)
    rewards = [spec.shown for spec in specs]
    if not specs:
        raise ValueError(
            "evaluation.rewards must name at least one reward where rewards=[] and there are held-out prompts, got "
            "none; add e.g. {name: exact_answer}"
        )
    modes = ["greedy", "sampled", *(f"{name}@{k}" for k in section.every_k for name in ("pass", "maj"))]
    if section.best is not None:
        mode, _, reward = section.best.partition("/")
        if mode not in modes or reward not in rewards:
            raise ValueError(
                f"evaluation.best must be MODE/REWARD with a mode of {modes} and a reward of {rewards}, got "
                f"{section.best!r}"
            )


def _export_has_what_it_needs(export: ExportSection, lora: LoraSection, keeps_best: bool, has_held_out: bool) -> None:
    if export.kind == "adapter" and lora.rank is None:
        raise ValueError(
            "export.kind=adapter needs a model with adapters, got model.lora.rank unset; use export.kind=model, which "
            "writes the whole model"
        )
    if export.every != "best":
        return
    if not has_held_out:
        raise ValueError("export.every=best needs held-out data, got none; set evaluation.path, or use last")
    if not keeps_best:
        raise ValueError(
            "export.every=best needs checkpoint.keep_best=true, got false; without, the best step is not kept: set it, "
            "or use last"
        )


def _groups_fit(algorithm: AlgorithmSection) -> None:
    setting = "algorithm.drop_uninformative=true" if algorithm.drop_uninformative else "data.dynamic"
    if algorithm.advantage == "reinforce_pp":
        raise ValueError(
            f"{setting} does not go with algorithm.advantage=reinforce_pp, whose baseline is the whole step's: groups "
            "of equal rewards teach something there; take reinforce_pp_baseline, or leave it out"
        )


def _steps_are_reached(run: RunSection, profile_steps: Sequence[int]) -> None:
    epochs, last = run.epochs, run.max_steps
    if epochs is not None and "max_steps" in run.model_fields_set:
        raise ValueError(f"run.epochs={epochs:g} and run.max_steps={last} exclude each other; leave one of them out")
    if epochs is None and (beyond := [step for step in profile_steps if step > last]):
        raise ValueError(
            f"logging.profile_steps must be at most run.max_steps={last}, got {beyond}; drop them, or raise "
            "run.max_steps"
        )


def _histograms_are_shown(section: LoggingSection, algorithm: AlgorithmSection) -> None:
    given = f"logging.histograms_every={section.histograms_every}"
    if section.histograms_every and not section.tensorboard and section.wandb == "off":
        raise ValueError(
            f"{given} needs logging.tensorboard=true or logging.wandb, got neither; set one, or leave it 0"
        )
    if section.histograms_every and algorithm.tunix is not None:
        raise ValueError(
            f"{given} needs this package's learner, got algorithm.name={algorithm.name}; leave it 0, or take another "
            "algorithm.name"
        )


def _conversations_have_a_template(environment: EnvironmentSection, data: DataSection, paths: Collection[str]) -> None:
    if NO_DATA in paths and not environment.is_on:
        raise ValueError(f"data.path={NO_DATA} needs environment.name, got none; its prompts are all empty: set it")
    if not environment.is_on:
        return
    if not data.chat_template:
        raise ValueError(
            "environment.name needs data.chat_template=true, got false; the template says how turns are told apart"
        )
    if environment.on_error != "value" and environment.error_value:
        raise ValueError(
            f"environment.error_value={environment.error_value} needs environment.on_error=value, got "
            f"{environment.on_error}; set it, or leave error_value out"
        )
