"""Engines that hold the trainer's policy: rollout engines joined with the weight sync that feeds them."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import PreTrainedTokenizerFast

from tpu_grpo.config import RunConfig
from tpu_grpo.engine.replicas import Replicas
from tpu_grpo.engine.sampler import TEXTS_SAMPLE, completion_text, sampling_params
from tpu_grpo.hosts import Hosts
from tpu_grpo.learner import frozen_leaves
from tpu_grpo.models.families.leaves import WeightRule
from tpu_grpo.records.stages import Request, SampleKey, SyncResult
from tpu_grpo.tunix_loop.adapter import SampledTexts
from tpu_grpo.weights.copies import CopyCheck
from tpu_grpo.weights.plan import named_leaves
from tpu_grpo.weights.sync import WeightSync


def build_weight_sync(
    config: RunConfig, rules: Sequence[WeightRule], params: nnx.State, target: Mapping[str, jax.ShapeDtypeStruct]
) -> WeightSync:
    """Compile the run's weight sync from these parameters (arrays or their specs) to the sampler's ``target``.

    Raises:
        WeightsError: if the leaves of the two sides do not correspond.
        ConfigError: if the largest leaf needs more temporary memory than meshes.sync_temporary_mib.
    """
    return WeightSync(
        rules,
        named_leaves(params),
        target,
        temporary_bytes=config.meshes.sync_temporary_mib * 2**20,
        lora_alpha=config.model.lora.alpha,
        frozen=frozen_leaves(params),
    )


class SyncedEngines:
    """The run's engines, into which ``install`` moves the trainer's parameters."""

    def __init__(
        self,
        replicas: Replicas,
        rules: Sequence[WeightRule],
        tokenizer: PreTrainedTokenizerFast,
        config: RunConfig,
        hosts: Hosts,
    ):
        self.replicas = replicas
        self._rules = rules
        self._tokenizer = tokenizer
        self._config = config
        self._hosts = hosts
        self._calls = itertools.count(1)
        self._sync: WeightSync | None = None
        self._checks: tuple[CopyCheck, CopyCheck] | None = None

    @property
    def sync(self) -> WeightSync | None:
        """The compiled weight sync; None before the first ``install``."""
        return self._sync

    @property
    def shared_leaves(self) -> frozenset[str]:
        """The trainer's parameters whose arrays the engines hold as well, after the first ``install``."""
        assert self._sync is not None, "install comes first"
        return self._sync.shared_leaves

    def install(self, params: nnx.State) -> SyncResult:
        """Move the trainer's parameters into every replica, and drop prefixes cached under the old ones.

        Raises:
            LockstepError: if copies of a parameter differ between hosts.
        """
        leaves = named_leaves(params)
        if self._sync is None:
            self._sync = build_weight_sync(self._config, self._rules, params, self.replicas.weight_specs)
        weights, result = self._sync(leaves)
        self._check_copies(leaves, weights)
        self.replicas.install_weights(weights)
        return result

    def release(self) -> None:
        """Free the engines' caches and those of their weights that the sync wrote, until the next ``install``.

        Leaves that are aliased with the trainer's stay, because the trainer needs them.
        """
        assert self._sync is not None, "install comes before release"
        self.replicas.release()
        self._sync.release()

    def worst_leaf(self, params: nnx.State) -> tuple[str, float]:
        """Return the sampler parameter that differs most from the one recomputed from the trainer's, and by how much.

        Differences in the last bit of a merged adapter are ignored, because two programs may round differently.
        """
        assert self._sync is not None, "install comes first"
        gaps = {}
        for move, leaf in self._sync.expected(named_leaves(params)):
            allowed = float(jnp.finfo(leaf.dtype).eps * jnp.abs(leaf).max()) if move.merges else 0.0
            gap = self.replicas.differs_by(move.target, leaf)
            gaps[move.target] = gap if gap > allowed else 0.0
        worst = max(gaps, key=lambda name: gaps[name])
        return worst, gaps[worst]

    def _check_copies(self, leaves: Mapping[str, jax.Array], weights: Mapping[str, jax.Array]) -> None:
        if self._hosts.count == 1:
            return
        if self._checks is None:
            self._checks = CopyCheck("trainer", leaves), CopyCheck("sampler", weights)
        for check, held in zip(self._checks, (leaves, weights), strict=True):
            check(held, self._hosts)

    def generate_texts(self, prompts: Sequence[str], config: Any) -> SampledTexts:
        """Sample completions of rendered prompts for Tunix's own loops; ``config`` is Tunix's RolloutConfig.

        Every call counts as a step, so that a row draws other random numbers at each.
        """
        del config  # the run's own settings apply
        encoded = [tuple(self._tokenizer.encode(prompt, add_special_tokens=False)) for prompt in prompts]
        sampling, seed, step = sampling_params(self._config), self._config.run.seed, next(self._calls)
        requests = [Request(ids, sampling, SampleKey(seed, step, row, TEXTS_SAMPLE)) for row, ids in enumerate(encoded)]
        completions = tuple(self.replicas.generate(requests))
        texts = tuple(completion_text(self._tokenizer, c) for c in completions)
        return SampledTexts(tuple(encoded), completions, texts)
