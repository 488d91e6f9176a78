"""Exports a policy as a directory: a Hugging Face checkpoint, or adapters in the format of PEFT.

Its README.md has the run's metrics; its tpu_grpo.yaml is a copy of the run's config, for scripts/sample.py. The
trainer's hosts gather one array at a time, and host 0 writes it. The directory gets its final name once it is complete.
"""

import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import PreTrainedTokenizerFast

from tpu_grpo.config import LoraSection, RolloutSection, RunConfig
from tpu_grpo.config.plugins import addition
from tpu_grpo.hosts import Hosts
from tpu_grpo.learner import parameters, whole
from tpu_grpo.models.checkpoint import Checkpoint, read_checkpoint
from tpu_grpo.models.hf_directory import Read, copy_tokenizer, new_directory, write_settings, write_tensors
from tpu_grpo.models.lora import write_adapter_files
from tpu_grpo.models.tunix_model import is_abstract
from tpu_grpo.observe.run_files import EXPORTED_CONFIG_FILE
from tpu_grpo.observe.summary import versions
from tpu_grpo.run.parts import stop_ids
from tpu_grpo.weights.plan import adapters_of, merged, named_leaves

MIB = 2**20


@dataclass(frozen=True)
class Policy:
    """The policy to export, with the checkpoint and tokenizer of the model that the run started from."""

    model: nnx.Module
    step: int
    checkpoint: Checkpoint
    tokenizer: PreTrainedTokenizerFast
    stepped: Mapping[str, Any] = field(default_factory=dict)
    """Name -> float32 parameter that is exported instead of the model's; empty to export the model's own."""

    @property
    def leaves(self) -> dict[str, Any]:
        """The policy's parameters, by name."""
        return {**named_leaves(parameters(self.model)), **self.stepped}


def export_policy(config: RunConfig, policy: Policy, directory: Path, hosts: Hosts | None = None) -> None:
    """Write a policy into a new directory; every host calls this, host 0 writes.

    Raises:
        ConfigError: the directory, or a file of that name, exists already.
        OSError: writing failed; nothing of the directory is left.
    """
    hosts, kind = hosts or Hosts(), config.export.kind
    if is_abstract(nnx.state(policy.model)):  # the hosts that hold the parameters export them
        hosts.barrier(f"export of step {policy.step}")
        return
    dtype = jnp.dtype(config.export.dtype or config.model.dtype)
    with new_directory(directory) if hosts.is_first else nullcontext() as target:
        if kind == "adapter":
            count = _write_adapters(target, config.model.lora, policy, dtype)
        else:
            ends = stop_ids(config.environment, config.data, policy.tokenizer, policy.checkpoint.directory)
            defaults = {"eos_token_id": list(ends), **_sampling(config.rollout)}
            count = _write_model(target, policy, dtype, config.model.lora.alpha, config.export.shard_mib, defaults)
        if target is not None:
            card = addition("model_card")
            facts = card.ModelFacts(
                run=config.run.name,
                step=policy.step,
                base=config.model.path,
                kind=kind,
                family=policy.checkpoint.family.model_type,
                dtype=dtype.name,
                parameters=count,
                merged=config.model.lora.rank is not None,
            )
            card.write_model_card(target, config.run_dir, facts, config.to_yaml(), versions())
            (target / EXPORTED_CONFIG_FILE).write_text(config.to_yaml(), encoding="utf-8")
    hosts.barrier(f"export of step {policy.step}")


def _write_model(
    target: Path | None, policy: Policy, dtype: np.dtype[Any], alpha: float, shard_mib: int, defaults: dict[str, Any]
) -> int:
    """Write tensors and tokenizer, with ``defaults`` as settings of generation; returns the number of parameters."""
    checkpoint = policy.checkpoint
    write_tensors(target, checkpoint, _reader(policy, alpha), dtype, shard_mib * MIB)
    if target is not None:
        write_settings(target, checkpoint, policy.tokenizer, dtype, defaults)
        read_checkpoint(target)  # check it by loading it, as users will
    return checkpoint.parameter_count


def _write_adapters(target: Path | None, lora: LoraSection, policy: Policy, dtype: np.dtype[Any]) -> int:
    leaves, names = policy.leaves, named_leaves(nnx.state(policy.model, nnx.LoRAParam))
    adapters = {name: whole(leaves[name]).astype(dtype) for name in names}
    if target is not None:
        base = policy.checkpoint.directory.absolute()
        write_adapter_files(target, adapters, lora, str(base))
        copy_tokenizer(base, target)
    return sum(value.size for value in adapters.values())


def _reader(policy: Policy, alpha: float) -> Read:
    """Return a function that reads a parameter by name; adapters are merged in float32, as in the weight sync."""
    leaves = policy.leaves
    adapters = adapters_of(leaves)
    axes = {rule.source: rule.input_axis for rule in policy.checkpoint.weight_rules}

    def read(name: str) -> np.ndarray:
        weight = whole(leaves[name])
        if name not in adapters:
            return weight
        a, b = (jnp.asarray(whole(leaves[part])) for part in adapters[name])
        axis = axes[re.sub(r"\.\d+\.", ".*.", name, count=1)]
        return np.asarray(merged(jnp.asarray(weight), a, b, alpha / a.shape[-1], axis))

    return read


def _sampling(rollout: RolloutSection) -> dict[str, Any]:
    """Return the run's sampling settings under Hugging Face's names.

    ``max_new_tokens`` is left out: lm-eval and vLLM's server would cut longer answers, whatever length users request.
    """
    if rollout.temperature == 0.0:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": rollout.temperature,
        "top_k": rollout.top_k,
        "top_p": rollout.top_p,
        "min_p": rollout.min_p or None,
    }
