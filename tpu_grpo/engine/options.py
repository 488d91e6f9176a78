"""The sizes and settings that an engine is built for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tpu_grpo.config import CACHE_MARGIN_TOKENS, PROMPT_MARGIN_TOKENS, RunConfig
from tpu_grpo.engine.attention import AttentionName
from tpu_grpo.engine.experts import ExpertsName
from tpu_grpo.engine.kv_formats import KVDtype
from tpu_grpo.engine.shapes import Shapes, choose_shapes
from tpu_grpo.records.errors import ConfigError


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
    shard_vocab: bool | None
    """Whether to shard embedding and output head by vocabulary; None does so where the number of devices divides it."""
    return_experts: bool = False
    """Whether requests may ask for the experts that served their tokens; only for a model with experts."""
    experts: ExpertsName = "ragged"
    steps_per_launch: int | None = None
    """The most decode steps of a launch; None chooses by the model's size and the devices."""
    kv_dtype: KVDtype = "auto"
    """What the KV cache keeps its numbers in; auto is ``dtype``."""
    filtered: bool = False
    """Whether log-probabilities are those among the tokens that the filters keep, and completions hold their number."""
    tool_steps: int = 16
    """Decode steps after which a row comes back whose environment works."""

    @classmethod
    def from_config(
        cls, config: RunConfig, stop_token_ids: Sequence[int], *, replicas: int, platform: str
    ) -> "EngineOptions":
        """Derive the options of every engine of a run with ``replicas`` engines on devices of a platform."""
        rollout = config.rollout
        rows = -(-config.data.prompts_per_round // replicas) * config.algorithm.group_size
        attention = choose_attention(rollout.attention, platform)
        return cls(
            context_tokens=config.context_tokens,
            stop_token_ids=frozenset(stop_token_ids),
            dtype=config.model.dtype,
            attention=attention,
            max_running_requests=min(rollout.max_running_requests, rows),
            kv_tokens=rollout.kv_tokens,
            page_size=rollout.page_size,
            prefill_tokens=rollout.prefill_tokens,
            prefix_cache=rollout.prefix_cache,
            batch_paddings=rollout.batch_paddings,
            shard_vocab=config.meshes.sampler.shard_vocab,
            return_experts=config.algorithm.routing_replay,
            experts=check_experts(rollout.experts, platform),
            steps_per_launch=None if rollout.steps_per_launch == "auto" else rollout.steps_per_launch,
            kv_dtype=check_kv_dtype(rollout.kv_dtype, attention),
            filtered=config.algorithm.filtered_ratio,
            tool_steps=config.environment.tool_steps,
        )

    @property
    def shapes(self) -> Shapes:
        """The padded shapes that this engine compiles."""
        return choose_shapes(
            context_tokens=self.context_tokens,
            page_size=self.page_size,
            max_running_requests=self.max_running_requests,
            prefill_tokens=self.prefill_tokens,
            batch_paddings=self.batch_paddings,
        )

    @property
    def cache_tokens(self) -> int:
        """Size of the KV cache in tokens, rounded down to whole pages."""
        if self.kv_tokens is not None:
            return self.kv_tokens // self.page_size * self.page_size
        longest_prompt = self._whole_pages(self.context_tokens - 1 + PROMPT_MARGIN_TOKENS)
        return max(self.max_running_requests * self.tokens_of_request(self.context_tokens), longest_prompt)

    def tokens_of_request(self, tokens: int) -> int:
        """Return the cache tokens that a request of ``tokens`` needs, with the library's margin, in whole pages."""
        return self._whole_pages(tokens + CACHE_MARGIN_TOKENS)

    def _whole_pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size) * self.page_size


def choose_attention(name: Literal["auto", "flash", "gather", "native"], platform: str) -> AttentionName:
    """Resolve ``auto`` and refuse what the sampler's devices (tpu, cpu, gpu) cannot run.

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


def check_kv_dtype(name: KVDtype, attention: AttentionName) -> KVDtype:
    """Return ``name`` if this attention can read a cache of that type.

    Raises:
        ConfigError: for 8 bits with native attention, and for int8 with flash.
    """
    if name != "auto" and attention == "native":
        raise ConfigError(
            f"rollout.kv_dtype={name} needs rollout.attention=flash or gather, got native, the library's reference, "
            "which computes with the cache's numbers as they are; use gather, or rollout.kv_dtype=auto"
        )
    if name == "int8" and attention == "flash":
        raise ConfigError(
            "rollout.kv_dtype=int8 needs rollout.attention=gather, got flash, whose kernel takes no whole numbers and "
            "no scale for each token; use rollout.kv_dtype=fp8, or auto"
        )
    return name


def check_experts(name: ExpertsName, platform: str) -> ExpertsName:
    """Return ``name`` if the sampler's devices (tpu, cpu, gpu) can run it.

    Raises:
        ConfigError: if fused is asked for without a TPU.
    """
    if name == "fused" and platform != "tpu":
        raise ConfigError(
            f"rollout.experts=fused needs a TPU, the sampler's devices are {platform}; use ragged (any device)"
        )
    return name
