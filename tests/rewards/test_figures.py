"""Figures of several hosts put together, by hand."""

import json

from tpu_grpo.rewards.figures import encode_figures, merge_figures
from tpu_grpo.types import Figure


def test_sums_means_and_maxima():
    first = {"errors": Figure(2, "sum"), "seconds": Figure(0.5, "max"), "length": Figure(2.0, "mean", 1)}
    second = {"errors": Figure(3, "sum"), "seconds": Figure(0.25, "max"), "length": Figure(5.0, "mean", 2)}
    third = {"seconds": Figure(0.75, "max"), "other": Figure(1.0, "mean", 4)}
    shares = [json.loads(json.dumps(encode_figures(figures))) for figures in (first, second, third)]
    assert merge_figures(shares) == {
        "errors": Figure(5, "sum", 2),
        "seconds": Figure(0.75, "max", 3),
        "length": Figure(4.0, "mean", 3),
        "other": Figure(1.0, "mean", 4),
    }
    assert merge_figures([]) == {}
