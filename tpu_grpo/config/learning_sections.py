"""The settings of learning: algorithm, optimizer, and updates that are not finite."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tpu_grpo.config.data_sections import IsPath
from tpu_grpo.config.section import Options, PlainName, PositiveInt, Section
from tpu_grpo.config.sections import ModelSection

LossAggregation = Literal[
    "sequence-mean-token-mean",
    "token-mean",
    "sequence-mean-token-sum",
    "sequence-mean-token-scale",
    "prompt-mean-token-mean",
]
AdvantageName = Literal[
    "grpo",
    "drgrpo",
    "dr_grpo",
    "rloo",
    "lite_ppo",
    "scale_rl",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "max_rl",
    "gdpo",
]
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "scalerl": {
        "name": "cispo",
        "advantage": "scale_rl",
        "loss_aggregation": "prompt-mean-token-mean",
        "group_size": 16,
        "drop_uninformative": True,
    },
}
"""Preset -> defaults of settings in the algorithm section. ScaleRL: arXiv 2510.13786."""
TAUGHT = ("distill", "gkd")
"""The algorithms that learn from teachers, and from no reward."""


class TeacherSpec(Section):
    """This is one teacher of the list: a frozen model that draws the policy to itself at every sampled token."""

    path: Annotated[str | None, IsPath] = None
    """Learn from this model, whose tokenizer must be the policy's: anything that model.path takes, and
    builtin:careful_addition. When unset, the policy as it was before the first step is the teacher."""
    label: PlainName | None = None
    """Use this name for the teacher in metrics; when unset, the last part of its path, or self."""
    weight: float = Field(default=1.0, ge=0.0)
    """Multiply what this teacher teaches by this factor. With 0, only the distance to it is measured."""
    only_if: str | None = None
    """Learn from this teacher only on prompts whose record has a true value (not 0, false or empty) in this column."""
    hint: str = ""
    """Show the teacher, but not the policy, this Python format string over the record's columns, in a system message
    before the prompt or at the end of its system message; e.g. "A solution: {answer}"."""
    max_prompt_tokens: PositiveInt | None = None
    """Accept prompts with a hint of up to this many tokens; data.max_prompt_tokens when unset."""
    update_rate: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Without path, move the teacher after every step by this share of the way to the policy (a moving average, kept in
    float32); with 0, it stays the policy of the start."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Keep the teacher and compute with it in this type; in model.dtype when unset."""
    mesh: Literal["trainer", "sampler"] = "trainer"
    """Hold and run the teacher on the trainer's devices, or on the sampler's, if it does not fit beside the trainer;
    sampler needs meshes.layout=split."""
    offload: bool = False
    """Keep the teacher in the hosts' memory, and copy it to the devices for its forward passes in each step."""

    @property
    def shown(self) -> str:
        """The teacher's name in metrics."""
        return self.label or (self.path or "self").rstrip("/").rpartition("/")[2].rpartition(":")[2]

    def as_model(self, dtype: Literal["float32", "bfloat16"] = "float32") -> ModelSection | None:
        """Return the settings of a policy with this model, which computes in ``dtype`` unless the teacher has its own;
        None for the policy of the start."""
        return None if self.path is None else ModelSection(path=self.path, dtype=self.dtype or dtype)


