"""The complete config: all sections, and the sizes derived from them; rules.py holds what must hold between them."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import model_validator

from tpu_grpo.config.data import DataSection, EvaluationSection, RewardSpec
from tpu_grpo.config.dialect import Dumper
from tpu_grpo.config.environment import EnvironmentSection
from tpu_grpo.config.learning import AlgorithmSection, OptimizerSection, UpdateSection
from tpu_grpo.config.rules import RULES
from tpu_grpo.config.section import Section
from tpu_grpo.config.sections import (
    CheckpointSection,
    ExportSection,
    HostsSection,
    LoggingSection,
    MeshesSection,
    ModelSection,
    RolloutSection,
    RunSection,
)

MICRO_BATCHES, MICRO_BATCH_TOKENS = 8, 512
"""Unless the config says more, a step has this many forward and backward passes at most, of at least this many tokens
on a device: short completions, packed, then need fewer passes, and a pass still fills a device."""


class RunConfig(Section):
    """A run is described by these sections; they fit together, or `ValueError` says what does not."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    environment: EnvironmentSection = EnvironmentSection()
    rewards: tuple[RewardSpec, ...] = (RewardSpec(name="exact_answer"),)
    """Score completions with these rewards, summed with their weights; exact_answer when unset, or with
    environment.name what the environment gives (environment)."""
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
        """Take what the environment gives as the only reward, where the config names none."""
        section = given.get("environment") if isinstance(given, dict) else None
        named = section.get("name") if isinstance(section, dict) else getattr(section, "name", None)
        return {**given, "rewards": [{"name": "environment"}]} if named and "rewards" not in given else given

    @model_validator(mode="after")
    def _fits_together(self) -> "RunConfig":
        for rule in RULES:
            rule(self)
        return self

    @property
    def run_dir(self) -> Path:
        """Return the directory where the run leaves its files."""
        return (self.run.dir or Path("runs") / self.run.name).expanduser()

    @property
    def going_on(self) -> str:
        """Say with which command a run that was stopped goes on after its newest checkpoint."""
        if self.checkpoint.resume == "never":
            return (
                "start the command again with checkpoint.resume=auto to continue; with checkpoint.resume=never, as it "
                "is, it would start over"
            )
        return "start the same command again to continue"

    @property
    def batch_rows(self) -> int:
        """Return B, the completions of one step."""
        return self.data.prompts_per_step * self.algorithm.group_size

    @property
    def sampled_rows(self) -> int:
        """Return the completions that are sampled at once; more than B with data.dynamic."""
        return self.data.prompts_per_round * self.algorithm.group_size

    @property
    def step_text(self) -> str:
        """Say how much a step learns from, and of how much that it samples."""
        data = self.data
        rounds = f", of {data.prompts_per_round} in up to {data.dynamic.rounds} rounds" * data.dynamic.is_on
        return f"{data.prompts_per_step} prompts x {self.algorithm.group_size} completions{rounds}"

    @property
    def drops_uninformative(self) -> bool:
        """Say whether groups of equal rewards have no part in the loss, nor in what it divides by."""
        return self.algorithm.drop_uninformative or self.data.dynamic.is_on

    @property
    def row_tokens(self) -> int:
        """Return the tokens of a training row; one that holds the longest sequence unless the setting says more."""
        return self.algorithm.row_tokens or self.context_tokens

    @property
    def step_rows(self) -> int:
        """Return the most training rows of a step, those of completions that are all as long as they may be."""
        return self._full_rows(self.batch_rows)

    @property
    def mini_batch_prompts(self) -> int:
        """Return the prompts of one update: those of a mini-batch, or of the whole step."""
        return self.algorithm.mini_batch_prompts or self.data.prompts_per_step

    @property
    def updates_per_step(self) -> int:
        """Return the optimizer's steps on one rollout."""
        return self.algorithm.iterations * (self.data.prompts_per_step // self.mini_batch_prompts)

    @property
    def update_rows(self) -> int:
        """Return the most training rows of an update, those of completions that are all as long as they may be."""
        return self._full_rows(self.mini_batch_prompts * self.algorithm.group_size)

    def _full_rows(self, completions: int) -> int:
        """Return the training rows that so many completions need when they are all as long as they may be."""
        return -(-completions // (self.row_tokens // self.context_tokens))

    def micro_batch_rows(self, devices: int) -> int:
        """Return the training rows of one forward and backward pass; they fill a mesh that splits them over devices."""
        prompts = self.algorithm.micro_batch_prompts
        if prompts is None:
            rows = max(-(-self.step_rows // MICRO_BATCHES), MICRO_BATCH_TOKENS * devices // self.row_tokens)
        else:
            rows = self._full_rows(prompts * self.algorithm.group_size)
        return -(-min(rows, self.update_rows) // devices) * devices

    def micro_batches(self, devices: int) -> int:
        """Return the most forward and backward passes that go once through a step."""
        updates = self.data.prompts_per_step // self.mini_batch_prompts
        return updates * -(-self.update_rows // self.micro_batch_rows(devices))

    @property
    def context_tokens(self) -> int:
        """Return the tokens of the longest sequence, prompt and completion together."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def data_paths(self) -> dict[str, str]:
        """Return every path by its setting: data.path, data.sources.0.path, evaluation.path.1 of a list."""
        sources = {f"data.sources.{index}.path": source.path for index, source in enumerate(self.data.sources)}
        held_out = {} if self.evaluation.path is None else {"evaluation.path": self.evaluation.path}
        found: dict[str, str] = {}
        for name, given in ((sources or {"data.path": self.data.path}) | held_out).items():
            several = isinstance(given, tuple)
            found |= {f"{name}.{n}": path for n, path in enumerate(given)} if several else {name: str(given)}
        return found

    def to_yaml(self) -> str:
        """Return the resolved config as YAML, every setting written out."""
        return yaml.dump(self.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, width=120)
