"""Rollout engines, with the weight sync that moves the trainer's policy into them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpu_grpo.config import MeshesSection, ModelSection, RolloutSection
from tpu_grpo.engine.replicas import Replicas
from tpu_grpo.engine.sampler import PROBE_SAMPLE
from tpu_grpo.hosts import Hosts, hosts_of
from tpu_grpo.learner import Learner, checksums, frozen_leaves
from tpu_grpo.models.families.leaves import WeightRule
from tpu_grpo.records.errors import WeightsError
from tpu_grpo.records.stages import Prompt, Request, SampleKey, SamplingParams, SyncResult
from tpu_grpo.weights.plan import named_leaves
from tpu_grpo.weights.sync import ALONE, CopyCheck, WeightSync
from tpu_grpo.weights.transport import Compiler, compiled

PROBE_TOKENS = 16
"""The most tokens of a completion of `Probe`."""
BOUNDS = {"float32": 1e-3, "bfloat16": 0.2}
"""For each model.dtype, the largest mean difference of log-probabilities that rounding can cause. We measured 1e-6 to
2e-5 in float32 and 0.005 to 0.1 in bfloat16, the most in models with experts, where rounding can change routing."""
EIGHT_BITS_BOUND = 0.5
"""With rollout.kv_dtype=fp8 or rollout.weights_dtype=int8 the bound is at least this number. We measured 0.006 to 0.19,
the most in random models with large weights."""


def build_weight_sync(
    section: MeshesSection,
    lora_alpha: float,
    rules: Sequence[WeightRule],
    params: nnx.State,
    target: Mapping[str, jax.ShapeDtypeStruct],
    hosts: Hosts = ALONE,
    compiler: Compiler = compiled,
) -> WeightSync:
    """Compile the run's weight sync from these parameters (arrays or their specs) to the sampler's ``target``.

    Raises:
        WeightsError: if the trainer's and the sampler's parameters do not correspond.
        ConfigError: if the largest leaf needs more temporary memory than meshes.sync_temporary_mib.
    """
    return WeightSync(
        rules,
        named_leaves(params),
        target,
        temporary_bytes=section.sync_temporary_mib * 2**20,
        lora_alpha=lora_alpha,
        frozen=frozen_leaves(params),
        hosts=hosts,
        compiler=compiler,
    )


class SyncedEngines:
    """The run's engines, into which ``install`` moves the trainer's parameters."""

    def __init__(
        self,
        replicas: Replicas,
        rules: Sequence[WeightRule],
        section: MeshesSection,
        lora_alpha: float,
        hosts: Hosts,
    ):
        self.replicas = replicas
        self._rules = rules
        self._section, self._lora_alpha = section, lora_alpha
        self._hosts = hosts
        self.sync: WeightSync | None = None
        """The compiled weight sync; None before the first ``install``."""
        self._checks: tuple[CopyCheck, CopyCheck] | None = None

    def install(self, params: nnx.State) -> SyncResult:
        """Move the trainer's parameters into every replica, and clear the prefix caches of the old weights.

        On a host without devices of the trainer, ``params`` are abstract: they have no values.

        Raises:
            LockstepError: if copies of a parameter differ between hosts.
        """
        leaves = named_leaves(params)
        if self.sync is None:
            specs = self.replicas.weight_specs
            ends = (next(iter(side.values())).sharding.device_set for side in (leaves, specs))
            own = self._hosts.among(hosts_of(device for devices in ends for device in devices))
            self.sync = build_weight_sync(self._section, self._lora_alpha, self._rules, params, specs, own)
        weights, result = self.sync(leaves)
        self._check_copies(leaves, weights)
        self.replicas.install_weights(weights)
        return result

    def release(self) -> None:
        """Free the engines' caches and the weights that the sync wrote, until the next ``install``.

        Weights that share arrays with the trainer stay, because the trainer needs them.
        """
        assert self.sync is not None, "install comes before release"
        self.replicas.release()
        self.sync.release()

    def worst_leaf(self, params: nnx.State) -> tuple[str, float]:
        """Compare the sampler's parameters with recomputed ones; return (name, largest difference) of the worst one.

        In weights with merged adapters, a difference of the last bit is ignored: two programs may round differently.
        """
        assert self.sync is not None, "install comes first"
        gaps = {}
        for move, leaf in self.sync.expected(named_leaves(params)):
            gap = self.replicas.differs_by(move.target, leaf)
            last_bit = 1 if leaf.dtype == jnp.int8 else jnp.finfo(leaf.dtype).eps * jnp.abs(leaf).max()
            allowed = float(last_bit) if gap and move.merges else 0.0
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
        if self._section.slices > 1:
            self._compare_slices(leaves)

    def _compare_slices(self, leaves: Mapping[str, jax.Array]) -> None:
        """Compare checksums of the trainer's parameters, which all slices hold on the same devices, between slices."""
        share = self._hosts.count // self._section.slices  # hosts are numbered slice by slice
        places = {host % share for host in hosts_of(next(iter(leaves.values())).sharding.device_set)}
        members = [host for host in range(self._hosts.count) if host % share in places]
        if self._hosts.index in members:
            self._hosts.among(members).agree("parameters of the slices", repr(checksums(leaves)))


