"""A sampling engine behind Tunix's rollout interface.

engine = TextEngines(open_engines(options, ...), tokenizer, config.rollout, config.run.seed)
cluster_config = ClusterConfig(rollout_engine=rollout_engine(engine, pad_id=0, eos_id=2), ...)
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float, Int
from transformers import PreTrainedTokenizerFast
from tunix.rl import common
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
from tunix.sft import sharding_utils

from tpu_grpo.config import RolloutSection
from tpu_grpo.engine.sampler import TEXTS_SAMPLE, completion_text, sampling_params
from tpu_grpo.learner import parameters
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.stages import Completion, Request, SampleKey
from tpu_grpo.run.engines import SyncedEngines


@dataclass(frozen=True)
class SampledTexts:
    """Holds one completion per prompt, in the order of the prompts."""

    prompt_ids: tuple[Sequence[int], ...]
    completions: tuple[Completion, ...]
    texts: tuple[str, ...]


class SamplingEngine(Protocol):
    """The interface of an engine that samples completions for Tunix's learner."""

    def generate_texts(self, prompts: Sequence[str], config: RolloutConfig) -> SampledTexts:
        """Sample one completion for every prompt; ``prompts`` repeats the prompt of a group for each completion."""
        ...

    def install(self, params: nnx.State) -> object:
        """Install these parameters (the trainer's ``nnx.Param``), and drop caches computed with earlier parameters."""
        ...


class TextEngines:
    """The engines of a run as a `SamplingEngine`: they sample completions of rendered prompts."""

    def __init__(self, engines: SyncedEngines, tokenizer: PreTrainedTokenizerFast, rollout: RolloutSection, seed: int):
        self._engines, self._tokenizer, self._sampling, self._seed = engines, tokenizer, sampling_params(rollout), seed
        self._calls = itertools.count(1)
        self.install = engines.install

    def generate_texts(self, prompts: Sequence[str], config: RolloutConfig) -> SampledTexts:
        """Sample a completion for every prompt; the run's settings apply instead of Tunix's.

        Every call counts as a step, so that a row draws different random numbers in every call.
        """
        encoded = [tuple(self._tokenizer.encode(prompt, add_special_tokens=False)) for prompt in prompts]
        sampling, seed, step = self._sampling, self._seed, next(self._calls)
        requests = [Request(ids, sampling, SampleKey(seed, step, row, TEXTS_SAMPLE)) for row, ids in enumerate(encoded)]
        completions = tuple(self._engines.replicas.generate(requests))
        texts = tuple(completion_text(self._tokenizer, c) for c in completions)
        return SampledTexts(tuple(encoded), completions, texts)


def rollout_engine(engine: SamplingEngine, *, pad_id: int, eos_id: int) -> Any:
    """Return a value for Tunix's ``ClusterConfig.rollout_engine``, and apply the repairs of loop_repairs.py.

    Call it before ``RLCluster`` is built. No prompt may hold ``pad_id``, because Tunix masks prompts by this id.
    """
    from tpu_grpo.tunix_loop import loop_repairs  # imported here: runs with this package's learner do not need it

    loop_repairs.apply()
    return functools.partial(RolloutAdapter, engine=engine, pad_id=pad_id, eos_id=eos_id)


class RolloutAdapter(BaseRollout):
    """Wraps a `SamplingEngine` as a Tunix rollout worker."""

    def __init__(
        self,
        *,
        engine: SamplingEngine,
        pad_id: int,
        eos_id: int,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh,
        rollout_config: RolloutConfig,
    ):
        del tokenizer, mesh  # the engine has its own
        self._engine, self._pad_id, self._eos_id = engine, pad_id, eos_id
        self._actor, self._temperature = rollout_actor, rollout_config.temperature
        self._completions: list[Completion] = []

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any) -> RolloutOutput:
        """Sample completions, and pad the prompts on the left to ``rollout_config.max_prompt_length``.

        Raises DataError for a longer or empty prompt, or if the engine does not return one completion per prompt.
        """
        sampled = self._engine.generate_texts(prompts, rollout_config)
        if not len(prompts) == len(sampled.completions) == len(sampled.texts) == len(sampled.prompt_ids):
            raise DataError(
                f"the engine must answer {len(prompts)} prompts with as many completions, got "
                f"{len(sampled.completions)}; repair its generate_texts"
            )
        self._completions += sampled.completions
        width = rollout_config.max_prompt_length
        padded = np.full((len(prompts), width), self._pad_id, np.int32)
        for row, ids in enumerate(sampled.prompt_ids):
            if not 0 < len(ids) <= width:
                raise DataError(
                    f"prompts must have 1 to {width} tokens, got {len(ids)} in row {row}; raise max_prompt_length of "
                    "Tunix's RolloutConfig, or drop the prompt"
                )
            padded[row, width - len(ids) :] = ids
        return RolloutOutput(
            text=list(sampled.texts),
            logits=[],
            tokens=[np.asarray(c.token_ids, np.int32) for c in sampled.completions],
            left_padded_prompt_tokens=padded,
            logprobs=[np.asarray(c.logprobs, np.float32) for c in sampled.completions],
        )

    def take_completions(self) -> list[Completion]:
        """Return the completions since the last call, in order, and forget them."""
        taken, self._completions = self._completions, []
        return taken

    def get_per_token_logps(
        self, prompt_tokens: Int[np.ndarray, "B T_prompt"], completion_tokens: Int[np.ndarray, "B T"]
    ) -> Float[jax.Array, "B T"]:
        """Compute the trainer's log-probability, at the temperature, of every completion token, as Tunix does."""
        rows = sharding_utils.shard_input((prompt_tokens, completion_tokens), ("fsdp",))  # pyrefly: ignore[bad-argument-type]
        definition, state = nnx.split(self._actor)
        found = common.compute_per_token_logps(
            definition, state, *rows, pad_id=self._pad_id, eos_id=self._eos_id, temperature=self._temperature
        )
        assert isinstance(found, jax.Array)  # not a pair with logits
        return found

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Install all of the trainer's parameters in the engine. ``params`` is not used, because with LoRA it has only
        adapters. Completions of earlier parameters that nobody took are forgotten."""
        self._completions = []
        with jax.transfer_guard("allow"):  # on CPU, RLCluster.sync_weights forbids the transfers an engine may need
            self._engine.install(parameters(self._actor))

    def pad_id(self) -> int:
        """Return the id of the token that pads rows."""
        return self._pad_id

    def eos_id(self) -> int:
        """Return the id of the token that ends a completion."""
        return self._eos_id

    def model(self) -> None:
        """Return None, because the engine's weights are not an ``nnx`` module. Tunix then finds no arrays that trainer
        and engine share, and syncs the weights."""
        return
