"""Token sampling: drawn frequencies and noise against exact distributions, filters against a sort in float64.

Logits that are sharded by vocabulary: what devices hold, what moves, and that no token changes.
"""

import itertools
import re
from pathlib import Path
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
from scipy import stats

from tests.engine.building import build_engine
from tests.models.random_checkpoint import write_random_qwen3
from tpu_grpo.engine import sampling
from tpu_grpo.engine.engine import engine_mesh
from tpu_grpo.engine.sampling import SamplingColumns, argmax_in_two, filter_logits, sample_rows, sample_tokens
from tpu_grpo.models import thresholds
from tpu_grpo.planning.slices import open_slice, replica_devices


def columns(rows: int = 1, **settings: Any) -> SamplingColumns:
    """Return the same settings for all rows, with a sample number per row; filters are neutral unless given."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings
    key = np.zeros((rows, 4), np.uint32)
    key[:, 0], key[:, 3] = 11, np.arange(rows)  # one seed, a sample number per row

    def filled(value: float, dtype: Any) -> jax.Array:
        return jnp.asarray(np.full(rows, value, dtype))

    return SamplingColumns(
        temperature=filled(values["temperature"], np.float32),
        top_k=filled(values["top_k"], np.int32),
        top_p=filled(values["top_p"], np.float32),
        min_p=filled(values["min_p"], np.float32),
        key=jnp.asarray(key),
        position=filled(7, np.int32),
    )


PROBS = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
LOGITS = np.log(PROBS)
DRAWS = 20_000
ROWS = 512
"""Of the other tests, so that they share a program."""
SAMPLE = jax.jit(sample_tokens)


def logits_of(rows: int) -> jax.Array:
    return jnp.asarray(np.broadcast_to(np.float32(LOGITS), (rows, len(LOGITS))))


def draw(rows: int = DRAWS, **settings: float) -> tuple[np.ndarray, np.ndarray]:
    tokens, logprobs, *_ = SAMPLE(logits_of(rows), columns(rows, **settings))
    return np.asarray(tokens), np.asarray(logprobs)


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, PROBS),
        ({"temperature": 0.5}, PROBS**2),
        ({"temperature": 2.0}, PROBS**0.5),
        ({"top_k": 2}, PROBS * [1, 1, 0, 0, 0]),
        ({"top_p": 0.75}, PROBS * [1, 1, 1, 0, 0]),
        ({"min_p": 0.2}, PROBS * [1, 1, 1, 1, 0]),
        # Temperature first: the squared masses are 0.16, 0.09, ... of 0.2850, so top-p 0.8 keeps two tokens, not three.
        ({"temperature": 0.5, "top_p": 0.8}, PROBS**2 * [1, 1, 0, 0, 0]),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.99, "min_p": 0.2}, PROBS**2 * [1, 1, 0, 0, 0]),
    ],
    ids=str,
)
def test_frequencies_are_the_distributions(settings: dict[str, float], weights: np.ndarray) -> None:
    tokens, _ = draw(DRAWS, **settings)
    expected = DRAWS * weights / weights.sum()
    counts = np.bincount(tokens, minlength=len(PROBS))
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    assert stats.chisquare(counts[possible], expected[possible]).pvalue > 1e-3


@pytest.mark.full
def test_logprobs_are_of_the_full_distribution_at_the_temperature() -> None:
    for settings in ({}, {"top_k": 2}, {"top_p": 0.5, "min_p": 0.3}):
        for temperature in (0.5, 1.0, 3.0):
            tokens, logprobs = draw(ROWS, temperature=temperature, **settings)
            weights = PROBS ** (1 / temperature)
            np.testing.assert_allclose(logprobs, np.log(weights / weights.sum())[tokens], atol=1e-6)


def test_greedy_takes_the_likeliest_at_temperature_one() -> None:
    tokens, logprobs = draw(ROWS, temperature=0.0, top_k=3)
    assert tokens.tolist() == [0] * ROWS
    np.testing.assert_allclose(logprobs, np.log(0.4), atol=1e-6)


def test_two_reductions_give_the_first_index_of_the_maximum() -> None:
    """Three values make many ties; a row of -inf has its maximum at its start; NaN has none, but is in the row."""
    values = np.random.default_rng(0).choice(np.array([-np.inf, -1.0, 3e38], np.float32), (200, 4))
    values[0], values[1, 0] = -np.inf, np.nan
    found = np.asarray(argmax_in_two(jnp.asarray(values)))
    assert np.delete(found, 1).tolist() == np.delete(values, 1, axis=0).argmax(axis=1).tolist()
    assert 0 <= found[1] < 4


@pytest.mark.parametrize(("platform", "found"), [("cpu", 0), ("tpu", 1)])
def test_only_cpus_take_two_reductions(platform: str, found: int) -> None:
    """XLA for TPUs gets a single argmax, a reduction of two operands, for greedy rows and others together."""
    lowered = SAMPLE.trace(logits_of(2), columns(2)).lower(lowering_platforms=(platform,))
    assert len(re.findall(r"stablehlo\.reduce\(.*\), \(", lowered.as_text())) == found


def test_rows_with_filters_leave_others_alone() -> None:
    """Batching: a row's token is the same whether or not another row filters, is greedy, or is there at all."""
    alone, _ = draw(ROWS)
    index = np.arange(ROWS, dtype=np.int32)
    mixed = columns(ROWS)._replace(top_k=index % 2, temperature=np.where(index % 4 == 1, 0.0, 1.0).astype(np.float32))
    tokens, *_ = SAMPLE(logits_of(ROWS), mixed)
    assert np.asarray(tokens)[::2].tolist() == alone[::2].tolist()
    assert set(np.asarray(tokens)[1::2].tolist()) == {0}


