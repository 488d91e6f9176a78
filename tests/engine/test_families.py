"""Every family from its files into the trainer and through the sync into the engine, against float64 NumPy; and the
sampler with merged adapters against the model that has them beside its weights."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.engine.building import (
    PROMPTS,
    build_engine,
    check_against_float64,
    disagreement,
    install,
    policy,
    requests,
    trainer_logprobs,
)
from tests.models.random_checkpoint import GEMMA, GEMMA4_EXPERTS, LLAMA3_SCALING, YARN_SCALING, write_random
from tests.models.test_lora import randomize, with_lora
from tests.models.test_transformers5 import SAVED
from tpu_grpo.config import LoraSection
from tpu_grpo.models.families import FAMILIES
from tpu_grpo.records.stages import SamplingParams

ENGINE_AGAINST_TRAINER, AGAINST_REFERENCE = 1e-4, 3e-4
"""The contract's bounds in float32; measured 8e-6 to 2e-5, and 6e-6 to 8e-5."""
SIZES: dict[str, Any] = {"context_tokens": 128, "batch_paddings": (8,), "prefill_tokens": 64}
LONG = tuple(np.random.default_rng(0).integers(2, 300, 110).tolist())
"""Beyond the original context of LLAMA3_SCALING."""

CASES: list[tuple[str, dict[str, Any], int]] = [
    ("qwen2", {"tied": False, "rope_scaling": YARN_SCALING}, 4),  # two key-value heads: weights and biases are repeated
    ("qwen3", {"tied": False}, 2),
    ("qwen3_moe", {"tied": False}, 4),
    ("llama", {"tied": True, "rope_scaling": LLAMA3_SCALING}, 2),
    ("mistral", {"tied": False}, 2),
    ("phi3", {"tied": False}, 2),
    ("gemma2", {"tied": True}, 4),
    ("gemma3_text", {"tied": True}, 4),
    ("gemma4_text", {"tied": True} | GEMMA4_EXPERTS, 2),
]
MORE_CASES: list[tuple[str, dict[str, Any], int]] = [
    ("qwen2", {"tied": True}, 1),
    ("qwen3", {"tied": True, "rope_scaling": YARN_SCALING}, 1),
    ("llama", {"tied": False, "rope_scaling": YARN_SCALING}, 2),
    ("qwen3_moe", {"tied": False}, 1),
    ("llama", {"tied": False}, 1),
    ("gemma2", {"tied": True, "kv_heads": 1}, 1),
    ("gemma2", {"tied": True, "kv_heads": 4}, 2),  # queries, keys and values are one weight in Tunix
    ("gemma3_text", {"tied": False, "kv_heads": 1}, 1),
    ("gemma3_text", {"tied": False, "kv_heads": 4}, 2),
    ("gemma4_text", {"tied": True, "kv_heads": 4, "num_global_key_value_heads": 1}, 4),
]
"""Of families that are in CASES already."""


RELATIVES = ("qwen2", "mistral", "phi3", "gemma4_text")
"""Families whose layers are those of Qwen3 and Llama, but for names and settings; test_gemma.py has the last one."""


def name_of(family: str, options: dict[str, Any], tensor: int) -> str:
    heads = f" kv_heads {options['kv_heads']}" if "kv_heads" in options else ""
    scaled = f" {options['rope_scaling']['rope_type']}" if "rope_scaling" in options else ""
    return f"{family} {'tied' if options['tied'] else 'untied'} tensor {tensor}{heads}{scaled}"


def test_every_family_is_here() -> None:
    assert {family for family, _, _ in CASES} == set(FAMILIES)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "options", "tensor"),
    [
        *(pytest.param(*case, id=name_of(*case), marks=[pytest.mark.slow] * (case[0] in RELATIVES)) for case in CASES),
        *(pytest.param(*case, id=name_of(*case), marks=pytest.mark.slow) for case in MORE_CASES),
    ],
)
def test_engine_trainer_and_reference_agree(tmp_path: Path, family: str, options: dict[str, Any], tensor: int) -> None:
    directory = write_random(family, tmp_path / "model", scale=0.3, **options)
    model = policy(directory)
    engine = build_engine(directory, model, tensor, **SIZES)
    asked = requests([*PROMPTS[:3], LONG])
    check_against_float64(directory, model, engine, asked, ENGINE_AGAINST_TRAINER, AGAINST_REFERENCE)


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        *("qwen3_moe", "llama", "gemma3"),
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3_yarn", "mistral", "phi3", "gemma3_text")),
    ],
)
def test_the_engine_computes_what_transformers_5_does(name: str) -> None:
    """The library's transformers would take 10,000 for the base of positions, no scaling, and 128 experts."""
    directory = SAVED / name
    theirs = np.load(directory / "expected.npz")
    engine = build_engine(directory, policy(directory), **SIZES)
    places = range(4, 40, 5)
    prompts = [tuple(theirs["tokens"][0, : place + 1].tolist()) for place in places]
    asked = requests(prompts, SamplingParams(max_new_tokens=1, ignore_stop=True))
    for completion, logits in zip(engine.generate(asked), theirs["logits"][0], strict=True):
        first, logprob = completion.token_ids[0], completion.logprobs[0]
        assert abs(logprob - jax.nn.log_softmax(logits)[first]) <= ENGINE_AGAINST_TRAINER


# --- adapters ---------------------------------------------------------------------------------------------------------


MERGED_AGAINST_ADAPTED = 1e-4
"""The contract's bound in float32; measured 1e-6 to 6e-6."""


@pytest.mark.full
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
        pytest.param("gemma3_text", 2, marks=pytest.mark.slow),
        pytest.param("gemma4_text", 2, marks=pytest.mark.slow),  # in the second layer keys are values
    ],
)
def test_merged_sampler_and_adapted_model_agree(tmp_path: Path, family: str, tensor: int) -> None:
    directory = write_random(family, tmp_path / "model", scale=0.3, tied=family in GEMMA)
    section = LoraSection(rank=4, alpha=8.0)
    base, model = with_lora(directory, section)
    engine = build_engine(directory, base, tensor, **SIZES)
    randomize(model)
    install(engine, model, lora_alpha=section.alpha)
    asked = requests(PROMPTS)
    completions = engine.generate(asked)
    assert disagreement(model, asked, completions) <= MERGED_AGAINST_ADAPTED
    pairs = zip(trainer_logprobs(model, asked, completions), trainer_logprobs(base, asked, completions), strict=True)
    assert max(np.abs(adapted - plain).max() for adapted, plain in pairs) > 0.1  # the adapters do something
