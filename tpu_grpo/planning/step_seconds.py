"""The seconds of a step of a run, stage by stage, for completions of the longest length or of a mean length.

    prefill    each prompt once, or for each of its completions without a prefix cache
    decode     simulated, with the tail of the longest completions
    logprobs   a forward pass, for the reference or the old policy
    update     forward and backward passes, and the optimizer's step
    sync       what moves, through links and memory

costs.py has the seconds of single steps of engines and of micro-batches.
"""

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import jax.numpy as jnp

from tpu_grpo.config import RunConfig
from tpu_grpo.engine.options import splits_vocabulary
from tpu_grpo.launching.tpus import Generation, Rates
from tpu_grpo.models.families.trainer_attention import whole_blocks
from tpu_grpo.planning import costs
from tpu_grpo.planning.compiled_programs import GRADIENTS, OPTIMIZER_STEP, TRAIN_STEP, CompiledProgram
from tpu_grpo.planning.stage_memory import ResidentBytes
from tpu_grpo.run.abstract import AbstractRun

SPREAD = 0.9
"""The standard deviation of the logarithm of the lengths of completions. With it, 6 % of completions with a mean of 680
tokens are cut at 2,048."""
HALVINGS = 80


def assumptions(mean_new_tokens: float | None, rates: Rates) -> list[str]:
    """Describe the assumptions behind a plan's seconds; with a mean length of completions, also those about lengths."""
    times = "" if rates.host == 1.0 else f", {rates.host:.2g} times as long as elsewhere"
    assumed = [
        f"of a chip's products {rates.products:.0%} are reached by the learner and {rates.prefill:.0%} by prefills, of "
        f"its memory's speed {rates.memory:.0%}, of its usable links' {rates.links:.0%}; attention gets through at "
        f"most {rates.cache_bytes_per_second / 1e9:.0f} GB/s of keys and values, and in 8 bits at half as many",
        f"a launch of an engine takes its host half a millisecond, and more for arrays, devices and rows{times}; one "
        "thread drives the engines of a host",
        f"every prompt has data.max_prompt_tokens tokens; training rows are packed to {costs.FILL:.0%}",
        "rewards, evaluation, checkpoints, and the filters top-k, top-p and min-p take no time",
        "lengths with a mean are log-normal, with a standard deviation of their logarithm of "
        f"{SPREAD}, and cut at rollout.max_new_tokens",
    ]
    return assumed[:-1] if mean_new_tokens is None else assumed


def completion_lengths(count: int, *, mean: float, longest: int) -> list[int]:
    """Return ``count`` lengths with this mean, up to rounding, always the same ones in the same mixed order.

    They are min(longest, m exp(SPREAD z)) at the quantiles z of a standard normal distribution; halving finds m.

    completion_lengths(4, mean=25.0, longest=40)     # [33, 9, 18, 40]
    """
    spreads = [math.exp(SPREAD * NormalDist().inv_cdf((row + 0.5) / count)) for row in range(count)]

    def cut(median: float) -> list[float]:
        return [min(longest, median * spread) for spread in spreads]

    low, high = 0.0, longest / spreads[0]  # with the latter, all are longest
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(cut(middle)) < mean * count else (low, middle)
    lengths = [max(1, round(length)) for length in cut(high)]
    random.Random(0).shuffle(lengths)
    return lengths


# --- decoding --------------------------------------------------------------------------------------------------------

StepSeconds = Callable[[int, float, float], tuple[costs.Seconds, float]]
"""Takes the rows of a step, the tokens of their context together, and the steps of its launch; returns (seconds on
devices of the step, seconds of the host of the launch)."""


def step_seconds(sizes: costs.EngineSizes, generation: Generation, rungs: Sequence[int]) -> StepSeconds:
    """Make a function that returns the seconds of an engine's steps; rows are padded to the next of ``rungs``."""

    def seconds(rows: int, cached_tokens: float, steps: float) -> tuple[costs.Seconds, float]:
        padded = next(rung for rung in rungs if rung >= rows)
        host = generation.rates.host * costs.host_seconds(sizes, rows, steps)
        return costs.decode_step(sizes, generation, padded, cached_tokens), host

    return seconds