@pytest.mark.parametrize("part", ["seed", "step", "prompt", "sample", "position"])
def test_every_part_of_the_key_decides(part: str) -> None:
    """512 rows that differ in nothing draw one token; let any one part differ and they draw the distribution."""
    logits = logits_of(ROWS)
    same = columns(ROWS)._replace(key=jnp.ones((ROWS, 4), jnp.uint32))
    assert len(set(np.asarray(SAMPLE(logits, same)[0]).tolist())) == 1
    if part == "position":
        varied = same._replace(position=jnp.arange(ROWS))
    else:
        column = ["seed", "step", "prompt", "sample"].index(part)
        varied = same._replace(key=same.key.at[:, column].set(jnp.arange(ROWS, dtype=jnp.uint32)))
    counts = np.bincount(np.asarray(SAMPLE(logits, varied)[0]), minlength=5)
    assert stats.chisquare(counts, ROWS * PROBS).pvalue > 1e-3


@pytest.mark.full
def test_one_program_serves_all_settings() -> None:
    program = jax.jit(lambda logits, settings: sample_tokens(logits, settings))
    logits = jnp.zeros((4, 5))
    for settings in ({}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5, "min_p": 0.1, "temperature": 2.0}):
        program(logits, columns(4, **settings))
    assert cast(Any, program)._cache_size() == 1


# --- noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_noise_is_gumbel_distributed() -> None:
    """2 million values in cells of equal probability, and the largest 2,000 in cells of 100, against exact theory."""
    count = 2**21
    noise = np.asarray(sampling._gumbel(jnp.arange(4, dtype=jnp.uint32), jnp.int32(5), count), np.float64)
    above = count * -np.expm1(-np.exp(-noise))  # how many values are expected above each
    assert stats.chisquare(np.histogram(above, bins=np.linspace(0, count, 101))[0]).pvalue > 1e-3
    largest = np.histogram(above, bins=np.arange(0, 2001, 100))[0]
    assert stats.chisquare([*largest, count - largest.sum()], [100] * 20 + [count - 2000]).pvalue > 1e-3


