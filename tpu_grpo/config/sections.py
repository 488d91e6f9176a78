"""The settings of the run itself, policy, sampling, environments, devices, checkpoints, exports and logs."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_serializer, model_validator

from tpu_grpo.config.data_sections import BUILTIN, HUB, IsPath
from tpu_grpo.config.section import AutoOrCount, LayerRanges, Options, PlainName, PositiveInt, Section, expression, must
from tpu_grpo.records.errors import LARGEST_REWARD

IsDirectory = BeforeValidator(
    must(
        "be a directory, got the URL {}; mount the bucket, and name a directory there",
        lambda value: not isinstance(value, str) or "://" not in value,
    )
)
ToolFormat = Literal["auto", "hermes", "llama3", "qwen3_coder", "python"]


class RunSection(Section):
    """These settings say how the run is named, where its files are, how long it is, and how it is seeded."""

    name: PlainName = "run"
    """Name the run, with letters, digits, dot, dash and underscore. When unset, the config file's name is used, without
    .yaml."""
    dir: Annotated[Path | None, IsPath, IsDirectory] = None
    """Write the run's files to this directory; to runs/<name> when unset."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed sampling, shuffling and the training of the built-in model."""
    max_steps: PositiveInt = 100
    """End the whole run, resumed parts included, after this many steps; a step is one rollout with its updates."""
    epochs: float | None = Field(default=None, gt=0.0, le=1e6)
    """Go through the prompts of the data this many times, in place of max_steps, which then follows from the number of
    prompts and data.prompts_per_step. A file may set only one of the two; among overrides, the last one counts."""

    @model_validator(mode="before")
    @classmethod
    def _steps_follow_from_epochs(cls, given: Any) -> Any:
        """Treat ``max_steps: null`` together with epochs, as `to_yaml` writes it, as unset."""
        unset = isinstance(given, dict) and given.get("epochs") is not None and given.get("max_steps", 0) is None
        return {name: value for name, value in given.items() if name != "max_steps"} if unset else given

    @field_serializer("max_steps", when_used="json")
    def _unless_epochs_count(self, steps: int) -> int | None:
        return steps if self.epochs is None else None


class LoraSection(Section):
    """Adapters (Hu et al. 2021, arXiv 2106.09685) add A B alpha / rank to weights W; only A and B are trained."""

    rank: PositiveInt | None = None
    """Train adapters with this many columns of A and rows of B; no adapters when unset."""
    alpha: float = Field(default=16.0, gt=0.0)
    """Scale the adapters by alpha / rank."""
    targets: Annotated[str, expression("attn.(q|v)_proj")] = r"(q|k|v|o|gate|up|down)_proj"
    """Give an adapter to modules whose path, e.g. layers.3.attn.q_proj, matches this regular expression. The default
    matches all projections of attention and MLP; experts cannot have adapters."""
    layers: LayerRanges | None = None
    """Give adapters to these layers, e.g. 20-31 or 0-3,28-31; to all when unset."""
    path: Annotated[Path | None, IsPath] = None
    """Start from these adapters: a directory that PEFT saved, or a run under adapters/; they must have been made with
    this rank and alpha, for the same modules."""


class ModelSection(Section):
    """These settings describe the policy, and which parts of it are trained."""

    path: Annotated[str, IsPath] = "builtin:addition"
    """Train this model: a Hugging Face checkpoint directory; hf:OWNER/NAME or hf:OWNER/NAME@REVISION, which is fetched
    from the hub into its cache; or builtin:addition, builtin:calculator or builtin:guessing (small models that
    are trained on first use, then cached)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute in this type in engine and trainer, with the parameters cast to it; logits and log-probabilities are
    float32 throughout."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Keep and update the trained parameters in this type. bfloat16 needs optimizer.state=compact, which keeps 8 more
    bits of each parameter; otherwise small updates would be lost to rounding."""
    attention: Literal["auto", "flash", "dot"] = "auto"
    """Choose the trainer's attention. flash: jax's splash kernel (TPU), which does not store the matrix of attention
    scores; dot: any device; auto: flash on TPU, dot elsewhere."""
    remat: Literal["none", "block", "decoder"] = "none"
    """Recompute in the backward pass, instead of storing activations: nothing (none), attention (block), or whole
    layers (decoder)."""
    train_layers: LayerRanges | None = None
    """Train only these layers, e.g. 20-31, and neither embeddings nor the last norm nor the head; when unset, train
    everything."""
    lora: LoraSection = LoraSection()

    @property
    def builtin(self) -> str | None:
        """The task of a built-in model, after builtin: in ``path``; None for other models."""
        return self.path.removeprefix(BUILTIN) if self.path.startswith(BUILTIN) else None

    @property
    def hub(self) -> str | None:
        """OWNER/NAME or OWNER/NAME@REVISION of a model of the hub, after hf: in ``path``; None for other models."""
        return self.path.removeprefix(HUB) if self.path.startswith(HUB) else None


