"""A sampling engine behind Tunix's rollout interface, as thin as it can be.

``RLCluster`` builds its rollout worker itself, so the engine is bound beforehand:

    rollout_engine=functools.partial(RolloutAdapter, engine=engine, pad_id=0, eos_id=2)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from tpu_grpo.learner.forward import logprobs
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.stages import Completion
from tpu_grpo.tunix_loop.padded import left_padded, model_rows


@dataclass(frozen=True)
class SampledTexts:
    """Holds one completion per prompt, in the order of the prompts."""

    prompt_ids: tuple[Sequence[int], ...]
    completions: tuple[Completion, ...]
    texts: tuple[str, ...]


class SamplingEngine(Protocol):
    """Samples completions for Tunix's learner; any engine with these two methods will do."""

    def generate_texts(self, prompts: Sequence[str], config: RolloutConfig) -> SampledTexts:
        """Sample one completion for every prompt; a group's prompt comes as often as its size."""
        ...

    def install(self, params: nnx.State) -> object:
        """Use these parameters (the trainer's ``nnx.Param``) from now on and forget what was computed with others."""
        ...


class RolloutAdapter(BaseRollout):
    """Gives a `SamplingEngine` the face of a Tunix rollout worker."""

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
        del tokenizer  # the engine brings its own
        self._engine, self._mesh = engine, mesh
        self._pad_id = pad_id
        self._eos_id = eos_id
        self._actor = rollout_actor
        self._temperature = rollout_config.temperature

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any) -> RolloutOutput:
        """Sample, and pad the prompts on the left to ``rollout_config.max_prompt_length``.

        Raises:
            DataError: if the engine does not answer with one completion per prompt.
        """
        sampled = self._engine.generate_texts(prompts, rollout_config)
        if not len(prompts) == len(sampled.completions) == len(sampled.texts) == len(sampled.prompt_ids):
            raise DataError(
                f"the engine must answer {len(prompts)} prompts with as many completions, got "
                f"{len(sampled.completions)}; repair its generate_texts"
            )
        return RolloutOutput(
            text=list(sampled.texts),
            logits=[],
            tokens=[np.asarray(c.token_ids, np.int32) for c in sampled.completions],
            left_padded_prompt_tokens=left_padded(sampled.prompt_ids, rollout_config.max_prompt_length, self._pad_id),
            logprobs=[np.asarray(c.logprobs, np.float32) for c in sampled.completions],
        )

    def get_per_token_logps(
        self, prompt_tokens: Int[jax.Array, "B T_prompt"], completion_tokens: Int[jax.Array, "B T"]
    ) -> Float[jax.Array, "B T"]:
        """Compute the trainer's log-probability (float32, at the temperature) of every completion token."""
        everything = jnp.ones(completion_tokens.shape, jnp.bool_)
        rows = model_rows(prompt_tokens, completion_tokens, everything, self._pad_id)
        fills = len(prompt_tokens) % self._mesh.shape["fsdp"] == 0  # Tunix does not ask for it
        found = logprobs(self._actor, rows, temperature=self._temperature, mesh=self._mesh if fills else None)
        return found[:, prompt_tokens.shape[1] :]

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Install the trainer's parameters in the engine."""
        del filter_types
        with jax.transfer_guard("allow"):  # on CPU, RLCluster.sync_weights forbids the transfers an engine may need
            self._engine.install(params)

    def pad_id(self) -> int:
        """Return the token that fills rows."""
        return self._pad_id

    def eos_id(self) -> int:
        """Return the token that ends a completion."""
        return self._eos_id

    def model(self) -> None:
        """Return None: the engine's weights are no ``nnx`` module, so Tunix finds no common arrays and does sync."""
        return