def test_noise_ends_at_34() -> None:
    """Bits become -log(-log(1 - u)), with u made of the upper 24 bits of both words."""
    rng = np.random.default_rng(0)
    coarse = (2.0 ** rng.uniform(0, 32, 5_000)).astype(np.uint32)
    coarse[:8] = [0, 0, 0, 0, 1, 2**32 - 1, 2**31 - 1, 2**31]
    fine = rng.integers(0, 2**32, 5_000).astype(np.uint32)
    fine[:4] = [0, 2**8, 2**31, 2**32 - 1]
    noise = np.asarray(sampling._gumbel_of_bits(jnp.asarray(coarse), jnp.asarray(fine)), np.float64)
    assert np.isfinite(noise).all()
    assert noise[0] == pytest.approx(49 * np.log(2), rel=1e-6) == noise.max()  # the smallest u is 2^-49
    assert noise[5] == pytest.approx(-np.log(24 * np.log(2)), rel=1e-6)  # and the largest is 1 - 2^-24
    u = (coarse >> 8) / 2**24 + ((fine >> 8) + 0.5) / 2**48
    near_one = coarse >= 2**31
    np.testing.assert_allclose(noise[~near_one], -np.log(-np.log1p(-u[~near_one])), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(-np.expm1(-np.exp(-noise[near_one])), u[near_one], atol=2.0**-23)


@pytest.mark.slow
def test_a_far_tail_is_drawn_as_often_as_it_should() -> None:
    """151,935 tokens, each 17 nats below the likeliest, have 0.63 % of the mass together: 25 of 4,000 draws."""
    rows, vocabulary = 20, 151_936
    logits = jnp.zeros((rows, vocabulary)).at[:, 0].set(17.0)
    drawn = 0
    for batch in range(200):
        tokens, *_ = SAMPLE(logits, columns(rows)._replace(position=jnp.full(rows, batch, jnp.int32)))
        drawn += int((np.asarray(tokens) != 0).sum())
    share = float((vocabulary - 1) * np.exp(-17.0))
    assert stats.binomtest(drawn, 200 * rows, share / (1 + share)).pvalue > 1e-3


# --- filters ----------------------------------------------------------------------------------------------------------


FILTER = jax.jit(filter_logits)


def kept(**settings: float) -> list[int]:
    filtered = FILTER(jnp.asarray(LOGITS, jnp.float32)[None], columns(1, **settings))
    return np.flatnonzero(np.isfinite(np.asarray(filtered)[0])).tolist()


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.3}, [0]),  # the likeliest alone has 0.4
        ({"top_p": 0.69}, [0, 1]),  # 0.4 < 0.69 <= 0.7
        ({"top_p": 0.71}, [0, 1, 2]),
        ({"min_p": 0.3}, [0, 1, 2]),  # 0.3 * 0.4 = 0.12
        ({"min_p": 1.0}, [0]),
        # After top-k 3 the masses are 0.4, 0.3, 0.15 of 0.85: before token 2 lies 0.824, so top-p 0.82 drops it, though
        # of the whole distribution only 0.7 lies before it.
        ({"top_k": 3, "top_p": 0.82}, [0, 1]),
        ({"top_p": 0.82}, [0, 1, 2]),
        ({"top_p": 0.9, "min_p": 0.5}, [0, 1]),
    ],
    ids=str,
)
def test_filters_keep_what_they_say(settings: dict[str, float], tokens: list[int]) -> None:
    assert kept(**settings) == tokens