class RolloutSection(Section):
    """These settings say how completions are sampled, and describe the engine that does it."""

    attention: Literal["auto", "flash", "gather"] = "auto"
    """Choose the engine's attention. flash: sglang-jax's Pallas kernel, TPU only; gather: this package's, any device;
    auto: flash on TPU, gather elsewhere."""
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    """Divide the logits by this before sampling. 0 is greedy, which gives every sample of a group the same tokens and
    is refused for training."""
    top_k: int = Field(default=0, ge=0, lt=2**31)
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the smallest set of likeliest tokens whose probabilities add up to at least this; 1 keeps all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Drop tokens whose probability is below this fraction of the likeliest token's; 0 keeps all."""
    max_new_tokens: PositiveInt = 256
    """End a completion after this many tokens, stop token included."""
    max_running_requests: PositiveInt = 64
    """Decode up to this many rows concurrently in each engine."""
    kv_tokens: PositiveInt | None = None
    """Give each engine's KV cache this many tokens; enough for max_running_requests full-length rows when unset."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Keep keys and values in this type. auto: model.dtype; fp8: 8 bits each, which halve the cache of a bfloat16
    model, but engine and trainer agree less."""
    weights_dtype: Literal["auto", "int8"] = "auto"
    """Sample with weights of this type. auto: model.dtype; int8: the layers' matrices in 8 bits with a scale for each
    output, rounded to nearest at every weight sync, for models without experts. Engine and trainer agree less;
    algorithm.old_policy is then trainer unless set, whose importance weights correct for that."""
    page_size: PositiveInt = 1
    """Divide the KV cache into pages of this many tokens."""
    prefill_tokens: PositiveInt = 2048
    """Process up to this many prompt tokens in one prefill; longer prompts are prefilled in chunks of this size."""
    prefix_cache: bool = True
    """Keep computed prefixes, so that a group's prompt is prefilled once."""
    batch_paddings: Annotated[
        tuple[PositiveInt, ...] | None,
        AfterValidator(must("name a batch size, got {}; leave it unset for powers of 2", len)),
    ] = None
    """Compile decode steps for these batch sizes; powers of 2 from 8 up to max_running_requests when unset."""
    steps_per_launch: AutoOrCount = "auto"
    """Decode up to this many tokens of each row before the host reads them; auto: 4 to 32 by the model's size."""
    partial_extra: float = Field(default=0.0, ge=0.0, le=4.0)
    """Sample P(1 + partial_extra) groups at the same time, where P is data.prompts_per_step. A step ends its rollout
    once P of them are complete and learns from these; the next step continues the others. With 0, every step waits for
    its longest completion."""
    partial_steps: PositiveInt = 4
    """Do not end a step's rollout before the groups begun this many steps earlier are complete; only with
    partial_extra."""
    release_during_update: bool = False
    """Free the engines' KV cache, and weights they do not share with the trainer, during the update; the weight sync
    restores the weights, and the cache is allocated again. Sampled tokens do not change."""

    @property
    def filters(self) -> dict[str, float]:
        """Name -> value of the active filters among top_k, top_p and min_p."""
        neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return {name: value for name, off in neutral.items() if (value := getattr(self, name)) != off}

    @property
    def rounding_text(self) -> str:
        """What evaluations by these engines add to their titles, if the engines sample another policy than exported."""
        return ", sampled with int8 weights" if self.weights_dtype == "int8" else ""


