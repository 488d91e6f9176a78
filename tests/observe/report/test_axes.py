import numpy as np
import pytest

from tpu_grpo.observe.report.axes import Axis, Scale, round_step, steps_axis, values_axis

NAN = float("nan")


@pytest.mark.parametrize(
    ("scale", "values", "low", "high"),
    [
        ("linear", [1.0, 3.0], 0.9, 3.1),  # a twentieth of the range on either side
        ("linear", [2.0, NAN, 2.0], 1.9, 2.1),
        ("linear", [0.0], -0.5, 0.5),
        ("linear", [NAN], 0.0, 1.0),
        ("zero", [5.0, 10.0], 0.0, 10.6),
        ("zero", [0.0], 0.0, 1.0),
        ("zero", [-1.0, 1.0], -1.1, 1.1),  # what is below zero shows
        ("share", [0.2], 0.0, 1.0),
        ("log", [2e-5, 0.0, 3e-3], 1e-5, 1e-2),
        ("log", [1e-4], 1e-4, 1e-3),  # one decade at least
        ("log", [0.0], 0.0, 1.0),
    ],
)
def test_an_axis_spans_its_values(scale: Scale, values: list[float], low: float, high: float) -> None:
    axis = values_axis(np.array(values), scale)
    assert (axis.low, axis.high) == (pytest.approx(low), pytest.approx(high))


def test_places_on_an_axis() -> None:
    np.testing.assert_allclose(Axis(10.0, 20.0).place(np.array([10.0, 12.5, NAN])), [0.0, 0.25, NAN])
    np.testing.assert_allclose(Axis(1e-4, 1.0, is_log=True).place(np.array([1e-3, 0.0, -1.0])), [0.25, NAN, NAN])
    np.testing.assert_allclose(steps_axis(7.0, 7.0).place(np.array([7.0])), [0.5])


@pytest.mark.parametrize(
    ("axis", "texts"),
    [
        (Axis(0.0, 1.0), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (Axis(-0.04, 0.11), ["0.00", "0.05", "0.10"]),
        (Axis(0.0, 8400.0), ["0", "2,000", "4,000", "6,000", "8,000"]),
        (Axis(-6e-8, 6e-8), ["-5.0e-08", "0", "5.0e-08"]),
        (Axis(1e-7, 1e-3, is_log=True), ["1e-07", "1e-06", "1e-05", "1e-04", "1e-03"]),
        (Axis(1e-12, 1.0, is_log=True), ["1e-12", "1e-09", "1e-06", "1e-03", "1e+00"]),
    ],
)
def test_labels_are_round(axis: Axis, texts: list[str]) -> None:
    labels = axis.labels(5)
    assert [text for _, text in labels] == texts
    assert all(-1e-9 <= place <= 1 + 1e-9 for place, _ in labels)


def test_steps_are_whole() -> None:
    assert [text for _, text in Axis(0.5, 3.5).labels(6, whole=True)] == ["1", "2", "3"]


def test_steps_between_labels_are_1_2_or_5() -> None:
    assert [round_step(least) for least in (0.13, 0.2, 3.0, 10.0, 0.0007)] == pytest.approx(
        [0.2, 0.2, 5.0, 10.0, 0.001]
    )
