"""Frequencies of rotary positions, against numbers worked out by hand."""

import math

import numpy as np
import pytest

from tpu_grpo.models.families.rope import Llama3Scaling, YarnScaling, inverse_timescales, scaling_of, with_older_names

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
    np.testing.assert_allclose(LLAMA31(frequency, 5e5), share * frequency, rtol=1e-12)


def test_llama31_8b() -> None:
    """Head width 128, base 5e5: dimension 28 turns 4.2 times in 8192 positions, 29 3.4 times, and 35 0.997 times."""
    plain, scaled = inverse_timescales(128, 5e5), inverse_timescales(128, 5e5, LLAMA31)
    turns_29 = 8192 / (2 * math.pi * 5e5 ** (29 / 64))
    assert 3.4 < turns_29 < 3.5
    np.testing.assert_array_equal(scaled[:29], plain[:29])
    np.testing.assert_allclose(scaled[29] / plain[29], (7 * (turns_29 - 1) / 3 + 1) / 8)
    np.testing.assert_allclose(scaled[35:], plain[35:] / 8)
    assert (scaled[29:35] > plain[29:35] / 8).all()


def test_yarn_of_qwen3() -> None:
    """Head width 128, base 1e6, 32,768 positions: dimension 23.6 makes 32 turns, and 39.7 one."""
    scaling = scaling_of({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768})
    assert isinstance(scaling, YarnScaling)
    assert scaling == YarnScaling(4.0, 32768)
    plain, scaled = inverse_timescales(128, 1e6), inverse_timescales(128, 1e6, scaling)
    np.testing.assert_array_equal(scaled[:24], plain[:24])
    np.testing.assert_allclose(scaled[40:], plain[40:] / 4)
    np.testing.assert_allclose(scaled[23:41] / plain[23:41], 1 - 0.75 * np.arange(18) / 17)
    np.testing.assert_allclose(scaling.amplitude, 1.1386294361119891)  # 0.1 ln 4 + 1


def test_yarns_other_settings() -> None:
    assert YarnScaling(4.0, 32, attention_factor=1.5).amplitude == 1.5
    assert YarnScaling(math.e**10, 32, mscale=1.0, mscale_all_dim=0.5).amplitude == pytest.approx(2 / 1.5)
    # base e^4, 4 pairs, 2 pi e positions: pair i turns e^(1 - i) times, so that 1 is pair 1 and e^-2 is pair 3
    few = YarnScaling(2.0, 2 * math.pi * math.e, beta_fast=1.0, beta_slow=math.e**-2.5, truncate=False)  # pyrefly: ignore[bad-argument-type]
    np.testing.assert_allclose(few(np.ones(4), math.e**4), [1, 1, 1 - 0.5 * 0.4, 1 - 0.5 * 0.8])
    rounded = YarnScaling(2.0, few.original_max_position_embeddings, beta_fast=1.0, beta_slow=math.e**-2.5)
    np.testing.assert_allclose(rounded(np.ones(4), math.e**4), [1, 1, 1 - 0.5 / 3, 1 - 1 / 3])


SCALING = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("newer", "older"),
    [
        (
            {"vocab_size": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {"vocab_size": 3, "rope_theta": 1e6, "rope_scaling": None},
        ),
        ({"num_local_experts": 4}, {"num_experts": 4}),
        ({"rope_parameters": {"rope_theta": 5e5, **SCALING}}, {"rope_theta": 5e5, "rope_scaling": SCALING}),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_scaling": None},
        ),
    ],
)
def test_what_transformers_5_writes_is_read_under_the_older_names(newer: dict, older: dict) -> None:
    assert with_older_names(newer) == older
    assert with_older_names(older) == older
    assert with_older_names(newer | {name: older[name] for name in older if name == "rope_theta"}) == older


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        {"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e4},
        {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": SCALING},
    ],
)
def test_other_forms_stay_for_families_to_refuse(config: dict) -> None:
    assert with_older_names(config) == config
