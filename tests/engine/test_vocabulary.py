"""Embedding and output head sharded by vocabulary: what devices hold, what moves, and that no token changes."""

import re
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.engine.building import GREEDY, SAMPLED, build_engine, disagreement, engine_options, policy, requests, tokens
from tests.models.random_checkpoint import write_random_qwen3
from tpu_grpo.engine.engine import Engine, engine_mesh
from tpu_grpo.engine.options import splits_vocabulary
from tpu_grpo.engine.sampling import SamplingColumns, sample_rows, sample_tokens
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.stages import SamplingParams

VOCABULARY, WIDTH = 304, 64
FILTERED = SamplingParams(16, temperature=0.9, top_k=20, top_p=0.8, min_p=0.02, ignore_stop=True)


def write(directory: Path, **settings: Any) -> Path:
    return write_random_qwen3(directory / "model", layers=1, hidden=WIDTH, **{"vocab": VOCABULARY} | settings)


@pytest.mark.parametrize(
    ("asked", "vocabulary", "tensor", "split"),
    [
        (None, 151_936, 8, True),
        (None, 151_936, 3, False),
        (True, 151_936, 64, True),
        (False, 151_936, 8, False),
        (None, 300, 1, False),
        (True, 300, 1, False),  # nothing to split
    ],
)
def test_a_vocabulary_is_split_where_it_divides(asked: bool | None, vocabulary: int, tensor: int, split: bool) -> None:
    assert splits_vocabulary(asked, vocabulary, tensor) is split


def test_one_that_does_not_divide_is_refused_with_the_sizes_that_do(tmp_path: Path) -> None:
    sizes = r"vocabulary of 303, got 2; use one of \[1, 3, 101\]"
    with pytest.raises(ConfigError, match=r"shard_vocab=true needs meshes.sampler.tensor to divide .* " + sizes):
        splits_vocabulary(True, 303, 2)
    options = engine_options(shard_vocab=True)
    with pytest.raises(ConfigError, match=sizes):
        Engine.build(write(tmp_path, vocab=303), engine_mesh(jax.devices()[:2]), options)


# --- the compiled step -----------------------------------------------------------------------------------------------


def moved(program: str) -> list[tuple[str, int]]:
    """Find every collective in a compiled program: (its name, elements of its largest result)."""
    found = []
    for line in program.splitlines():
        if call := re.search(r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", line):
            shapes = re.findall(r"\w+\[([\d,]*)\]", call.group(1))
            found.append((call.group(2), max(int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes)))
    return found


@pytest.mark.parametrize(("tied", "tensor"), [pytest.param(True, 2, marks=pytest.mark.slow), (False, 4)])
def test_no_table_is_gathered(tmp_path: Path, tied: bool, tensor: int) -> None:
    engine = build_engine(write(tmp_path, tied=tied), tensor=tensor, prefill_tokens=64)
    tables = [spec for name, spec in engine.weight_specs.items() if name.endswith(".embedding")]
    assert len(tables) == (1 if tied else 2)
    for spec in tables:
        assert isinstance(spec.sharding, NamedSharding)
        assert spec.sharding.shard_shape(spec.shape) == (VOCABULARY // tensor, WIDTH)
    modes: tuple[tuple[Literal["decode", "prefill"], int], ...] = (("decode", 8), ("prefill", 64))
    for mode, rows in modes:
        collectives = moved(engine.lower(mode, rows).compile().as_text() or "")
        assert ("all-reduce", rows * WIDTH) in collectives  # the looked-up rows of the embedding
        share = 8 // tensor * VOCABULARY // tensor
        assert ("all-to-all", share) in collectives  # the logits
        assert max(elements for _, elements in collectives) == max(rows * WIDTH, share)  # and never a table


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "tensor"), [(1, 4), (6, 4), (6, 2), (6, 1)])
def test_sampling_from_split_logits_is_the_same_to_the_bit(rows: int, tensor: int) -> None:
    """Also with fewer rows than devices, ties, and every filter."""
    rng = np.random.default_rng(rows)
    logits = rng.normal(size=(rows, 16 * VOCABULARY)).astype(np.float32)
    logits[::2] = np.round(8 * logits[::2])  # many ties
    columns = SamplingColumns(
        temperature=np.where(np.arange(rows) % 3 == 2, 0.0, 0.9).astype(np.float32),
        top_k=np.arange(rows, dtype=np.int32) * 7,
        top_p=np.full(rows, 0.9, np.float32),
        min_p=np.full(rows, 0.01, np.float32),
        key=rng.integers(0, 9, (rows, 4)).astype(np.uint32),
        position=np.arange(rows, dtype=np.int32),
    )
    mesh = engine_mesh(jax.devices()[:tensor])
    split = jax.device_put(logits, NamedSharding(mesh, P("data", "tensor")))
    with jax.set_mesh(mesh):
        found = jax.jit(lambda given, settings: sample_rows(given, settings, mesh))(split, columns)
    alone = jax.jit(sample_tokens)(jnp.asarray(logits), columns)
    for ours, theirs in zip(found, alone, strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.slow  # the sampling above is compared to the bit, and test_families.py has untied heads
def test_tokens_are_those_of_one_device(tmp_path: Path) -> None:
    """Untied, rows that the devices do not divide, all kinds of sampling; the tied case is in test_engine.py."""
    checkpoint = write(tmp_path, tied=False)
    model = policy(checkpoint)
    asked = [request for sampling in (GREEDY, SAMPLED, FILTERED) for request in requests(sampling=sampling)]
    sizes = {"max_running_requests": 3, "prefill_tokens": 64}
    alone = build_engine(checkpoint, model, **sizes)
    split = build_engine(checkpoint, model, tensor=4, shard_vocab=True, **sizes)
    for name in ("lm_head.embedding", "model.embed_tokens.embedding"):  # what the sync delivered
        assert [shard.data.shape for shard in split.weights[name].addressable_shards] == [(VOCABULARY // 4, WIDTH)] * 4
    completions = split.generate(asked)
    assert tokens(completions) == tokens(alone.generate(asked))
    assert disagreement(model, asked, completions) <= 1e-4
