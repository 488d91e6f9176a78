import numpy as np
import pytest

from tpu_grpo.observe.report.thinning import kept, moving_mean

NAN = float("nan")


def test_few_points_are_all_kept() -> None:
    assert kept(np.array([3.0, 1.0, 2.0]), 2).tolist() == [0, 1, 2]
    assert kept(np.zeros(0), 2).tolist() == []


def test_of_many_the_extremes_of_every_bucket_and_both_ends() -> None:
    values = np.array([1.0, 5.0, 2.0, 3.0, 0.0, 4.0, 9.0, 9.0])
    # buckets of four: lowest 0 and highest 1; lowest 4 and highest 6, the first of equal ones; then the end, 7
    assert kept(values, 2).tolist() == [0, 1, 4, 6, 7]


def test_a_gap_stays_a_gap() -> None:
    values = np.array([1.0, np.nan, np.nan, 2.0, np.nan, np.nan, np.nan, np.nan, 5.0, 4.0, 6.0, 7.0])
    assert kept(values, 3).tolist() == [0, 1, 3, 4, 9, 11]


@pytest.mark.parametrize("count", [801, 2000, 20_011])
def test_a_long_line_loses_no_peak_and_keeps_few_points(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    places = kept(values)
    assert len(places) <= 802
    assert (np.diff(places) > 0).all()
    assert {0, count - 1, int(values.argmax()), int(values.argmin())} <= set(places.tolist())
    for window in np.array_split(np.arange(count), 400):  # every bucket's own peaks, too
        assert int(window[values[window].argmax()]) in places


def test_a_moving_mean_is_over_what_is_known_in_its_window() -> None:
    found = moving_mean(np.array([0.0, 3.0, NAN, 5.0, NAN, NAN, NAN]), 3)
    np.testing.assert_allclose(found, [1.5, 1.5, 4.0, 5.0, 5.0, NAN, NAN])