@dataclass
class _Engine:
    """The rows of one engine: those that run, by the step after which they end, and those that wait."""

    waiting: list[int]
    """Lengths, the next one last."""
    prompt: int
    slots: int
    steps: int = 0
    """The decode steps so far."""
    ends: list[tuple[int, int]] = field(default_factory=list)
    """A heap of (last step, steps before the first) of the running rows."""
    begins: int = 0
    """The sum of the steps before the first."""

    def admit(self) -> int:
        """Give free slots to waiting rows, and return the number of these."""
        count = min(self.slots - len(self.ends), len(self.waiting))
        for _ in range(count):
            heapq.heappush(self.ends, (self.steps + self.waiting.pop(), self.steps))
            self.begins += self.steps
        return count

    def shared(self, rounds: int, step: StepSeconds, launch_steps: int) -> tuple[costs.Seconds, float]:
        """Return the seconds of one of the next ``rounds`` steps; the host's are those of a launch, shared out."""
        launches = math.ceil(rounds / launch_steps) if self.waiting else rounds / launch_steps
        # the tokens of context of all running rows together, a mean over the next steps
        cached = len(self.ends) * (self.prompt + self.steps + (rounds + 1) / 2) - self.begins
        device, host = step(len(self.ends), cached, rounds / launches)
        return device, host * launches / rounds

    def advance(self, steps: int) -> None:
        """Take this many steps; rows that then end leave their slots."""
        self.steps += steps
        while self.ends and self.ends[0][0] == self.steps:
            self.begins -= heapq.heappop(self.ends)[1]


def decode(
    engines: Sequence[Sequence[int]], *, prompt: int, slots: int, step: StepSeconds, launch_steps: int = 1
) -> dict[str, float]:
    """Return the seconds of decoding rows of these lengths, by engine of one host, after prompts of ``prompt`` tokens.

    The decoding is simulated: rows take slots, leave them when they end, and others take their places. The engines go
    through it together, a step each in a round, until the last row has ended; the tail, in which few long rows keep
    the devices from anything else, is in it. Rounds between which no row ends or enters are alike but for the growing
    context, and are counted at once:

        slots 2, lengths 3 1 2      round   1 2 3 4 5
                                    slot 0  - a - a a       - rows enter: a step of their own
                                    slot 1  - b - c c       c takes b's slot

    Rows that take slots cost their engine a step, in which their prompts are found in the cache. Other steps share
    the host's time with those of their launch, of which there are at most ``launch_steps``; a launch ends early where a
    row ends and others wait. While no row waits, the devices have the next launch before the host has done its part of
    this one, unless launches have one step.
    """
    states, total = [_Engine(list(reversed(lengths)), prompt, slots) for lengths in engines], dict[str, float]()
    while any(state.ends or state.waiting for state in states):
        entered = [state.admit() for state in states]
        running = [(state, count) for state, count in zip(states, entered, strict=True) if state.ends]
        rounds = 1 if any(entered) else min(state.ends[0][0] - state.steps for state, _ in running)
        costs_of_engines = [
            step(count, count * prompt, 1) if count else state.shared(rounds, step, launch_steps)
            for state, count in running
        ]
        ahead = launch_steps > 1 and not any(entered) and not any(state.waiting for state in states)
        costs.add(total, costs.round_seconds(costs_of_engines, ahead=ahead), rounds)
        for state, count in running:
            state.advance(0 if count else rounds)
    return total


# --- the whole step --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageTime:
    """The seconds of one stage of a step."""

    stage: str
    by_cause: costs.Seconds
    beside: costs.Seconds = field(default_factory=dict)
    """What goes on meanwhile, and takes no time of its own."""

    @property
    def seconds(self) -> float:
        """The stage's duration."""
        return sum(self.by_cause.values())


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
        """Return the summed seconds of some stages."""
        return sum(stage.seconds for stage in self.stages if stage.stage in stages)