class AlgorithmSection(Section):
    """These settings choose GRPO (Shao et al. 2024, arXiv 2402.03300), a variant of it, or an algorithm of your own."""

    preset: Literal["scalerl"] | None = None
    """Use this preset's defaults in this section; settings beside it override them. scalerl (arXiv 2510.13786):
    name=cispo, advantage=scale_rl, loss_aggregation=prompt-mean-token-mean, group_size=16, drop_uninformative=true."""
    name: str = "grpo"
    """Train with this algorithm: grpo, dr_grpo, rloo, dapo, gspo, luspo, cispo, dppo, sapo, vespo, reinforce; distill
    or gkd, which learn from teachers alone; or a class of your own as path.py:Class or package.module:Class. For
    Tunix's own learner: tunix:NAME, where NAME is dapo, drgrpo, a policy loss of Tunix's registry such as grpo, or
    path.py:NAME for a loss that this file registers."""
    options: Options = Field(default={})
    """Pass these keyword arguments to the algorithm's constructor: cap to cispo; per_token to gspo and luspo; mask_low,
    mask_high and kl_weight to dppo; temperature_positive and temperature_negative to sapo; k_positive, lambda_positive,
    k_negative and lambda_negative to vespo; importance_sampling to reinforce; mix and top_k to gkd; its own arguments
    to a class of your own; with tunix:NAME the options of Tunix's config, under Tunix's names."""
    group_size: PositiveInt = 8
    """Sample this many completions, called G, per prompt (a group); the group's mean reward is the baseline. Only
    distill and gkd, which need no baseline, take a group of one."""
    beta: float = Field(default=0.0, ge=0.0)
    """Multiply the KL penalty against the initial policy by this; 0 keeps no reference model."""
    iterations: PositiveInt = 1
    """Go through the same rollout this many times, each time with one update, or one update per mini-batch."""
    staleness: Literal[0, 1] = 0
    """0: sample every step with the newest weights. 1: sample the next step's rollout during the update, so that a step
    learns from completions that are one step old; needs meshes.layout=split over several hosts."""
    mini_batch_prompts: PositiveInt | None = None
    """Update once for this many prompts, with all completions of each, as PPO does: every iteration shuffles the
    prompts by run.seed and step, and cuts them into mini-batches. When unset, an iteration makes one update."""
    old_policy: Literal["rollout", "trainer", "tunix"] = "rollout"
    """Compute the ratio to the old policy from these log-probabilities: the engine's (rollout), or the trainer's before
    the first update, corrected towards the engine by truncated importance weights (trainer), or those that Tunix's
    learner chooses (tunix, only with name=tunix:...). When unset, trainer with rollout.weights_dtype=int8."""
    importance_cap: float | None = Field(default=None, gt=0.0)
    """Truncate the importance weights of old_policy=trainer at this, or use it as the upper bound of the ratios of
    algorithm.correction. Unset: 1.01 for correction=geometric, otherwise 2."""
    importance_floor: float | None = Field(default=None, gt=0.0)
    """Use this lower bound for the ratios of algorithm.correction. Unset: 0.99 for geometric, otherwise none."""
    correction: Literal["token", "sequence", "geometric"] | None = None
    """Correct for the difference of engine and trainer by the ratio of their probabilities of each token (token), or by
    the product (sequence) or geometric mean of a completion's ratios. Unset: truncated token weights for
    old_policy=trainer, no correction for rollout."""
    correction_mode: Literal["truncate", "mask"] = "mask"
    """Clip the ratios of algorithm.correction at their bounds (truncate, for old_policy=trainer), or leave out the
    tokens or completions beyond the bounds (mask)."""
    veto_low: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Leave out completions that hold a token whose ratio of trainer to engine is below this, e.g. 0.0001."""
    veto_high: float | None = Field(default=None, gt=1.0)
    """Leave out completions that hold a token whose ratio of trainer to engine is above this, e.g. 100."""
    opsm: float | None = Field(default=None, gt=0.0)
    """Leave out completions of negative advantage from which the policy has moved away by more than this many nats per
    token since they were sampled (off-policy sequence masking, arXiv 2512.02556)."""
    filtered_ratio: bool = False
    """Compute log-probabilities, ratio and entropy over the tokens that rollout.top_k, top_p and min_p keep, in engine
    and trainer. Otherwise all three are of the full distribution, although tokens are drawn from the filtered one."""
    routing_replay: bool | None = None
    """Route the trainer's tokens to the experts that the engine chose for them (R3, arXiv 2510.11370); only for models
    with experts. The reference model chooses its own experts. When unset, true in bfloat16 without
    rollout.partial_extra."""
    clip_low: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Clip the ratio below at 1 - clip_low. When unset: 0.2, but 0.0003 for gspo, 0.002 for luspo, and no lower clip
    for cispo."""
    clip_high: float | None = Field(default=None, gt=0.0)
    """Clip the ratio above at 1 + clip_high. When unset: clip_low, but 0.28 for dapo, 0.0004 for gspo and 0.0025 for
    luspo; cispo then clips the ratio at its option cap, which is 5 by default."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Let the clipped surrogate of a negative advantage fall no further than this many times the advantage (dual clip,
    arXiv 1912.09729)."""
    delta: float | None = Field(default=None, gt=1.0)
    """Clip the ratio at this, above 1 + clip_high, if the advantage is negative (two-sided clip, arXiv 2505.07291)."""
    advantage: AdvantageName | None = None
    """Use these advantages in place of the algorithm's own: grpo divides by the group's standard deviation; drgrpo
    (also dr_grpo) only centres; rloo leaves each row out of its own baseline; lite_ppo divides by the standard
    deviation of the step's rewards, scale_rl by that of the step's centred rewards; reinforce_pp whitens over the
    step's tokens, and reinforce_pp_baseline does so after centring; max_rl divides by the group's mean; gdpo
    standardizes each reward by itself. When unset, the algorithm's own advantages apply."""
    loss_aggregation: LossAggregation | None = None
    """Reduce the token losses of a whole step to one number in this way. When unset, the algorithm decides:
    sequence-mean-token-mean for grpo, gspo and sapo, token-mean for dapo, cispo, dppo and vespo,
    sequence-mean-token-sum for luspo, sequence-mean-token-scale for dr_grpo, rloo and reinforce."""
    kl_estimator: Literal["k1", "k2", "k3", "kl", "mse_kl", "low_var_kl"] | None = None
    """Estimate the KL divergence by this: k1 (also kl), k2 (mse_kl) or k3 (low_var_kl). When unset, k1 with
    kl_in=reward, otherwise k3, as in the paper."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL penalty to the loss of every token (loss), or subtract the estimate k1, centred over the step and
    without gradient, from every token's advantage (reward)."""
    kl_unbiased: bool = False
    """Multiply the estimates low_var_kl and kl by the ratio to the old policy, so that the gradient is that of the KL
    divergence (arXiv 2512.02556)."""
    entropy_bonus: float = Field(default=0.0, ge=0.0)
    """Subtract the policy's entropy at every token, times this, from the loss; with entropy_target, this is the first
    coefficient."""
    entropy_target: float | None = Field(default=None, gt=0.0)
    """Adapt the coefficient of the entropy bonus: after an update whose mean entropy is at most this many nats,
    the coefficient grows by entropy_step; otherwise it falls by entropy_step, and the next update has no bonus (arXiv
    2505.22312)."""
    entropy_step: float | None = Field(default=None, gt=0.0)
    """Change the coefficient of the entropy bonus by this after an update, for entropy_target; 0.005 when unset."""
    top_entropy_quantile: float = Field(default=1.0, ge=0.0, le=1.0)
    """Learn from this share of an update's tokens only, those with the highest entropy, e.g. 0.2 (arXiv 2506.01939). It
    multiplies the algorithm's loss, not the KL penalty or the entropy bonus, and needs a further forward pass."""
    reference_reset_every: PositiveInt | None = None
    """Replace the reference of the KL penalty by a copy of the policy at this interval of steps; when unset, the
    initial policy stays the reference."""
    drop_uninformative: bool = False
    """Leave groups whose completions all have the same reward, so that their advantages are 0, out of the loss and of
    the denominators of its means."""
    truncated: Literal["keep", "mask"] = "keep"
    """Train on completions that were cut at rollout.max_new_tokens (keep), or leave them out of the loss; their rewards
    still count for their group's baseline. The shipped reward overlong penalises them."""
    row_tokens: PositiveInt | None = None
    """Pack prompts and completions into training rows of this many tokens. The minimum is data.max_prompt_tokens +
    rollout.max_new_tokens. In longer rows, completions of a group share one copy of their prompt where this saves
    rows. When unset, rows have the minimum, or room for two or more completions that share a prompt, if
    data.max_prompt_tokens is at least 64 and a third of rollout.max_new_tokens."""
    micro_batch_prompts: PositiveInt | None = None
    """Use as many training rows per forward and backward pass as the groups of this many prompts fill when all their
    completions have the longest length; the gradients of the passes are added. When unset, a pass has an eighth of the
    rows that a whole step then fills, but at least 512 tokens per device; for a model below 4 million parameters on a
    CPU, it has at most 192 tokens."""

    @property
    def tunix(self) -> str | None:
        """The objective of Tunix's own learner: the name after tunix:; None for this package's learner."""
        return self.name.removeprefix("tunix:") if self.name.startswith("tunix:") else None

    @property
    def learns_from_rewards(self) -> bool:
        """Whether rewards give advantages; with distill and gkd they are only measured."""
        return self.name not in TAUGHT

    @property
    def replays_routing(self) -> bool:
        """Whether the engine returns its choices of experts, and the trainer replays them."""
        return self.routing_replay is True

    @property
    def passes(self) -> int:
        """The number of passes over a rollout: iterations, or Tunix's option num_iterations."""
        return self.iterations if self.tunix is None else int(self.options.get("num_iterations", 1))

    @property
    def truncates_importance(self) -> bool:
        """Whether truncated importance weights multiply the token losses: those of old_policy=trainer, unless
        algorithm.correction chooses others."""
        return self.old_policy == "trainer" and self.correction is None

    @property
    def upper_importance(self) -> float:
        """The upper limit of the importance weights of old_policy=trainer: importance_cap, or 2 when that is unset."""
        return 2.0 if self.importance_cap is None else self.importance_cap

    @property
    def kl_estimate(self) -> Literal["kl", "mse_kl", "low_var_kl"]:
        """The estimator of the KL divergence by its name in Tunix: kl is k1, mse_kl is k2, low_var_kl is k3."""
        match self.kl_estimator or ("k1" if self.kl_in == "reward" else "k3"):
            case "k1" | "kl":
                return "kl"
            case "k2" | "mse_kl":
                return "mse_kl"
            case _:
                return "low_var_kl"

    @property
    def entropy_change(self) -> float:
        """The change of an adaptive entropy coefficient per update: entropy_step, or 0.005 if that is unset."""
        return 0.005 if self.entropy_step is None else self.entropy_step

    @property
    def lower_clip(self) -> float:
        """The clip_low that a user's own class gets: clip_low, or 0.2 when that is unset."""
        return 0.2 if self.clip_low is None else self.clip_low

    @property
    def upper_clip(self) -> float:
        """The clip_high that a user's own class gets: clip_high, or `lower_clip` when that is unset."""
        return self.lower_clip if self.clip_high is None else self.clip_high

    @model_validator(mode="before")
    @classmethod
    def _preset_gives_defaults(cls, given: Any) -> Any:
        preset = given.get("preset") if isinstance(given, dict) else None
        return {**PRESETS[preset], **given} if isinstance(preset, str) and preset in PRESETS else given


