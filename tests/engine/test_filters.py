"""Top-k, top-p and min-p: hand-worked cases, a sort in float64, and how often they read the vocabulary."""

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from tests.engine.sampling_columns import columns
from tpu_grpo.engine import sampling
from tpu_grpo.engine.sampling import SamplingColumns, filter_logits, sample_tokens
from tpu_grpo.models import thresholds
from tpu_grpo.planning.slices import open_slice, replica_devices

LOGITS = np.log([0.4, 0.3, 0.15, 0.1, 0.05]).astype(np.float32)
FILTER = jax.jit(filter_logits)


def kept(**settings: float) -> list[int]:
    filtered = FILTER(jnp.asarray(LOGITS)[None], columns(1, **settings))
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


@pytest.mark.parametrize("settings", [pytest.param({"top_k": 7}, marks=pytest.mark.slow), {"top_p": 0.9}], ids=str)
def test_a_threshold_takes_at_most_nine_passes(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """One tries likely values, and eight each leave a 16th of all float32 numbers; the last row needs most of them."""
    rows = {name: row for name, row in logit_rows(1_000).items() if name in ("normal", "flat", "tied", "huge range")}
    logits = np.stack([*rows.values(), np.linspace(-1e-30, 1e-30, 1_000, dtype=np.float32)])
    assert 0 < passes(monkeypatch, logits, columns(len(logits), **settings)) <= 9


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


def test_ties_at_a_threshold_are_kept() -> None:
    logits = jnp.asarray([[1.0, 2.0, 2.0, 0.0]])
    filtered = np.asarray(FILTER(logits, columns(top_k=1)))
    assert np.isfinite(filtered[0]).tolist() == [False, True, True, False]


def test_both_zeros_are_one_value() -> None:
    logits = jnp.asarray([[-1.0, -0.0, 0.0, -2.0, -0.0]])
    alike: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0}]
    for settings in alike:
        filtered = np.asarray(FILTER(logits, columns(**settings)))
        assert np.isfinite(filtered[0]).tolist() == [False, True, True, False, True]
    tokens, *_ = jax.jit(sample_tokens)(logits, columns(temperature=0.0))
    assert np.asarray(tokens).tolist() == [1]


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