@dataclass(frozen=True)
class StepWork:
    """Everything that the seconds of a step depend on."""

    config: RunConfig
    generation: Generation
    engine: costs.EngineSizes
    hosts: tuple[tuple[int, ...], ...]
    """For each host the completions that each of its engines samples in a step."""
    rungs: tuple[int, ...]
    """The numbers of rows that decode steps are compiled for; the last one is that of an engine's slots."""
    trainer: costs.TrainerSizes
    accessed_bytes: Mapping[str, float]
    """The compiler's count for the learner's programs, per device, by their names; 0 for those that are not there."""
    synced_bytes: float
    """What a weight sync moves to each of the sampler's devices."""
    devices: int
    """The devices of trainer and sampler."""
    forward_passes: int = 0
    """How often a step computes log-probabilities before its updates."""
    launch_steps: int = 1
    """The decode steps of a launch."""

    @classmethod
    def of(
        cls, run: AbstractRun, generation: Generation, resident: ResidentBytes, programs: Sequence[CompiledProgram]
    ) -> "StepWork":
        """Read the sizes from the run's parts."""
        config, tensor = run.config, run.meshes.tensor
        rows = defaultdict[int, list[int]](list)  # by the first of the hosts that drive an engine
        for replica in run.replicas:  # prompts are dealt out in turn
            prompts = len(range(replica.number, config.data.prompts_per_round, len(run.replicas)))
            rows[replica.hosts[0]].append(prompts * config.algorithm.group_size)
        return cls(
            config=config,
            generation=generation,
            engine=costs.EngineSizes.of(
                run.checkpoint,
                tensor=tensor,
                itemsize=jnp.dtype(config.model.dtype).itemsize,
                split_vocabulary=splits_vocabulary(
                    config.meshes.sampler.shard_vocab, run.checkpoint.config.vocab_size, tensor
                ),
                cache_bytes=resident.cache / run.options.cache_tokens,  # what it really has
                cache_itemsize=run.engine.cache_specs[0].dtype.itemsize,
            ),
            hosts=tuple(map(tuple, rows.values())),
            rungs=run.options.shapes.batch,
            trainer=_trainer_sizes(run, resident),
            accessed_bytes={program.name: program.accessed_bytes for program in programs if program.stage != "rollout"},
            synced_bytes=sum(move.bytes for move in run.sync.moves if not move.frozen)
            / len(run.meshes.sampler_devices),
            devices=len({*run.meshes.sampler_devices, *run.meshes.trainer.devices.flat}),
            forward_passes=run.learner.forward_passes,
            launch_steps=run.engine.steps_per_launch,
        )

    def step(self, mean_new_tokens: float | None = None) -> StepTime:
        """Estimate a step whose completions have this mean length, or all the longest length."""
        config, longest = self.config, self.config.rollout.max_new_tokens
        lengths = completion_lengths(config.sampled_rows, mean=mean_new_tokens or longest, longest=longest)
        sampled = sum(lengths)
        tokens = round(sampled * config.batch_rows / config.sampled_rows)  # that are learnt from
        stages = [StageTime("prefill", self._prefill()), StageTime("decode", self._decode(lengths))]
        if self.forward_passes:
            stages.append(self._passes("logprobs", "log-probabilities", tokens, self.forward_passes))
        updates, program = config.updates_per_step, TRAIN_STEP if config.algorithm.tunix is not None else GRADIENTS
        iterated = tokens * config.algorithm.passes
        update = self._passes("update", program, iterated / updates, updates, config.mini_batch_prompts)
        stepping = self._memory_seconds(self.accessed_bytes.get(OPTIMIZER_STEP, 0.0)) * updates  # Tunix's is in passes
        stages.append(StageTime("update", {**update.by_cause, "optimizer": stepping}, update.beside))
        links = costs.link_seconds(self.generation, self.devices, self.synced_bytes) if self.devices > 1 else 0.0
        memory = self._memory_seconds(2 * self.synced_bytes)  # what moves is read and written
        stages.append(StageTime("sync", {"links": links} if links > memory else {"memory": memory}))
        return StepTime(sampled, tuple(stages))

    def planned(self, mean_new_tokens: float | None = None) -> dict[str, float]:
        """Return the seconds that a run can compare with its own: of a decode step of full engines in the middle of
        completions, of rollout, update and sync."""
        step, config = self.step(mean_new_tokens), self.config
        rows = min(self.rungs[-1], max(max(engines) for engines in self.hosts))
        tokens = config.data.max_prompt_tokens + (mean_new_tokens or config.rollout.max_new_tokens) / 2
        device, host = step_seconds(self.engine, self.generation, self.rungs)(rows, rows * tokens, self.launch_steps)
        return {
            "decode_step": sum(device.values()) + host / self.launch_steps,
            "rollout": step.of("prefill", "decode"),
            "update": step.of("logprobs", "update"),
            "sync": step.of("sync"),
        }

    def _prefill(self) -> dict[str, float]:
        """Each engine takes in its prompts, chunk by chunk; the engines of a host do so in turn, as in decoding."""
        config, total = self.config, dict[str, float]()
        length, shared = config.data.max_prompt_tokens, config.rollout.prefix_cache
        engines = max(self.hosts, key=sum)
        prompts = [rows // config.algorithm.group_size if shared else rows for rows in engines]
        chunk = min(config.rollout.prefill_tokens, max(prompts) * length)
        step = (
            costs.prefill_step(self.engine, self.generation, chunk, length / 2),
            self.generation.rates.host * costs.host_seconds(self.engine, math.ceil(chunk / length)),
        )
        costs.add(total, costs.round_seconds([step] * len(engines)), max(prompts) * length / chunk)
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
        """Return the seconds of the passes over the training rows of a number of prompts, or of a whole step.

        Their completions have ``tokens`` tokens.
        """
        config = self.config
        rows = config.batch_rows if prompts is None else prompts * config.algorithm.group_size
        mean_tokens = config.data.max_prompt_tokens + tokens / rows
        count = costs.filled_passes(self.trainer, rows=rows, mean_tokens=mean_tokens)
        one = costs.pass_seconds(
            self.trainer,
            self.generation,
            head_tokens=self.trainer.pass_tokens if self.trainer.is_padded else tokens / count,
            accessed_bytes=self.accessed_bytes.get(program, 0.0),
            updates=stage == "update",
        )
        times = count * repeats
        return StageTime(stage, *({cause: times * seconds for cause, seconds in each.items()} for each in one))

    def _memory_seconds(self, count: float) -> float:
        return count / (self.generation.rates.memory * self.generation.chip.memory_bytes_per_second)


def _trainer_sizes(run: AbstractRun, resident: ResidentBytes) -> costs.TrainerSizes:
    config, checkpoint, mesh = run.config, run.checkpoint, run.meshes.trainer.shape
    token, itemsize = costs.TokenCost.of(checkpoint), jnp.dtype(config.model.dtype).itemsize
    row, block = whole_blocks(config.row_tokens, run.meshes.flash_block), run.meshes.flash_block
    adapters = config.model.lora.rank is not None
    outer = token.head * (1 if checkpoint.config.tie_word_embeddings else 2)
    is_padded, pass_rows, copies = config.algorithm.tunix is not None, config.micro_batch_rows(mesh["fsdp"]), 1
    if is_padded:
        pass_rows = (config.algorithm.micro_batch_prompts or config.mini_batch_prompts) * config.algorithm.group_size
        copies = 1 if pass_rows % mesh["fsdp"] == 0 else mesh["fsdp"]
    return costs.TrainerSizes(
        fsdp=mesh["fsdp"],
        tp=mesh["tp"],
        layers=checkpoint.config.num_hidden_layers,
        token=token,
        context=row if block is None else row / 2,
        row_tokens=copies * row,
        pass_tokens=pass_rows * copies * row,
        parameter_bytes=resident.parameters,
        trained_bytes=resident.trained,
        outer_share=outer / checkpoint.parameter_count,
        state_bytes=checkpoint.config.hidden_size * itemsize,
        layer_passes=3 + (config.model.remat != "none") - adapters,
        head_passes=4 - is_padded - adapters,
        is_padded=is_padded,
    )
