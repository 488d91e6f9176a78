"""The seconds of a step of a run, stage by stage, for completions of the longest length or of a mean length.

    prefill    each prompt once, or for each of its completions without a prefix cache      engine_steps.py
    decode     simulated, with the tail of the longest completions                          decoding.py
    logprobs   a forward pass, for the reference or the old policy                          training.py
    update     forward and backward passes, and the optimizer's step                        training.py
    sync       what moves, through links and memory

rates.py holds the constants; sizes.py and `StepWork` what the seconds are computed from.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp

from tpu_grpo.config import RunConfig
from tpu_grpo.engine.vocabulary import splits_vocabulary
from tpu_grpo.launching.tpus import Generation
from tpu_grpo.models.families.flash_attention import whole_blocks
from tpu_grpo.planning import rates
from tpu_grpo.planning.decoding import decode, step_seconds
from tpu_grpo.planning.engine_steps import add, host_seconds, prefill_step, round_seconds
from tpu_grpo.planning.lengths import completion_lengths
from tpu_grpo.planning.programs import GRADIENTS, OPTIMIZER_STEP, CompiledProgram, takes_logprobs
from tpu_grpo.planning.resident import ResidentBytes
from tpu_grpo.planning.sizes import EngineSizes, TokenCost
from tpu_grpo.planning.training import TrainerSizes, link_seconds, packed_passes, pass_seconds
from tpu_grpo.run.abstract import AbstractRun

ASSUMPTIONS = (
    f"of a chip's products {rates.PRODUCTS:.0%} are reached by the learner and {rates.PREFILL:.0%} by prefills, of its "
    f"memory's speed {rates.MEMORY:.0%}, of its usable links' {rates.LINKS:.0%}; attention gets through at most "
    f"{rates.CACHE_BYTES_PER_SECOND / 1e9:.0f} GB/s of keys and values, "
    "and in 8 bits at half as many",
    "a launch of an engine takes its host half a millisecond, and more for arrays, devices and rows; one thread drives "
    "the engines of a host",
    f"every prompt has data.max_prompt_tokens tokens; training rows are packed to {rates.FILL:.0%}",
    "rewards, evaluation, checkpoints, and the filters top-k, top-p and min-p take no time",
)
MEAN_ASSUMPTION = (
    "lengths with a mean are log-normal, with a standard deviation of their logarithm of "
    f"{rates.SPREAD}, and cut at rollout.max_new_tokens"
)


@dataclass(frozen=True)
class StageTime:
    """The seconds of one stage of a step."""

    stage: str
    by_cause: Mapping[str, float]
    """Seconds by what they are spent on; they add up."""
    beside: Mapping[str, float] = field(default_factory=dict)
    """What goes on meanwhile, and takes no time of its own."""

    @property
    def seconds(self) -> float:
        """The stage's duration."""
        return sum(self.by_cause.values())

    @property
    def largest(self) -> str:
        """What most of the time is spent on."""
        return max(self.by_cause, key=lambda cause: self.by_cause[cause])


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step."""

    completion_tokens: int
    """The tokens of all completions."""
    stages: tuple[StageTime, ...]

    @property
    def seconds(self) -> float:
        """The step's duration."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens in a second of the whole step."""
        return self.completion_tokens / self.seconds

    def of(self, *stages: str) -> float:
        """Return the seconds of some stages together."""
        return sum(stage.seconds for stage in self.stages if stage.stage in stages)


