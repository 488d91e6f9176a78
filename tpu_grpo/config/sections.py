"""Every setting of a run, once."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from tpu_grpo.config import rules
from tpu_grpo.config.data import DataSection, EvaluationSection
from tpu_grpo.config.dialect import Dumper
from tpu_grpo.config.places import HostsSection, MeshesSection
from tpu_grpo.config.rewards import RewardSpec
from tpu_grpo.config.section import PositiveInt, Section
from tpu_grpo.config.training import LayerRanges, LoraSection


class RunSection(Section):
    """Which run this is."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Names the run; letters, digits, dot, dash and underscore."""
    dir: Path | None = None
    """Where the run leaves its files; runs/<name> when unset."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Decides sampling, shuffling and built-in model teaching."""
    max_steps: PositiveInt = 100
    """Steps of the whole run, resumed parts included; a step is one rollout with its updates."""


class ModelSection(Section):
    """The policy."""

    path: str = "builtin:addition"
    """A Hugging Face checkpoint directory, or builtin:addition (a small model taught on first use, then cached)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trainer's parameters and both sides' computation; logits and log-probabilities are float32 throughout."""
    attention: Literal["auto", "flash", "dot"] = "auto"
    """The trainer's. flash: Tunix's Pallas kernel (TPU), which stores no score of every token against every other; dot:
    any device; auto: flash on TPU where the family has it, dot elsewhere."""
    remat: Literal["none", "block", "decoder"] = "none"
    """What the backward pass recomputes instead of storing: nothing, attention, or whole layers."""
    train_layers: LayerRanges | None = None
    """Layers that are trained, e.g. 20-31; embeddings, the last norm and the head are not trained then. All parameters
    are when unset."""
    lora: LoraSection = LoraSection()


