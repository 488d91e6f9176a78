"""The sampler with merged adapters against the model that has them beside its weights."""

from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from tests.engine.building import PROMPTS, build_engine, disagreement, requests, trainer_logprobs
from tests.models.random_checkpoint import write_random
from tests.models.test_lora import randomize, with_lora
from tpu_grpo.config import LoraSection
from tpu_grpo.models.checkpoint import read_checkpoint
from tpu_grpo.weights.plan import named_leaves
from tpu_grpo.weights.sync import WeightSync

MERGED_AGAINST_ADAPTED = 1e-4
"""The contract's bound in float32; measured 1e-6 to 6e-6."""


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        pytest.param("qwen3", 1, marks=pytest.mark.slow),
        ("qwen3", 2),
        pytest.param("qwen2", 1, marks=pytest.mark.slow),
        pytest.param("qwen2", 2, marks=pytest.mark.slow),
        pytest.param("llama", 1, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 2, marks=pytest.mark.slow),
        pytest.param("gemma2", 4, marks=pytest.mark.slow),  # keys and values have one adapter, and are repeated
    ],
)
def test_merged_sampler_and_adapted_model_agree(tmp_path: Path, family: str, tensor: int) -> None:
    directory = write_random(family, tmp_path / "model", scale=0.3)
    section = LoraSection(rank=4, alpha=8.0)
    base, model = with_lora(directory, section)
    engine = build_engine(directory, base, tensor, batch_paddings=(8,), prefill_tokens=64)
    randomize(model)
    mesh = jax.tree.leaves(engine.weight_specs)[0].sharding.mesh
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    leaves = {k: jax.device_put(v, replicated) for k, v in named_leaves(nnx.state(model, nnx.Param)).items()}
    sync = WeightSync(read_checkpoint(directory).weight_rules, leaves, engine.weight_specs, lora_alpha=section.alpha)
    engine.install_weights(sync(leaves)[0])
    asked = requests(PROMPTS)
    completions = engine.generate(asked)
    assert disagreement(model, asked, completions) <= MERGED_AGAINST_ADAPTED
    pairs = zip(trainer_logprobs(model, asked, completions), trainer_logprobs(base, asked, completions), strict=True)
    assert max(np.abs(adapted - plain).max() for adapted, plain in pairs) > 0.1  # the adapters do something