def kept_by_sorting(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The definition, in float64: a token is judged by what lies strictly above it, so that ties are kept."""
    values = logits.astype(np.float64)
    rising = np.sort(values)
    above = len(values) - np.searchsorted(rising, values, side="right")
    weights = np.exp(values - rising[-1])
    mass_above = np.concatenate([[0.0], np.cumsum(np.exp(rising[::-1] - rising[-1]))])[above]
    inside = above < (top_k or len(values))
    inside &= (mass_above < np.float32(top_p) * weights[inside].sum()) | (top_p >= 1.0)
    return inside & (weights >= np.float32(min_p)) & np.isfinite(values)


def logit_rows(vocabulary: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(vocabulary)
    normal = rng.normal(size=vocabulary)
    masked = np.where(rng.random(vocabulary) < 0.5, -np.inf, 3.0 * normal)
    masked[0] = 1.0
    rows = {
        "normal": 3.0 * normal,
        "flat": 1e-3 * normal,
        "wide": 1e4 * normal,
        "tied": np.round(2.0 * normal),
        "constant": np.full(vocabulary, -2.5),
        "masked": masked,
        "only one": np.where(np.arange(vocabulary) == vocabulary // 2, -7.0, -np.inf),
        "huge range": np.sign(normal) * 10.0 ** rng.uniform(-30, 30, vocabulary),
        "far below zero": 2.0 * normal - 1e4,
        "bfloat16": np.asarray(jnp.asarray(3.0 * normal, jnp.bfloat16), np.float64),
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


@pytest.mark.full
@pytest.mark.parametrize("vocabulary", [2, 257, 20_000])
def test_filters_are_those_of_a_sort(vocabulary: int) -> None:
    """Every filter and every combination of filters, on rows of every kind, in one batch each."""
    ks, ps, min_ps = (0, 1, 7, vocabulary, 3 * vocabulary), (1.0, 0.9, 0.37, 1e-6), (0.0, 0.021, 1.0)
    settings = list(itertools.product(ks, ps, min_ps))
    top_k, top_p, min_p = (jnp.asarray(column) for column in zip(*settings, strict=True))
    asked = columns(len(settings))._replace(top_k=top_k, top_p=top_p, min_p=min_p)
    for name, logits in logit_rows(vocabulary).items():
        filtered = np.asarray(FILTER(jnp.broadcast_to(logits, (len(settings), vocabulary)), asked))
        for row, setting in zip(filtered, settings, strict=True):
            expected = np.where(kept_by_sorting(logits, *setting), logits, -np.inf)
            np.testing.assert_array_equal(row, expected, err_msg=f"{name}, {setting}")


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0])
def test_masses_of_a_large_vocabulary_add_up(scale: float, top_p: float) -> None:
    """The numbers of tokens are those of float64: sums in sequence would be off by up to 1e-4 of the mass."""
    logits = (scale * np.random.default_rng(0).normal(size=151_936)).astype(np.float32)
    filtered = FILTER(jnp.asarray(logits)[None], columns(top_p=top_p))
    assert np.isfinite(np.asarray(filtered)).sum() == kept_by_sorting(logits, 0, top_p, 0.0).sum()


def passes(monkeypatch: pytest.MonkeyPatch, logits: np.ndarray, asked: SamplingColumns) -> int:
    """How often the filters read the rows to find their thresholds."""
    read: list[None] = []
    survey = sampling._survey

    def counted(*given: Any) -> Any:
        read.append(None)
        return survey(*given)

    with monkeypatch.context() as patch, jax.disable_jit():
        patch.setattr(sampling, "_survey", counted)
        filter_logits(jnp.asarray(logits) / jnp.maximum(asked.temperature, 0.1)[:, None], asked)
    return len(read)


@pytest.mark.full
@pytest.mark.parametrize("settings", [pytest.param({"top_k": 7}, marks=pytest.mark.slow), {"top_p": 0.9}], ids=str)
def test_a_threshold_takes_at_most_nine_passes(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """One tries likely values, and eight each leave a 16th of all float32 numbers; the last row needs most of them."""
    rows = {name: row for name, row in logit_rows(1_000).items() if name in ("normal", "flat", "tied", "huge range")}
    logits = np.stack([*rows.values(), np.linspace(-1e-30, 1e-30, 1_000, dtype=np.float32)])
    assert 0 < passes(monkeypatch, logits, columns(len(logits), **settings)) <= 9


@pytest.mark.full
def test_top_k_and_top_p_together_take_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bisection would take 64."""
    logits = (3.0 * np.random.default_rng(0).normal(size=(32, 5_000))).astype(np.float32)
    assert passes(monkeypatch, logits, columns(len(logits), temperature=0.6, top_k=20, top_p=0.95)) <= 10


@pytest.mark.parametrize(
    "settings",
    [{}, {"min_p": 0.1}, {"top_k": 5}, {"temperature": 0.0, "top_p": 0.0}, {"temperature": 0.0, "top_k": 2}],
    ids=str,
)
def test_filters_that_drop_nothing_read_nothing(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """Also min-p, which needs the maximum alone, and rows that pad a batch: all of their settings are 0."""
    assert passes(monkeypatch, LOGITS[None], columns(**settings)) == 0


@pytest.mark.full
def test_both_zeros_are_one_value() -> None:
    logits = jnp.asarray([[-1.0, -0.0, 0.0, -2.0, -0.0]])
    alike: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0}]
    for settings in alike:
        filtered = np.asarray(FILTER(logits, columns(**settings)))
        assert np.isfinite(filtered[0]).tolist() == [False, True, True, False, True]
    tokens, *_ = SAMPLE(logits, columns(temperature=0.0))
    assert np.asarray(tokens).tolist() == [1]