class RolloutSection(Section):
    """Sampling, and the engine that does it."""

    attention: Literal["auto", "flash", "gather", "native"] = "auto"
    """flash: sglang-jax's Pallas kernel, TPU only; gather: ours, any device; native: the library's reference, page size
    1, for comparison; auto: flash on TPU, gather elsewhere."""
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    """0 is greedy, which gives every sample of a group the same tokens."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the smallest set of likeliest tokens with at least this mass; 1 keeps all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Drop tokens less likely than this fraction of the likeliest; 0 keeps all."""
    max_new_tokens: PositiveInt = 256
    """Longest completion in tokens, stop token included."""
    max_running_requests: PositiveInt = 64
    """Rows that decode at once, per engine."""
    kv_tokens: PositiveInt | None = None
    """Size of an engine's KV cache in tokens; enough for max_running_requests full-length rows when unset."""
    page_size: PositiveInt = 1
    """Tokens per page of the KV cache."""
    prefill_tokens: PositiveInt = 2048
    """Most prompt tokens processed at once; longer prompts are prefilled in chunks of this size."""
    prefix_cache: bool = True
    """Keep computed prefixes, so that a group's prompt is prefilled once."""
    batch_paddings: tuple[PositiveInt, ...] | None = None
    """Decode batch sizes to compile; powers of 2 from 8 up to max_running_requests when unset."""
    release_during_update: bool = False
    """Free the engines' KV cache, and weights they do not share with the trainer, during the update; the weight sync
    brings the weights back and the cache is made anew. Same tokens."""

    @field_validator("batch_paddings")
    @classmethod
    def _some_batch_size(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value == ():
            raise ValueError("must name a batch size, got []; leave it unset for powers of 2")
        return value


LossAggregation = Literal["sequence-mean-token-mean", "token-mean", "sequence-mean-token-scale"]


class AlgorithmSection(Section):
    """GRPO (Shao et al. 2024, arXiv 2402.03300) and its variants."""

    name: str = "grpo"
    """The algorithm: grpo, dr_grpo, rloo, or a class of your own as path.py:Class or package.module:Class."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments for the constructor of a class of your own."""
    group_size: int = 8
    """G: completions sampled per prompt; their mean reward is the baseline."""
    beta: float = Field(default=0.0, ge=0.0)
    """Weight of the KL penalty against the initial policy; 0 keeps no reference model."""
    iterations: PositiveInt = 1
    """Updates on the same rollout."""
    old_policy: Literal["rollout", "trainer"] = "rollout"
    """Whose log-probabilities the ratio is taken against: the engine's, or the trainer's recomputed before the update
    and corrected towards the engine by truncated importance weights."""
    importance_cap: float = Field(default=2.0, gt=0.0)
    """Truncation of those weights (old_policy=trainer only)."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float | None = Field(default=None, gt=0.0)
    """The ratio is clipped above at 1 + clip_high; clip_low when unset."""
    advantage: Literal["grpo", "rloo", "drgrpo"] | None = None
    """Advantages of another algorithm in place of its own: grpo divides by the group's standard deviation; rloo leaves
    the row out of its baseline; drgrpo only centres. The algorithm's own when unset."""
    loss_aggregation: LossAggregation | None = None
    """How token losses become one number; token means are taken per micro-batch. The algorithm's own when unset:
    sequence-mean-token-mean for grpo, sequence-mean-token-scale for dr_grpo and rloo."""
    kl_estimator: Literal["low_var_kl", "kl", "mse_kl"] = "low_var_kl"
    """low_var_kl is the paper's (k3)."""
    micro_batch_prompts: PositiveInt | None = None
    """Prompts (groups) per forward and backward pass; gradients accumulate over them. All at once when unset."""

    @field_validator("group_size")
    @classmethod
    def _group_has_baseline(cls, value: int) -> int:
        if value < 2:
            raise ValueError(f"must be >= 2, got {value}; a group of one has no baseline")
        return value


class OptimizerSection(Section):
    """AdamW with a warm-up, a schedule and gradient clipping."""

    learning_rate: float = Field(default=1e-6, ge=0.0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or fall so that zero would come one update after the last."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the rate rises linearly from 0."""
    b1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """AdamW's decay of the first moment."""
    b2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """AdamW's decay of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Gradients are scaled down to this global norm."""


class CheckpointSection(Section):
    """Saving and continuing a run."""

    every: int = Field(default=0, ge=0)
    """Save after every this many steps, and at the end; 0 saves at the end only."""
    keep: PositiveInt = 2
    """Newest checkpoints kept."""
    keep_best: bool = True
    """Also save after an evaluation that is the best so far (evaluation.best), and keep that checkpoint."""
    resume: Literal["auto", "never", "require"] = "auto"
    """auto: continue from the newest checkpoint in run.dir if there is one; never: start anew (files of an earlier run
    are moved aside, not deleted); require: fail without a checkpoint."""


class LoggingSection(Section):
    """What is shown and where."""

    samples_every: int = Field(default=10, ge=0)
    """Show a table of samples every this many steps; 0 never."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Also log to Weights & Biases; online without an API key falls to offline, and says so."""
    wandb_project: str = "tpu_grpo"
    """Its project there."""


class RunConfig(Section):
    """A whole run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    rewards: tuple[RewardSpec, ...] = (RewardSpec(name="exact_answer"),)
    """The rewards, summed with their weights."""
    algorithm: AlgorithmSection = AlgorithmSection()
    optimizer: OptimizerSection = OptimizerSection()
    meshes: MeshesSection = MeshesSection()
    hosts: HostsSection = HostsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    logging: LoggingSection = LoggingSection()

    @model_validator(mode="after")
    def _fits_together(self) -> "RunConfig":
        for rule in rules.RULES:
            rule(self)
        return self

    @property
    def run_dir(self) -> Path:
        """Where the run leaves its files."""
        return (self.run.dir or Path("runs") / self.run.name).expanduser()

    @property
    def batch_rows(self) -> int:
        """B: completions per step."""
        return self.data.prompts_per_step * self.algorithm.group_size

    @property
    def micro_batch_prompts(self) -> int:
        """Prompts of one forward and backward pass: all of a step's unless algorithm.micro_batch_prompts is set."""
        return self.algorithm.micro_batch_prompts or self.data.prompts_per_step

    @property
    def micro_batch_rows(self) -> int:
        """Completions of one forward and backward pass."""
        return self.micro_batch_prompts * self.algorithm.group_size

    @property
    def micro_batches(self) -> int:
        """Forward and backward passes that one optimizer step accumulates over."""
        return self.data.prompts_per_step // self.micro_batch_prompts

    @property
    def context_tokens(self) -> int:
        """Longest sequence: prompt and completion."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def data_paths(self) -> dict[str, str]:
        """Every source that prompts are read from, by its setting: data.path, data.sources.0.path, evaluation.path."""
        sources = {f"data.sources.{index}.path": source.path for index, source in enumerate(self.data.sources)}
        held_out = {} if self.evaluation.path is None else {"evaluation.path": self.evaluation.path}
        return (sources or {"data.path": self.data.path}) | held_out

    def to_yaml(self) -> str:
        """The resolved config, every setting written out."""
        return yaml.dump(self.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, width=120)
