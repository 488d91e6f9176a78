"""Estimates the seconds of a run's step, stage by stage, for completions of the longest or of a mean length.

    prefill    each prompt once; without a prefix cache, once per completion
    decode     simulated, including the tail in which only the longest completions run
    logprobs   forward passes, for the reference, the old policy and teachers
    update     forward and backward passes, and the optimizer's step
    sync       moving the changed weights, through links and memory

tpu_grpo/planning/costs.py has the seconds of one step of an engine and of one micro-batch.
"""

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from tpu_grpo.config import RunConfig
from tpu_grpo.engine.options import splits_vocabulary
from tpu_grpo.engine.partial_rollouts import MULTIPLE
from tpu_grpo.hosts.sharded_arrays import bytes_per_device
from tpu_grpo.launching.tpus import Generation, Rates
from tpu_grpo.models.families.trainer_attention import whole_blocks
from tpu_grpo.planning import costs
from tpu_grpo.planning.compiled_programs import GRADIENTS, OPTIMIZER_STEP, TEACHER, TRAIN_STEP, CompiledProgram
from tpu_grpo.planning.stage_memory import ResidentBytes
from tpu_grpo.run.abstract import AbstractRun

SPREAD = 0.9
"""The standard deviation of the logarithm of completion lengths. With it, 6 % of completions reach a limit of 2,048
tokens if the mean is 680."""
HALVINGS = 80
ROLLOUT = ("prefill", "decode")
"""The stages of a rollout."""
ROLLOUT_RANGE, UPDATE_RANGE = (0.75, 2.5), (0.75, 1.3)
"""Published seconds are these multiples of planned ones, for rollouts and for all else; docs/planning.md lists them."""
HOST_BYTES_PER_SECOND = 8e9
"""The assumed speed at which a device gets a teacher that is kept in its host's memory (half of a PCIe 3.0 x16)."""
CARRIED_STEPS = 6
"""The number of simulated steps whose seconds are averaged for rollout.partial_extra."""