def probe_bound(dtype: str, rollout: RolloutSection) -> float:
    """Return the probe's bound for model.dtype and the engines' types, used when meshes.probe_bound is unset."""
    eight_bits = rollout.kv_dtype == "fp8" or rollout.weights_dtype == "int8"
    return max(BOUNDS[dtype], EIGHT_BITS_BOUND) if eight_bits else BOUNDS[dtype]


@dataclass(frozen=True)
class Probe:
    """Compares engines and trainer after the first sync, and then once in ``meshes.probe_every`` syncs.

    The engines sample a few tokens after fixed prompts with fixed seeds, and the trainer computes the log-probabilities
    of these tokens. A mean difference beyond the bound stops the run. Each weight of the engines is also compared with
    values that a separate program computes: a few tokens would not reveal a weight that one sync left out.
    """

    section: MeshesSection
    model: ModelSection
    rollout: RolloutSection
    seed: int
    return_experts: bool
    """Whether the trainer replays the routing of the engines' experts."""
    engines: SyncedEngines
    learner: Learner
    prompts: Sequence[Prompt]

    def after_sync(self, number: int) -> float | None:
        """Compare engines and trainer if due after sync ``number`` (from 0); every host must call this.

        Returns the mean difference of the log-probabilities, or None if no comparison was due.

        Raises:
            WeightsError: if engines and trainer hold different policies; the message names the parameter that differs
                most, if any.
        """
        every = self.section.probe_every
        if every == 0 or number % every:
            return None
        worst, gap = self.engines.worst_leaf(self.learner.params())
        difference = self._difference()
        bound = self.section.probe_bound or probe_bound(self.model.dtype, self.rollout)
        if gap == 0.0 and difference <= bound:
            return difference
        where = (
            f"the sampler's {worst} is off by up to {gap:.3g}"
            if gap > 0.0
            else "every leaf is what the family's rules say, so the two sides compute different models"
        )
        raise WeightsError(
            f"after sync {number} the engines must hold the trainer's parameters and find tokens as likely, within "
            f"meshes.probe_bound={bound:g} (mean difference of log-probabilities), got {difference:.3g}: {where}; what "
            "was sampled since the last good probe is of another policy: continue from a checkpoint before it"
        )

    def _difference(self) -> float:
        """Return the mean of |engine - trainer| over the log-probabilities of the probe's tokens."""
        rollout = self.rollout
        sampling = SamplingParams(min(rollout.max_new_tokens, PROBE_TOKENS), rollout.temperature, ignore_stop=False)
        requests = [
            Request(prompt.token_ids, sampling, SampleKey(self.seed, 0, row, PROBE_SAMPLE), self.return_experts)
            for row, prompt in enumerate(self.prompts)
        ]
        completions = self.engines.replicas.generate(requests)
        trainer_BT = self.learner.logprobs([prompt.token_ids for prompt in self.prompts], completions)
        gaps = [np.abs(row[: len(c.token_ids)] - c.logprobs) for row, c in zip(trainer_BT, completions, strict=True)]
        return float(np.concatenate(gaps).mean())