@pytest.mark.full
def test_ranks_are_in_the_order_of_numbers_and_lead_back_to_them() -> None:
    largest, smallest = np.finfo(np.float32).max, np.finfo(np.float32).tiny
    numbers = np.asarray([-np.inf, -largest, -1.0, -smallest, 0.0, smallest, 1.0, largest, np.inf], np.float32)
    ranks = np.asarray(thresholds.ranks(jnp.asarray(numbers)))
    assert ranks.tolist() == sorted(set(ranks.tolist()))
    assert ranks[3:6].tolist() == [-1, 0, 1]
    assert np.asarray(thresholds.values(jnp.asarray(ranks))).tolist() == numbers.tolist()
    neighbours = np.nextafter(numbers[[1, 2, 6]], np.float32(np.inf))
    assert np.asarray(thresholds.ranks(jnp.asarray(neighbours))).tolist() == (ranks[[1, 2, 6]] + 1).tolist()


# --- compiled for a TPU ----------------------------------------------------------------------------------------------


@pytest.mark.slices
def test_a_pass_reads_the_rows_once_on_a_tpu() -> None:
    """Each search is a loop with one fusion that reads logits (and weights), whatever else it has per row."""
    rows, vocabulary = 32, 151_936
    device = SingleDeviceSharding(replica_devices(open_slice("v5e-8"), 1)[0])
    asked = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), columns(rows))
    logits = jax.ShapeDtypeStruct((rows, vocabulary), jnp.bfloat16, sharding=device)
    program = jax.jit(lambda rows, given: sample_tokens(rows, given)).lower(logits, asked).compile().as_text() or ""
    computations = dict(re.findall(r"^(?:ENTRY )?(%[\w.-]+) \(.*?\n(.*?)^}", program, flags=re.MULTILINE | re.DOTALL))
    bodies = re.findall(r"body=(%[\w.-]+)", program)
    assert len(bodies) == 2
    for body in bodies:
        called = re.findall(r"calls=(%[\w.-]+)", computations[body])
        reading = [name for name in called if f"f32[{rows},{vocabulary}]" in computations[name]]
        assert len(reading) == 1


# --- sharded by vocabulary --------------------------------------------------------------------------------------------


VOCABULARY, WIDTH = 304, 64


def write(directory: Path, **settings: Any) -> Path:
    return write_random_qwen3(directory / "model", layers=1, hidden=WIDTH, **{"vocab": VOCABULARY} | settings)


# --- the compiled step -----------------------------------------------------------------------------------------------


def moved(program: str) -> list[tuple[str, int]]:
    """Find every collective in a compiled program: (its name, elements of its largest result)."""
    found = []
    for line in program.splitlines():
        if call := re.search(r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", line):
            shapes = re.findall(r"\w+\[([\d,]*)\]", call.group(1))
            found.append((call.group(2), max(int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes)))
    return found


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize(
    ("rows", "tensor"),
    [pytest.param(1, 4, marks=pytest.mark.slow), (6, 4), (6, 2), pytest.param(6, 1, marks=pytest.mark.slow)],
)
def test_sampling_from_split_logits_is_the_same_to_the_bit(rows: int, tensor: int) -> None:
    """Also with fewer rows than devices, ties, and every filter."""
    rng = np.random.default_rng(rows)
    logits = rng.normal(size=(rows, 16 * VOCABULARY)).astype(np.float32)
    logits[::2] = np.round(8 * logits[::2])  # many ties
    asked = columns(rows, top_p=0.9, min_p=0.01)._replace(
        temperature=np.where(np.arange(rows) % 3 == 2, 0.0, 0.9).astype(np.float32),
        top_k=np.arange(rows, dtype=np.int32) * 7,
        key=rng.integers(0, 9, (rows, 4)).astype(np.uint32),
        position=np.arange(rows, dtype=np.int32),
    )
    mesh = engine_mesh(jax.devices()[:tensor])
    split = jax.device_put(logits, NamedSharding(mesh, P("data", "tensor")))
    with jax.set_mesh(mesh):
        found = jax.jit(lambda given, settings: sample_rows(given, settings, mesh))(split, asked)
    alone = SAMPLE(jnp.asarray(logits), asked)
    for ours, theirs in zip(found, alone, strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
