"""The options of an engine: its sizes and settings, the padded shapes that it compiles, the steps of a launch.

All are chosen once from the config and the devices, and do not depend on the requests.

Each decode program has a fixed batch size, and each prefill program a fixed number of tokens. Both take rows of any
length up to the context. All programs are compiled before the first step.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tpu_grpo.config import CACHE_MARGIN_TOKENS, PROMPT_MARGIN_TOKENS, RunConfig
from tpu_grpo.records.errors import ConfigError

AttentionName = Literal["flash", "gather"]
KVDtype = Literal["auto", "fp8"]
WeightsDtype = Literal["auto", "int8"]
SMALLEST_BATCH = 8
SMALLEST_PREFILL = 64
REFILL_SHARE = 16
"""While requests wait, a launch ends once 1 / REFILL_SHARE of its rows (at least one row) have ended."""
LAUNCH_SECONDS = 0.05
"""The least seconds that a launch of decode steps should take, because a launch costs the host a few milliseconds."""
BYTES_PER_SECOND = {"tpu": 1e12, "gpu": 1e12, "cpu": 2e10}
"""Roughly how fast a device of each platform reads weights; a decode step reads all weights."""
MOST_SLOTS = 2**29
"""The most tokens of an engine's KV cache, and of its running rows together; the host keeps a number for each."""
FEWEST_STEPS, MOST_STEPS = 4, 32


@dataclass(frozen=True)
class Shapes:
    """The sizes of compiled programs, in ascending order. A step is padded to the first size that is large enough."""

    batch: tuple[int, ...]
    """Rows of a decode step. The last size is the most rows that run at once."""
    prefill: tuple[int, ...]
    """New tokens of all rows in a prefill step. Longer prompts are prefilled in chunks of the last size."""
    context: int
    """Tokens of the longest row, rounded up to whole pages."""

    @property
    def max_rows(self) -> int:
        """The most rows that run at once."""
        return self.batch[-1]