class EnvironmentSection(Section):
    """These settings describe environments for conversations: tools and turns. Without a name there is no environment,
    and a completion is a single answer."""

    name: Annotated[
        str | dict[PlainName, str] | None,
        AfterValidator(must("name an environment, got {!r}; leave it unset for none", bool)),
    ] = None
    """Have conversations with this environment: a shipped name (docs/environments.md lists them), path.py:Class or
    package.module:Class; or with several, {name: environment}: the column `environment` of the data then chooses."""
    options: Options = Field(default={})
    """Pass these keyword arguments to the environment's constructor."""
    workers: AutoOrCount = "auto"
    """Allow this many concurrent conversations on each host, each with its environment in a separate process. All
    engines of a host share this limit. Environments with async tools share processes: for these, this is the number of
    processes. auto: no limit, but one process for environments with async tools."""
    timeout: float = Field(default=60.0, gt=0.0)
    """Give each call of a tool, and every other call of an environment, this many seconds."""
    max_turns: PositiveInt = 8
    """End a conversation after this many turns of the policy."""
    max_turn_tokens: PositiveInt | None = None
    """Sample at most this many tokens in a turn; when unset, the rest of rollout.max_new_tokens (the limit for the
    conversation after its prompt, answers of the environment included)."""
    max_observation_tokens: PositiveInt = 512
    """Cut an environment's answers in a turn after this many tokens, shared by the answers to several calls."""
    tool_format: ToolFormat = "auto"
    """Parse tool calls in this format. hermes: JSON in <tool_call> tags, as Qwen writes it; llama3: JSON alone;
    qwen3_coder: XML in <tool_call> tags; python: calls as in Python. auto: what the chat template shows."""
    on_error: Literal["stop", "skip", "value"] = "stop"
    """Do this when an environment raises outside of a tool, times out, dies, or returns an invalid value. stop: the run
    ends and says why; skip: the conversation ends there, is not learned from, and counts in no mean of rewards; value:
    the conversation ends there, and each reward, and the sum of rewards, is error_value. A tool that raises is not such
    a case: the policy is told the exception."""
    error_value: float = Field(default=0.0, ge=-LARGEST_REWARD, le=LARGEST_REWARD)
    """Give this reward to a conversation whose environment failed, when on_error is value."""
    turn_credit: Literal["episode", "turn"] = "episode"
    """Give all turns the advantage of their conversation (episode), or add to each turn's advantage (turn) the sum of
    rewards from that turn on, minus the mean of this sum over the group's conversations that reached that turn."""
    memory_gb: float = Field(default=8.0, gt=0.0)
    """Let an environment's process allocate this much memory, in GB."""
    secrets: tuple[str, ...] = ()
    """Pass these environment variables on to the environments' processes, e.g. [MY_API_KEY]; variables whose names look
    secret, such as HF_TOKEN, are withheld otherwise."""
    recycle: PositiveInt = 1000
    """Replace a process by a fresh one after this many conversations."""
    tool_steps: int = Field(default=16, ge=0, lt=2**31)
    """Continue a conversation this many decode steps after its turn has ended; meanwhile its environment answers, and
    other conversations decode. An engine without other work continues as soon as the environment has answered. With 0
    every engine does so; then wall-clock time decides which conversations decode together."""

    @property
    def is_on(self) -> bool:
        """Whether the policy has conversations with environments."""
        return self.name is not None

    @property
    def names(self) -> dict[str, str]:
        """The environments by their names in the column `environment`; a single environment has the name ""."""
        return self.name if isinstance(self.name, dict) else {} if self.name is None else {"": self.name}


class TrainerMeshSection(Section):
    """These settings are the shape of the trainer's mesh."""

    fsdp: PositiveInt | None = None
    """Split parameters and batch rows over this many devices; when unset, over the trainer's devices / tp."""
    tp: PositiveInt = 1
    """Split heads and hidden units over this many devices."""


class SamplerMeshSection(Section):
    """These settings divide the sampler's devices into replicas, one engine each."""

    hosts: PositiveInt | None = None
    """With meshes.layout=split on several hosts, give the sampler this many of the last hosts, and the trainer the
    rest; when unset, half of the hosts, rounded down."""
    tensor: PositiveInt | None = None
    """Split the model's heads and hidden units over this many devices in each replica; when unset, over the fewest
    devices that hold at most 4 GiB of weights each."""


class MeshesSection(Section):
    """These settings say how devices are used."""

    slices: PositiveInt = 1
    """Use this many equal TPU slices, joined by the data-center network. Each trains a copy of the policy on its share
    of the micro-batches, and once per update the gradients of all slices are added. Without TPUs, processes are divided
    evenly, in their order."""
    layout: Literal["shared", "split"] = "shared"
    """Share a slice's devices or split them. shared: trainer and sampler both use all devices, in turn; split: the
    sampler has the last hosts (meshes.sampler.hosts), and the trainer has the rest; on one host, the trainer has the
    first half of the devices."""
    sync_temporary_mib: PositiveInt = 512
    """Let the weight sync take this much temporary memory in MiB per device, beside the weights themselves."""
    probe_every: int = Field(default=50, ge=0, lt=2**31)
    """Compare the weights and some log-probabilities of engines and trainer after the first weight sync and then at
    this interval of syncs; 0 never compares."""
    probe_bound: float | None = Field(default=None, gt=0.0)
    """Stop the run when the compared log-probabilities differ by more than this on average; when unset, 1e-3 in float32
    and 0.2 in bfloat16, but at least 0.5 with rollout.kv_dtype=fp8 or rollout.weights_dtype=int8."""
    trainer: TrainerMeshSection = TrainerMeshSection()
    sampler: SamplerMeshSection = SamplerMeshSection()