def assumptions(mean_new_tokens: float | None, rates: Rates) -> list[str]:
    """Describe a plan's assumptions about seconds and, if a mean length is given, its assumptions about lengths."""
    times = "" if rates.host == 1.0 else f", {rates.host:.2g} times as long as elsewhere"
    assumed = [
        f"of a chip's products {rates.products:.0%} are reached by the learner with a model {costs.WIDE:,} wide, less "
        f"with a narrower one, and {rates.prefill:.0%} by prefills, of "
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
    """Return ``count`` lengths with this mean, up to rounding, in a fixed shuffled order.

    The lengths are min(longest, m exp(SPREAD z)) at quantiles z of a standard normal distribution; bisection finds m.

        completion_lengths(4, mean=25.0, longest=40)     # [33, 9, 18, 40]
    """
    spreads = _spreads(count)
    median = _median(spreads, mean, longest)
    lengths = [max(1, round(min(longest, median * spread))) for spread in spreads]
    random.Random(0).shuffle(lengths)
    return lengths


def _spreads(count: int) -> list[float]:
    """Return the ratios of ``count`` lengths to their median, at equal distances of the quantiles."""
    return [math.exp(SPREAD * NormalDist().inv_cdf((row + 0.5) / count)) for row in range(count)]


def _median(spreads: Sequence[float], mean: float, longest: int) -> float:
    low, high = 0.0, longest / spreads[0]  # with the median ``high``, all lengths are the longest
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        total = sum(min(longest, middle * spread) for spread in spreads)
        low, high = (middle, high) if total < mean * len(spreads) else (low, middle)
    return high


@dataclass(frozen=True)
class RolloutWork:
    """What a step's rollout has to sample."""

    lengths: Sequence[int]
    """The new tokens of each row; 0 for a row that ended in an earlier step."""
    begun: float = 1.0
    """The share of groups that are new."""
    resumed: int = 0
    """The number of rows that earlier steps began; their prompts are prefilled again."""
    done: int = 0
    """The tokens that earlier steps sampled in these rows, which are prefilled again as well."""


def carried_work(prompts: int, size: int, open_groups: int, *, mean: float, longest: int) -> list[RolloutWork]:
    """Simulate steps with rollout.partial_extra (tpu_grpo/engine/partial_rollouts.py); return the work of the last
    CARRIED_STEPS steps.

    A step learns from ``prompts`` of the ``open_groups`` groups of ``size`` completions that are sampled together.
    Lengths are drawn from the distribution of `completion_lengths`; half of the variance of their logarithm comes from
    the prompt.
    """
    chance, found = random.Random(0), list[RolloutWork]()
    median = _median(_spreads(prompts * size), mean, longest)

    def group() -> list[tuple[int, int]]:
        """Draw (tokens left, tokens sampled) of each completion; none is sampled yet."""
        own = chance.gauss(0.0, SPREAD / math.sqrt(2))
        draws = (math.exp(own + chance.gauss(0.0, SPREAD / math.sqrt(2))) for _ in range(size))
        return [(longest if mean >= longest else max(1, min(longest, round(median * draw))), 0) for draw in draws]

    groups = list[list[tuple[int, int]]]()
    for _ in range(2 * CARRIED_STEPS):
        begun = open_groups - len(groups)
        groups += [group() for _ in range(begun)]
        ends = sorted(max(left for left, _ in rows) for rows in groups)
        length = -(-ends[prompts - 1] // MULTIPLE) * MULTIPLE
        resumed = [done for rows in groups for left, done in rows if left and done]
        lengths = [min(left, length) for rows in groups for left, _ in rows]
        found.append(RolloutWork(lengths, begun / open_groups, len(resumed), sum(resumed)))
        groups = [[(max(0, left - length), done + min(left, length)) for left, done in rows] for rows in groups]
        whole = [number for number, rows in enumerate(groups) if not any(left for left, _ in rows)]
        learnt = whole[:prompts]
        groups = [rows for number, rows in enumerate(groups) if number not in learnt]
    return found[CARRIED_STEPS:]


# --- decoding --------------------------------------------------------------------------------------------------------

StepSeconds = Callable[[int, float, float], tuple[costs.Seconds, float]]
"""A function of (rows of a step, sum of their context tokens, steps per launch) that returns (device seconds of the
step, host seconds of the launch)."""


def step_seconds(sizes: costs.EngineSizes, generation: Generation, rungs: Sequence[int]) -> StepSeconds:
    """Make a function for the seconds of an engine's steps; ``rungs`` are the numbers that rows are padded to."""

    def seconds(rows: int, cached_tokens: float, steps: float) -> tuple[costs.Seconds, float]:
        padded = next(rung for rung in rungs if rung >= rows)
        host = generation.rates.host * costs.host_seconds(sizes, rows, steps)
        return costs.decode_step(sizes, generation, padded, cached_tokens), host

    return seconds


@dataclass
class _Engine:
    """The running and waiting rows of one engine in the simulation."""

    waiting: list[int]
    """Lengths of the waiting rows; the last one is next."""
    prompt: int
    slots: int
    steps: int = 0
    """The number of decode steps so far."""
    ends: list[tuple[int, int]] = field(default_factory=list)
    """A heap with (step at the end, step at the start) of each running row."""
    begins: int = 0
    """The sum of the running rows' start steps."""

    def admit(self) -> int:
        """Give free slots to waiting rows; return how many rows entered."""
        count = min(self.slots - len(self.ends), len(self.waiting))
        for _ in range(count):
            heapq.heappush(self.ends, (self.steps + self.waiting.pop(), self.steps))
            self.begins += self.steps
        return count

    def shared(self, rounds: int, step: StepSeconds, launch_steps: int) -> tuple[costs.Seconds, float]:
        """Return (device, host) seconds per step in the next ``rounds`` steps; a launch's steps share its host time."""
        launches = math.ceil(rounds / launch_steps) if self.waiting else rounds / launch_steps
        # the sum of the running rows' context tokens, averaged over the next rounds
        cached = len(self.ends) * (self.prompt + self.steps + (rounds + 1) / 2) - self.begins
        device, host = step(len(self.ends), cached, rounds / launches)
        return device, host * launches / rounds

    def advance(self, steps: int) -> None:
        """Advance by this many steps; rows that end then leave their slots."""
        self.steps += steps
        while self.ends and self.ends[0][0] == self.steps:
            self.begins -= heapq.heappop(self.ends)[1]


def decode(
    engines: Sequence[Sequence[int]], *, prompt: int, slots: int, step: StepSeconds, launch_steps: int = 1
) -> dict[str, float]:
    """Return the seconds of decoding on one host. ``engines`` has, for each engine, the lengths of its completions.

    The decoding is simulated: rows take slots and leave them when they end, and waiting rows take free slots. In a
    round every engine does one step, until the last row has ended; so the tail, with few long rows, is included. Rounds
    in which no row ends or enters differ only in the growing context, and are computed together:

        slots 2, lengths 3 1 2      round   1 2 3 4 5
                                    slot 0  - a - a a       - rows enter: a step of their own
                                    slot 1  - b - c c       c takes b's slot

    When rows take slots, their engine spends a step on their prompts of ``prompt`` tokens, which are in the cache. Any
    other launch has up to ``launch_steps`` steps, which share its host time; it ends early if a row ends while others
    wait. While no row waits, the next launch is queued before the host has processed this one, unless a launch has
    only one step.
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
    """Seconds, by cause, of work that overlaps other work and so adds nothing to the stage's duration."""

    @property
    def seconds(self) -> float:
        """The stage's duration."""
        return sum(self.by_cause.values())

    def scaled(self, factor: float) -> "StageTime":
        """Return the stage with a duration ``factor`` times as long."""
        return replace(self, by_cause={cause: factor * seconds for cause, seconds in self.by_cause.items()})


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step."""

    completion_tokens: int
    """The number of tokens that are sampled."""
    mean_new_tokens: float
    """The mean length of the completions that end in the step."""
    stages: tuple[StageTime, ...]
    is_ahead: bool = False
    """Whether the next step's rollout and the update take place at the same time (algorithm.staleness)."""
    before: float = 0.0
    """The part of logprobs that is done on the sampler's devices, before both begin."""

    @property
    def seconds(self) -> float:
        """The step's duration."""
        if self.is_ahead:
            return max(self.of(*ROLLOUT) + self.before, self.of("logprobs", "update")) + self.of("sync")
        return sum(stage.seconds for stage in self.stages)

    @property
    def seconds_range(self) -> tuple[float, float]:
        """The least and the most that the step may take, as far as plans were off published seconds."""
        low, high = (
            replace(self, stages=tuple(stage.scaled(each[stage.stage in ROLLOUT]) for stage in self.stages)).seconds
            for each in zip(UPDATE_RANGE, ROLLOUT_RANGE, strict=True)
        )
        return low, high

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens per second of the whole step."""
        return self.completion_tokens / self.seconds

    def of(self, *stages: str) -> float:
        """Return the summed seconds of some stages."""
        return sum(stage.seconds for stage in self.stages if stage.stage in stages)


class TeacherWork(NamedTuple):
    """A teacher's program and sizes, the tokens of a prompt as it sees it, the bytes of a device that come from the
    host's memory, and whether it is on the sampler's devices."""

    program: str
    sizes: costs.TrainerSizes
    prompt_tokens: int
    copied_bytes: float
    is_apart: bool


@dataclass(frozen=True)
class StepWork:
    """Everything that the seconds of a step depend on."""

    config: RunConfig
    generation: Generation
    engine: costs.EngineSizes
    hosts: tuple[tuple[int, ...], ...]
    """For each host, the number of completions per engine and step."""
    rungs: tuple[int, ...]
    """The numbers of rows that decode steps are compiled for; the last is the number of an engine's slots."""
    trainer: costs.TrainerSizes
    accessed_bytes: Mapping[str, float]
    """Learner program -> bytes accessed per device, as counted by the compiler; a missing program counts as 0."""
    synced_bytes: float
    """The bytes that a weight sync moves to each of the sampler's devices."""
    devices: int
    """The number of devices of trainer and sampler together, in one slice."""
    summed_bytes: float = 0.0
    """The bytes of a device's gradients, which several slices add up once per update."""
    forward_passes: int = 0
    """The number of forward passes for log-probabilities before a step's updates."""
    launch_steps: int = 1
    """The number of decode steps per launch."""
    teachers: tuple["TeacherWork", ...] = ()

    @classmethod
    def of(
        cls, run: AbstractRun, generation: Generation, resident: ResidentBytes, programs: Sequence[CompiledProgram]
    ) -> "StepWork":
        """Read the sizes from the run's parts."""
        config, tensor, trainers = run.config, run.meshes.tensor, run.meshes.joined or run.meshes.trainer
        rows = defaultdict[int, list[int]](list)  # by the first of the hosts that drive an engine
        for replica in run.replicas:  # prompts are dealt to replicas in turn
            sampled = config.open_groups or config.data.prompts_per_round
            prompts = len(range(replica.number, sampled, len(run.replicas)))
            rows[replica.hosts[0]].append(prompts * config.algorithm.group_size)
        cached = defaultdict[int | None, float](float)  # by window: the actual bytes per token
        for window, layer in zip(run.engine.layer_windows, run.engine.cache_specs, strict=True):
            cached[window] += bytes_per_device(layer) / ((layer.shape[0] - 1) * layer.shape[1])  # page 0 is nobody's
        return cls(
            config=config,
            generation=generation,
            engine=costs.EngineSizes.of(
                run.checkpoint,
                tensor=tensor,
                itemsize=jnp.dtype(config.model.dtype).itemsize,
                split_vocabulary=splits_vocabulary(run.checkpoint.config.vocab_size, tensor),
                cache_bytes=cached.pop(None, 0.0),
                windows={window: size for window, size in cached.items() if window is not None},
                cache_itemsize=run.engine.cache_specs[0].dtype.itemsize,
                int8=config.rollout.weights_dtype == "int8",
            ),
            hosts=tuple(map(tuple, rows.values())),
            rungs=run.options.shapes.batch,
            trainer=_trainer_sizes(run, resident),
            accessed_bytes={program.name: program.accessed_bytes for program in programs},
            synced_bytes=sum(bytes_per_device(m.spec) for m in run.moves if not m.frozen and not m.aliased),
            devices=len({*run.meshes.sampler_devices, *trainers.devices.flat}) // run.meshes.slices,
            summed_bytes=resident.gradients,
            forward_passes=run.learner.forward_passes,
            launch_steps=run.engine.steps_per_launch,
            teachers=_teacher_works(run, resident),
        )

    def step(self, mean_new_tokens: float | None = None) -> StepTime:
        """Estimate a step; with None, all completions have the longest length."""
        config, longest = self.config, self.config.rollout.max_new_tokens
        mean, rows = mean_new_tokens or longest, config.sampled_rows
        if config.rollout.partial_extra:
            sizes = config.data.prompts_per_step, config.algorithm.group_size, config.open_groups
            steps, rows = carried_work(*sizes, mean=mean, longest=longest), config.batch_rows
        else:
            steps = [RolloutWork(completion_lengths(rows, mean=mean, longest=longest))]
        sampled = round(sum(sum(work.lengths) for work in steps) / len(steps))
        tokens = round(sampled * config.batch_rows / rows)  # only the tokens learnt from
        prefill, decoded = dict[str, float](), dict[str, float]()
        for work in steps:
            costs.add(prefill, self._prefill(work), 1 / len(steps))
            costs.add(decoded, self._decode(work), 1 / len(steps))
        stages = [StageTime("prefill", prefill), StageTime("decode", decoded)]
        passes = [self._passes("logprobs", "log-probabilities", tokens, self.forward_passes)]
        before = 0.0
        for teacher in self.teachers:
            parts = [self._passes("logprobs", teacher.program, tokens, 1, teacher=teacher)]
            if teacher.copied_bytes:
                parts.append(StageTime("logprobs", {"host": teacher.copied_bytes / HOST_BYTES_PER_SECOND}))
            passes += parts
            before += sum(part.seconds for part in parts) * teacher.is_apart
        if self.forward_passes or self.teachers:
            causes, beside = dict[str, float](), dict[str, float]()
            for each in passes:
                costs.add(causes, each.by_cause)
                costs.add(beside, each.beside)
            stages.append(StageTime("logprobs", causes, beside))
        updates, program = config.updates_per_step, TRAIN_STEP if config.algorithm.tunix is not None else GRADIENTS
        iterated = tokens * config.algorithm.passes
        update = self._passes("update", program, iterated / updates, updates, config.mini_batch_prompts)
        stepped = self.accessed_bytes.get(OPTIMIZER_STEP, 0.0)  # Tunix's learner has no such program
        stepping = costs.memory_seconds(self.generation, stepped) * updates
        causes = {**update.by_cause, "optimizer": stepping}
        if (slices := config.meshes.slices) > 1:
            causes["network"] = updates * costs.network_seconds(self.generation, slices, self.summed_bytes)
        stages.append(StageTime("update", causes, update.beside))
        links = costs.link_seconds(self.generation, self.devices, self.synced_bytes) if self.devices > 1 else 0.0
        memory = costs.memory_seconds(self.generation, 2 * self.synced_bytes)  # moved bytes are read and written
        stages.append(StageTime("sync", {"links": links} if links > memory else {"memory": memory}))
        is_ahead = config.algorithm.staleness > 0
        return StepTime(sampled, sampled / rows, tuple(stages), is_ahead=is_ahead, before=before)

    def carrying(self, carry: float) -> "StepWork":
        """Return the work of the same run with another rollout.partial_extra, in the same engines."""
        rollout = self.config.rollout.model_copy(update={"partial_extra": carry})
        config, size = self.config.model_copy(update={"rollout": rollout}), self.config.algorithm.group_size
        more = config.open_groups / self.config.data.prompts_per_round
        hosts = tuple(tuple(math.ceil(rows / size * more) * size for rows in engines) for engines in self.hosts)
        return replace(self, config=config, hosts=hosts)

    def planned(self, mean_new_tokens: float | None = None) -> dict[str, float]:
        """Return the seconds to compare with those of a run: rollout, update, sync, and a decode step of full engines
        in the middle of completions."""
        step = self.step(mean_new_tokens)
        return {
            "decode_step": self._full_step(mean_new_tokens)[0],
            "rollout": step.of(*ROLLOUT),
            "update": step.of("logprobs", "update"),
            "sync": step.of("sync"),
        }

    def _full_step(self, mean_new_tokens: float | None) -> tuple[float, float]:
        """Return the seconds of a decode step of full engines in the middle of completions, and the least possible:
        those of reading its weights and its cache once, at the full speed of the memory."""
        config, mean = self.config, mean_new_tokens or self.config.rollout.max_new_tokens
        rows = min(self._slots(mean), max(max(engines) for engines in self.hosts))
        cached = rows * (config.data.max_prompt_tokens + mean / 2)
        device, host = step_seconds(self.engine, self.generation, self.rungs)(rows, cached, self.launch_steps)
        read = self.engine.read_bytes(rows) + self.engine.cached_bytes(rows, cached)
        least = read / self.generation.chip.memory_bytes_per_second
        return sum(device.values()) + host / self.launch_steps, least

    def efficiency(self, mean_new_tokens: float | None = None) -> dict[str, float]:
        """Return how near the run comes to the limits of its chips.

        ``decode_of_least`` is the time of a decode step divided by the least possible time (see `_full_step`). The
        other figures are model FLOPs utilization (MFU; PaLM, arXiv:2204.02311, appendix B): the FLOPs that the tokens
        need, divided by those that the chips could compute in the time of the prefill or the update. A token attends
        to the tokens before it only; neither padding nor recomputation counts as needed.
        """
        config, longest = self.config, self.config.rollout.max_new_tokens
        prompt, peak = config.data.max_prompt_tokens, self.generation.chip.flops_per_second
        decoding, least = self._full_step(mean_new_tokens)
        chunk, seconds = self._chunk()
        prefilled = self.engine.token.forward(chunk, prompt / 2, 1)
        step, token = self.step(mean_new_tokens), self.trainer.token
        lengths = completion_lengths(config.batch_rows, mean=min(longest, step.mean_new_tokens), longest=longest)
        rows = [prompt + length for length in lengths]
        context = sum(row * row for row in rows) / 2 / sum(rows)
        learnt = 3 * token.forward(sum(rows), context, sum(lengths))
        if self.trainer.trains_adapters:
            learnt -= token.forward(sum(rows), 0, sum(lengths))
        devices = self.trainer.fsdp * self.trainer.tp * config.meshes.slices
        return {
            "decode_of_least": decoding / least,
            "prefill_mfu": prefilled / (self.engine.tensor * peak * sum(seconds.values())),
            "update_mfu": config.algorithm.passes * learnt / (devices * peak * step.of("update")),
        }

    def _slots(self, mean_new_tokens: float) -> int:
        """Return how many rows an engine runs at a time: those whose tokens rollout.kv_tokens has room for when they
        end, at the mean of their lengths. Were more running, some would have to wait for others in the end."""
        held, prompt = self.config.rollout.kv_tokens, self.config.data.max_prompt_tokens
        return self.rungs[-1] if held is None else min(self.rungs[-1], int(held // (prompt + mean_new_tokens)))

    def _chunk(self) -> tuple[int, dict[str, float]]:
        """Return the tokens of a prefill's chunk, and the seconds in which all engines of a host do one each."""
        config, length = self.config, self.config.data.max_prompt_tokens
        chunk = min(config.rollout.prefill_tokens, max(self._prompts()) * length)
        host = self.generation.rates.host * costs.host_seconds(self.engine, math.ceil(chunk / length))
        step = costs.prefill_step(self.engine, self.generation, chunk, length / 2), host
        return chunk, costs.round_seconds([step] * len(self._prompts()))

    def _prompts(self) -> list[int]:
        """Return the number of prompts that each engine of the busiest host prefills."""
        shared = self.config.algorithm.group_size if self.config.rollout.prefix_cache else 1
        return [rows // shared for rows in max(self.hosts, key=sum)]

    def _prefill(self, work: RolloutWork) -> dict[str, float]:
        """Return the seconds of prefill: each engine processes its prompts in chunks, in rounds as in decoding."""
        length, (chunk, seconds) = self.config.data.max_prompt_tokens, self._chunk()
        again = (work.resumed * length + work.done) / sum(map(len, self.hosts))
        chunks = (max(self._prompts()) * length * work.begun + again) / chunk
        return {cause: chunks * value for cause, value in seconds.items()}

    def _decode(self, work: RolloutWork) -> dict[str, float]:
        """Return the seconds of the slowest host; hosts wait for each other only when all completions are done."""
        lengths, engine_count = [length for length in work.lengths if length], sum(map(len, self.hosts))
        if len(lengths) == sum(map(sum, self.hosts)):
            following = iter(lengths)  # a whole batch: every engine gets its next rows
            dealt = iter([[next(following) for _ in range(rows)] for host in self.hosts for rows in host])
        else:  # rows that go on, and new rows, are dealt in turn
            dealt = iter([lengths[number::engine_count] for number in range(engine_count)])
        step, found = step_seconds(self.engine, self.generation, self.rungs), []
        for host in self.hosts:
            engines = [next(dealt) for _ in host]
            # a row that goes on has its earlier tokens in its context, too: here their mean over all rows
            prompt = self.config.data.max_prompt_tokens + work.done // max(1, len(lengths))
            slots, together = self._slots(sum(lengths) / max(1, len(lengths))), self.launch_steps
            found.append(decode(engines, prompt=prompt, slots=slots, step=step, launch_steps=together))
            if len(set(lengths)) == 1:
                break  # with equal lengths, the first host is the slowest: it has the most rows
        return max(found, key=lambda seconds: sum(seconds.values()))

    def _passes(
        self,
        stage: str,
        program: str,
        tokens: float,
        repeats: int,
        prompts: int | None = None,
        teacher: TeacherWork | None = None,
    ) -> StageTime:
        """Return the seconds of ``repeats`` passes over the rows of ``prompts`` prompts (None: of the whole step), by
        the policy or by a teacher.

        ``tokens`` is the number of tokens in the completions of these rows.
        """
        config, sizes = self.config, self.trainer if teacher is None else teacher.sizes
        rows = config.batch_rows if prompts is None else prompts * config.algorithm.group_size
        prompt = config.data.max_prompt_tokens if teacher is None else teacher.prompt_tokens
        mean_tokens, completion = prompt + tokens / rows, tokens / rows
        if config.shares_prompts:
            group, row = config.algorithm.group_size, sizes.row_tokens
            mean_tokens = costs.shared_tokens(row_tokens=row, prompt=prompt, completion=completion, group=group)
        count = costs.filled_passes(sizes, rows=rows, mean_tokens=mean_tokens)
        one = costs.pass_seconds(
            sizes,
            self.generation,
            head_tokens=sizes.pass_tokens if sizes.is_padded else tokens / count,
            accessed_bytes=self.accessed_bytes.get(program, 0.0),
            updates=stage == "update",
        )
        times = math.ceil(count / config.meshes.slices) * repeats
        return StageTime(stage, *({cause: times * seconds for cause, seconds in each.items()} for each in one))


def _teacher_works(run: AbstractRun, resident: ResidentBytes) -> tuple[TeacherWork, ...]:
    if not run.config.teachers:
        return ()
    policy, found = _trainer_sizes(run, resident), list[TeacherWork]()
    for teacher, given in zip(run.learner.teachers.teachers, run.teachers, strict=True):
        checkpoint, spec, shape = given or run.checkpoint, teacher.spec, teacher.shape
        held = sum(map(bytes_per_device, jax.tree.leaves(nnx.state(teacher.frozen.model))))
        of_experts = sum(math.prod(s) for name, s in checkpoint.shapes.items() if ".experts." in name)
        itemsize = jnp.dtype(spec.dtype or run.config.model.dtype).itemsize
        sizes = replace(
            policy,
            layers=checkpoint.config.num_hidden_layers,
            token=costs.TokenCost.of(checkpoint),
            context=policy.context * shape.tokens / policy.row_tokens,
            row_tokens=shape.tokens,
            pass_tokens=shape.micro_batch * shape.tokens,
            gathered_bytes=held * (1 - of_experts / checkpoint.parameter_count),
            state_bytes=checkpoint.config.hidden_size * itemsize,
            experts_of_token=getattr(checkpoint.config, "num_experts_per_tok", 0),
            fsdp=teacher.mesh.shape["fsdp"],
            tp=teacher.mesh.shape["tp"],
        )
        copied, of_prompt = float(held) if spec.offload else 0.0, shape.max_prompt_tokens
        found.append(TeacherWork(f"{TEACHER}{spec.shown}", sizes, of_prompt, copied, teacher.is_apart))
    return tuple(found)


def _trainer_sizes(run: AbstractRun, resident: ResidentBytes) -> costs.TrainerSizes:
    config, checkpoint, mesh = run.config, run.checkpoint, run.meshes.trainer.shape
    token, itemsize = costs.TokenCost.of(checkpoint), jnp.dtype(config.model.dtype).itemsize
    row, block = whole_blocks(config.row_tokens, run.meshes.flash_block), run.meshes.flash_block
    adapters = config.model.lora.rank is not None
    shapes = checkpoint.shapes
    of_experts = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name)
    gathered = 1 - of_experts / checkpoint.parameter_count
    is_padded, pass_rows, copies = config.algorithm.tunix is not None, config.micro_batch_rows(mesh["fsdp"]), 1
    if is_padded:
        pass_rows = config.micro_batch_prompts * config.algorithm.group_size
        copies = 1 if pass_rows % mesh["fsdp"] == 0 else mesh["fsdp"]
    return costs.TrainerSizes(
        fsdp=mesh["fsdp"],
        tp=mesh["tp"],
        layers=checkpoint.config.num_hidden_layers,
        token=token,
        context=row if block is None else whole_blocks(config.context_tokens, block) / 2,
        row_tokens=copies * row,
        pass_tokens=pass_rows * copies * row,
        gathered_bytes=resident.parameters * gathered,
        reduced_bytes=resident.trained * gathered,
        state_bytes=checkpoint.config.hidden_size * itemsize,
        layer_passes=3 + (config.model.remat != "none") - adapters,
        head_passes=4 - is_padded - adapters,
        experts_of_token=checkpoint.config.experts[1],
        trains_adapters=adapters,
        is_padded=is_padded,
    )