@dataclass(frozen=True)
class EngineOptions:
    """The sizes and settings of an engine, which are fixed for its life."""

    context_tokens: int
    """The most tokens of a prompt and its completion together."""
    stop_token_ids: frozenset[int]
    dtype: Literal["float32", "bfloat16"]
    attention: AttentionName
    max_running_requests: int
    kv_tokens: int | None
    """Size of the KV cache in tokens; None makes it hold ``max_running_requests`` rows of ``context_tokens``."""
    page_size: int
    prefill_tokens: int
    prefix_cache: bool
    batch_paddings: tuple[int, ...] | None
    return_experts: bool = False
    """Whether requests may ask for the experts that served their tokens; only for a model with experts."""
    steps_per_launch: int | None = None
    """The most decode steps of a launch; None chooses by the model's size and the devices."""
    kv_dtype: KVDtype = "auto"
    """The type of the numbers in the KV cache; auto is ``dtype``."""
    weights_dtype: WeightsDtype = "auto"
    """The type of the layers' matrices; auto is ``dtype``."""
    filtered: bool = False
    """Whether log-probabilities are taken among the tokens that the filters keep, and the number kept is returned."""
    tool_steps: int = 16
    """Decode steps from a turn's end to the row's next turn, while its environment works; with 0, the next turn
    starts once the environment has answered. See turns.py."""
    prefixes: int | None = None
    """How many cached prefixes are continued at about the same time, in addition to those of running rows: prompts of
    started groups, or conversations whose environments work. None: as many as rows. See window_pages.py."""

    @classmethod
    def from_config(
        cls, config: RunConfig, stop_token_ids: Sequence[int], *, replicas: int, platform: str
    ) -> "EngineOptions":
        """Derive the options of every engine of a run with ``replicas`` engines on devices of a platform."""
        rollout = config.rollout
        prompts = config.open_groups or config.data.prompts_per_round
        rows = -(-prompts // replicas) * config.algorithm.group_size
        running = min(rollout.max_running_requests, rows)
        options = cls(
            context_tokens=config.context_tokens,
            stop_token_ids=frozenset(stop_token_ids),
            dtype=config.model.dtype,
            attention=choose_attention(rollout.attention, platform),
            max_running_requests=running,
            kv_tokens=rollout.kv_tokens,
            page_size=rollout.page_size,
            prefill_tokens=rollout.prefill_tokens,
            prefix_cache=rollout.prefix_cache,
            batch_paddings=rollout.batch_paddings,
            return_experts=config.algorithm.replays_routing,
            steps_per_launch=None if rollout.steps_per_launch == "auto" else rollout.steps_per_launch,
            kv_dtype=rollout.kv_dtype,
            weights_dtype=rollout.weights_dtype,
            filtered=config.algorithm.filtered_ratio,
            tool_steps=config.environment.tool_steps,
            prefixes=None if config.environment.name else 1 + -(-running // config.algorithm.group_size),
        )
        if (slots := max(options.cache_tokens, options.max_running_requests * options.shapes.context)) > MOST_SLOTS:
            what = "rollout.kv_tokens, or rollout.max_running_requests x context in pages of rollout.page_size,"
            raise ConfigError(f"{what} must be at most {MOST_SLOTS} tokens, got {slots}; lower it")
        return options

    @cached_property
    def shapes(self) -> Shapes:
        """The padded shapes to compile; ``batch_paddings``, if given, replace the powers of two as batch sizes."""
        rows, chunk = self.max_running_requests, max(self.prefill_tokens, self.max_running_requests)
        given = tuple(sorted({b for b in self.batch_paddings or () if b < rows} | {rows}))
        return Shapes(
            batch=given if self.batch_paddings else ladder(SMALLEST_BATCH, rows, 2),
            prefill=ladder(max(SMALLEST_PREFILL, rows), chunk, 4),
            context=self._whole_pages(self.context_tokens),
        )

    @property
    def cache_tokens(self) -> int:
        """Size of the KV cache in tokens, rounded down to whole pages."""
        if self.kv_tokens is not None:
            return self.kv_tokens // self.page_size * self.page_size
        longest_prompt = self._whole_pages(self.context_tokens - 1 + PROMPT_MARGIN_TOKENS)
        return max(self.max_running_requests * self.tokens_of_request(self.context_tokens), longest_prompt)

    def tokens_of_request(self, tokens: int) -> int:
        """Return the cache slots that a request of ``tokens`` tokens needs, with the library's margin, rounded up to
        whole pages."""
        return self._whole_pages(tokens + CACHE_MARGIN_TOKENS)

    def _whole_pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size) * self.page_size


def ladder(first: int, last: int, factor: int) -> tuple[int, ...]:
    """Multiply ``first`` by ``factor`` while below ``last``, and end with ``last``: (8, 50, 2) gives 8, 16, 32, 50."""
    rungs = []
    while first < last:
        rungs.append(first)
        first *= factor
    return (*rungs, last)


def pad_to(rungs: Sequence[int], size: int) -> int:
    """Return the first of the ascending sizes ``rungs`` that is at least ``size``.

    Raises:
        ValueError: if all of them are smaller.
    """
    index = bisect_left(rungs, size)
    if index == len(rungs):
        raise ValueError(f"{size} is beyond the largest compiled size {rungs[-1]}")
    return rungs[index]


def choose_steps(weight_bytes: int, platform: str) -> int:
    """Choose the most decode steps of a launch: a power of two, for the bytes of weights on each device.

    The number is doubled from FEWEST_STEPS until reading the weights once per step takes LAUNCH_SECONDS, or up to
    MOST_STEPS. On a TPU, 0.6B parameters in bfloat16 (1.2 GB) get 32 steps, 8B on four devices (4 GB) get 16, and 32B
    on four devices (16 GB) get 4.
    """
    step_seconds, steps = weight_bytes / BYTES_PER_SECOND[platform], FEWEST_STEPS
    while steps < MOST_STEPS and steps * step_seconds < LAUNCH_SECONDS:
        steps *= 2
    return steps


def rows_left(rungs: Sequence[int], rows: int, *, waiting: bool) -> int:
    """Return the number of running rows at or below which a launch of ``rows`` rows ends early.

    The rows left then fit a smaller program or, if requests are ``waiting``, leave room for some of these requests.
    """
    smaller = max((rung for rung in rungs if rung < rows), default=0)
    return max(smaller, rows - max(1, rows // REFILL_SHARE)) if waiting else smaller


# --- what devices and models cannot do --------------------------------------------------------------------------------


def choose_attention(name: Literal["auto", "flash", "gather"], platform: str) -> AttentionName:
    """Resolve ``auto``, and refuse an attention that the sampler's devices (tpu, cpu, gpu) cannot run.

    Raises:
        ConfigError: if flash is asked for without a TPU.
    """
    on_tpu = platform == "tpu"
    if name == "auto":
        return "flash" if on_tpu else "gather"
    if name == "flash" and not on_tpu:
        raise ConfigError(
            f"rollout.attention=flash needs a TPU, the sampler's devices are {platform}; "
            "use gather (any device) or auto"
        )
    return name


def splits_vocabulary(vocabulary: int, tensor: int) -> bool:
    """Return whether embedding and output head are sharded by vocabulary over ``tensor`` devices: if they divide it."""
    return tensor > 1 and vocabulary % tensor == 0