@dataclass(frozen=True)
class StepWork:
    """Everything that the seconds of a step depend on."""

    config: RunConfig
    generation: Generation
    engine: EngineSizes
    hosts: tuple[tuple[int, ...], ...]
    """For each host the completions that each of its engines samples in a step."""
    rungs: tuple[int, ...]
    """The numbers of rows that decode steps are compiled for; the last one is that of an engine's slots."""
    trainer: TrainerSizes
    accessed_bytes: Mapping[str, float]
    """The compiler's count for the learner's programs, per device, by their names."""
    synced_bytes: float
    """What a weight sync moves to each of the sampler's devices."""
    devices: int
    """The devices of trainer and sampler."""
    launch_steps: int = 1
    """The decode steps of a launch."""

    @classmethod
    def of(
        cls, run: AbstractRun, generation: Generation, resident: ResidentBytes, programs: Sequence[CompiledProgram]
    ) -> "StepWork":
        """Collect it from the run's parts."""
        moved = sum(move.bytes for move in run.sync.moves if not move.frozen)
        return cls(
            config=run.config,
            generation=generation,
            engine=_engine_sizes(run, resident),
            hosts=_rows_by_host(run),
            rungs=run.options.shapes.batch,
            trainer=_trainer_sizes(run, resident),
            accessed_bytes={program.name: program.accessed_bytes for program in programs if program.stage != "rollout"},
            synced_bytes=moved / len(run.meshes.sampler_devices),
            devices=len({*run.meshes.sampler_devices, *run.meshes.trainer.devices.flat}),
            launch_steps=run.engine.steps_per_launch,
        )

    def step(self, mean_new_tokens: float | None = None) -> StepTime:
        """Estimate a step with completions of this mean length, or that are all as long as they may be."""
        config, longest = self.config, self.config.rollout.max_new_tokens
        lengths = [longest] * config.sampled_rows
        if mean_new_tokens is not None:
            lengths = completion_lengths(config.sampled_rows, mean=mean_new_tokens, longest=longest)
        sampled = sum(lengths)
        tokens = round(sampled * config.batch_rows / config.sampled_rows)  # that are learnt from
        stages = [StageTime("prefill", self._prefill()), StageTime("decode", self._decode(lengths))]
        if takes_logprobs(config):
            count = (config.algorithm.beta > 0.0) + (config.algorithm.old_policy == "trainer")
            stages.append(self._passes("logprobs", "log-probabilities", tokens, count))
        updates = config.updates_per_step
        iterated = tokens * config.algorithm.iterations
        update = self._passes("update", GRADIENTS, iterated / updates, updates, config.mini_batch_prompts)
        stepping = self._memory_seconds(self.accessed_bytes[OPTIMIZER_STEP]) * updates
        stages.append(StageTime("update", {**update.by_cause, "optimizer": stepping}, update.beside))
        return StepTime(sampled, (*stages, StageTime("sync", self._sync())))

    def _prefill(self) -> dict[str, float]:
        """Each engine takes in its prompts, chunk by chunk; the engines of a host do so in turn, as in decoding."""
        config, total = self.config, dict[str, float]()
        length, shared = config.data.max_prompt_tokens, config.rollout.prefix_cache
        engines = max(self.hosts, key=sum)
        prompts = [rows // config.algorithm.group_size if shared else rows for rows in engines]
        chunk = min(config.rollout.prefill_tokens, max(prompts) * length)
        step = (
            prefill_step(self.engine, self.generation, chunk, length / 2),
            host_seconds(self.engine, math.ceil(chunk / length)),
        )
        add(total, round_seconds([step] * len(engines)), max(prompts) * length / chunk)
        return total

    def _decode(self, lengths: Sequence[int]) -> dict[str, float]:
        """The slowest of the hosts; they do not wait for each other before all completions are there."""
        step, dealt, found = step_seconds(self.engine, self.generation, self.rungs), iter(lengths), []
        for host in self.hosts:
            engines = [[next(dealt) for _ in range(rows)] for rows in host]
            prompt = self.config.data.max_prompt_tokens
            slots, together = self.rungs[-1], self.launch_steps
            found.append(decode(engines, prompt=prompt, slots=slots, step=step, launch_steps=together))
            if len(set(lengths)) == 1:
                break  # the first host has the most rows
        return max(found, key=lambda seconds: sum(seconds.values()))

    def _passes(self, stage: str, program: str, tokens: float, repeats: int, prompts: int | None = None) -> StageTime:
        """Return the seconds of the passes over the training rows of so many prompts, or of a whole step.

        Their completions have ``tokens`` tokens.
        """
        config = self.config
        rows = config.batch_rows if prompts is None else prompts * config.algorithm.group_size
        mean_tokens = config.data.max_prompt_tokens + tokens / rows
        count = packed_passes(self.trainer, rows=rows, mean_tokens=mean_tokens)
        one = pass_seconds(
            self.trainer,
            self.generation,
            head_tokens=tokens / count,
            accessed_bytes=self.accessed_bytes[program],
            updates=stage == "update",
        )
        by_cause, beside = dict[str, float](), dict[str, float]()
        add(by_cause, one.parts, count * repeats)
        add(beside, one.beside, count * repeats)
        return StageTime(stage, by_cause, beside)

    def _sync(self) -> dict[str, float]:
        """What moves is read and written, and sent if there is more than one device."""
        links = link_seconds(self.generation, self.devices, self.synced_bytes) if self.devices > 1 else 0.0
        memory = self._memory_seconds(2 * self.synced_bytes)
        return {"links": links} if links > memory else {"memory": memory}

    def _memory_seconds(self, count: float) -> float:
        return count / (rates.MEMORY * self.generation.chip.memory_bytes_per_second)


def _engine_sizes(run: AbstractRun, resident: ResidentBytes) -> EngineSizes:
    """Compute what an engine's steps cost; the bytes of its cache are those that it really has."""
    tensor = run.meshes.tensor
    return EngineSizes.of(
        run.checkpoint,
        tensor=tensor,
        itemsize=jnp.dtype(run.config.model.dtype).itemsize,
        split_vocabulary=splits_vocabulary(
            run.config.meshes.sampler.shard_vocab, run.checkpoint.config.vocab_size, tensor
        ),
        cache_bytes=resident.cache / run.options.cache_tokens,
        cache_itemsize=run.engine.cache_specs[0].dtype.itemsize,
    )


def _rows_by_host(run: AbstractRun) -> tuple[tuple[int, ...], ...]:
    """Count the rows of each engine, by the first of the hosts that drive it; prompts are dealt out in turn."""
    config, hosts = run.config, defaultdict[int, list[int]](list)
    for replica in run.replicas:
        prompts = len(range(replica.number, config.data.prompts_per_round, len(run.replicas)))
        hosts[replica.hosts[0]].append(prompts * config.algorithm.group_size)
    return tuple(tuple(rows) for rows in hosts.values())


def _trainer_sizes(run: AbstractRun, resident: ResidentBytes) -> TrainerSizes:
    config, checkpoint, mesh = run.config, run.checkpoint, run.meshes.trainer.shape
    token, itemsize = TokenCost.of(checkpoint), jnp.dtype(config.model.dtype).itemsize
    row, block = whole_blocks(config.row_tokens, run.meshes.flash_block), run.meshes.flash_block
    adapters = config.model.lora.rank is not None
    outer = token.head * (1 if checkpoint.config.tie_word_embeddings else 2)
    return TrainerSizes(
        fsdp=mesh["fsdp"],
        tp=mesh["tp"],
        layers=checkpoint.config.num_hidden_layers,
        token=token,
        context=row if block is None else row / 2,
        row_tokens=row,
        pass_tokens=config.micro_batch_rows(mesh["fsdp"]) * row,
        parameter_bytes=resident.parameters,
        trained_bytes=resident.trained,
        outer_share=outer / checkpoint.parameter_count,
        state_bytes=checkpoint.config.hidden_size * itemsize,
        layer_passes=3 + (config.model.remat != "none") - adapters,
        head_passes=4 - adapters,
    )