class HostsSection(Section):
    """These settings join several processes into one run."""

    coordinator: str | None = None
    """Connect to the other processes at this host:port of process 0; needed only outside TPU slices."""
    count: PositiveInt = 1
    """Expect this many processes in the run."""
    index: int = Field(default=0, ge=0, lt=2**31)
    """Number this process, from 0, among all processes; process 0 coordinates the start."""
    check: Literal["rollout", "step"] = "rollout"
    """Let processes that share a replica compare its scheduling and tokens after every rollout, or before every launch
    of the engine (step), so that an error names the first launch that differs."""
    start_timeout_seconds: float = Field(default=300.0, gt=0.0)
    """Wait this many seconds for the other processes at start-up."""
    lost_timeout_seconds: float = Field(default=40.0, ge=2.0)
    """Regard a process as lost that sends no heartbeat for this many seconds, and end the others; a process that is
    only slow still sends heartbeats."""


class CheckpointSection(Section):
    """These settings say when a run is saved and whether it is continued."""

    every: int = Field(default=0, ge=0, lt=2**31)
    """Save at this interval of steps, and at the end; 0 saves at the end only."""
    keep: PositiveInt = 2
    """Keep this many of the newest checkpoints."""
    keep_best: bool = True
    """Also save after an evaluation that is the best so far (evaluation.best), and keep that checkpoint."""
    resume: Literal["auto", "never", "require"] = "auto"
    """Continue an earlier run or start anew. auto: continue from the newest checkpoint in run.dir if there is one;
    never: start anew (files of an earlier run are moved aside, not deleted); require: fail without a checkpoint."""
    allow_changes: tuple[str, ...] = ()
    """Continue although these settings, or settings in these sections, have changed, e.g.
    [optimizer.learning_rate, rewards]. Other changes are refused if they make earlier and later results incomparable.
    The entry data also allows other prompts than before, and all allows every change."""


class ExportSection(Section):
    """These settings say how a model is exported in Hugging Face's format, at the end of the run and by
    scripts/export.py."""

    every: Literal["best", "last"] | None = None
    """At the end of the run, export its model to run.dir/exports: that of the best step (evaluation.best), or of the
    last step; none when unset."""
    kind: Literal["model", "adapter"] = "model"
    """Write the whole model, into which adapters are merged, or the adapters alone, in the format of PEFT."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Write tensors in this type; in model.dtype when unset. float32 writes the parameters as trained, even if the
    policy computes in bfloat16."""
    shard_mib: PositiveInt = 4096
    """Write files of up to this many MiB of tensors each; a larger tensor gets a file of its own."""


class LoggingSection(Section):
    """These settings say what is shown, and where."""

    samples_every: int = Field(default=10, ge=0, lt=2**31)
    """Show a table of samples at this interval of steps; 0 never shows one."""
    report: bool = True
    """Write the page report.html while the run goes on, and however it ends."""
    tensorboard: bool = False
    """Also write event files for TensorBoard, in run.dir/tensorboard."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Also log to Weights & Biases; online without an API key falls back to offline, and says so."""
    wandb_project: str = "tpu_grpo"
    """Log to this project of Weights & Biases."""
    wandb_entity: str | None = None
    """Log to the projects of this user or team of Weights & Biases; your default one when unset."""
    wandb_group: str | None = None
    """Show the run in this group of runs of Weights & Biases; in none when unset."""
    histograms_every: int = Field(default=0, ge=0, lt=2**31)
    """Log histograms of the trained parameters and their gradients to TensorBoard and Weights & Biases at this interval
    of steps; 0 logs none."""
    callbacks: tuple[str, ...] = ()
    """Call these classes of your own, path.py:Class or package.module:Class, with the metrics and samples of every step
    and evaluation, on host 0; see docs/logging.md."""
    against: str | None = None
    """Compare the run, at its end, with a published run: the name of a config under configs/reference, or a
    file of your own in the format of the .json files there."""
    profile_steps: tuple[PositiveInt, ...] = ()
    """Record a timeline of these steps, e.g. [3, 4], in run.dir/profile, for Perfetto and TensorBoard."""

    @property
    def has_trackers(self) -> bool:
        """Whether the run logs to TensorBoard or Weights & Biases."""
        return self.tensorboard or self.wandb != "off"
