"""Frequencies of rotary positions, against numbers worked out by hand."""

import math

import numpy as np
import pytest

from tpu_grpo.models.families.rope import Llama3Scaling, inverse_timescales, with_older_rope

LLAMA31 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def test_plain_frequencies() -> None:
    np.testing.assert_allclose(inverse_timescales(4, 10_000.0), [1.0, 0.01])
    np.testing.assert_allclose(inverse_timescales(8, 16.0), [1.0, 0.5, 0.25, 0.125])


@pytest.mark.parametrize(
    ("turns", "share"),
    [
        (0.5, 1 / 8),  # slow: eight times as slow
        (1.0, 1 / 8),
        (2.5, 0.5 + 0.5 / 8),  # halfway between 1 and 4
        (3.25, 0.75 + 0.25 / 8),
        (4.0, 1.0),
        (100.0, 1.0),  # fast: as it was
    ],
)
def test_llama3_scales_by_turns_in_the_original_context(turns: float, share: float) -> None:
    frequency = np.array([turns * 2 * math.pi / 8192])
    np.testing.assert_allclose(LLAMA31(frequency), share * frequency, rtol=1e-12)


def test_llama31_8b() -> None:
    """Head width 128, base 5e5: dimension 28 turns 4.2 times in 8192 positions, 29 3.4 times, and 35 0.997 times."""
    plain, scaled = inverse_timescales(128, 5e5), inverse_timescales(128, 5e5, LLAMA31)
    turns_29 = 8192 / (2 * math.pi * 5e5 ** (29 / 64))
    assert 3.4 < turns_29 < 3.5
    np.testing.assert_array_equal(scaled[:29], plain[:29])
    np.testing.assert_allclose(scaled[29] / plain[29], (7 * (turns_29 - 1) / 3 + 1) / 8)
    np.testing.assert_allclose(scaled[35:], plain[35:] / 8)
    assert (scaled[29:35] > plain[29:35] / 8).all()


SCALING = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("newer", "older"),
    [
        (
            {"vocab_size": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {"vocab_size": 3, "rope_theta": 1e6, "rope_scaling": None},
        ),
        ({"rope_parameters": {"rope_theta": 5e5, **SCALING}}, {"rope_theta": 5e5, "rope_scaling": SCALING}),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_scaling": None},
        ),
    ],
)
def test_what_transformers_5_writes_is_read_under_the_older_names(newer: dict, older: dict) -> None:
    assert with_older_rope(newer) == older
    assert with_older_rope(older) == older
    assert with_older_rope(newer | {"rope_theta": older["rope_theta"]}) == older


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        {"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e4},
        {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": SCALING},
    ],
)
def test_other_forms_stay_for_families_to_refuse(config: dict) -> None:
    assert with_older_rope(config) == config