class UpdateSection(Section):
    """These settings say what happens to an update whose loss or gradient is not finite."""

    on_non_finite: Literal["stop", "skip"] = "stop"
    """End the run (stop), or leave the update out and go on (skip), for at most 10 updates in a row. In both cases
    parameters and optimizer stay as they were."""


class OptimizerSection(Section):
    """These settings choose the optimizer, its schedule and gradient clipping."""

    name: str = "adamw"
    """Update with this optimizer: adamw, adamw_8bit, adafactor, muon, lion, sgd, or a function of your own that takes
    learning_rate and returns an optax transformation, as path.py:function or package.module:function."""
    options: Options = Field(default={})
    """Pass these keyword arguments to the optimizer: eps to adamw; momentum and nesterov to sgd; beta, ns_steps and rms
    to muon; decay_rate and clip_rms to adafactor; its own arguments to a function of your own."""
    state: Literal["full", "compact"] = "full"
    """Keep the optimizer's moments in float32 (full), or in 8 bits (compact); compact also keeps the bits of parameters
    that model.param_dtype=bfloat16 drops. adamw_8bit is adamw with compact."""
    learning_rate: float = Field(default=1e-6, ge=0.0)
    """Set the peak of the learning rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """After the warm-up, keep the rate constant, or let it fall, right away (linear, cosine) or in the last decay_steps
    updates (wsd). A falling rate would reach zero one update after the last update."""
    warmup_steps: int = Field(default=0, ge=0, lt=2**31)
    """Let the rate rise linearly from 0 over this many updates."""
    decay_steps: int = Field(default=0, ge=0, lt=2**31)
    """Let the rate fall over this many updates at the end; for schedule=wsd."""
    schedule_steps: PositiveInt | None = None
    """Let the rate fall as in a longer run of this many updates, of which this run does the first part; when unset, by
    this run's own length."""
    b1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay the first moment of AdamW by this; in an update of Lion, weight the momentum by this, and the gradient by
    1 - b1."""
    b2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay the second moment of AdamW, or the momentum of Lion, by this."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decay the weights by this, decoupled from the gradient."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Scale gradients down to this global norm."""

    @property
    def ends_with_run(self) -> bool:
        """Whether the learning rate depends on the last step of the run."""
        return self.schedule != "constant" and self.schedule_steps is None

    @property
    def compact(self) -> bool:
        """Whether the optimizer keeps its state in 8 bits."""
        return self.state == "compact" or self.name == "adamw_8bit"
