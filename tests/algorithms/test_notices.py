"""What a run says at its start."""

from typing import Any

import pytest

from tpu_grpo.algorithms import notices
from tpu_grpo.config import parse_config


def said(algorithm: dict[str, Any], **rollout: Any) -> list[str]:
    return notices(parse_config({"algorithm": algorithm, "rollout": rollout}))


def test_filters_bias_the_ratio_unless_it_is_filtered() -> None:
    assert said({}) == []
    [notice] = said({}, top_p=0.9, top_k=20)
    assert notice.startswith("rollout.top_k=20 and rollout.top_p=0.9 biases the ratio: ")
    assert notice.endswith("set algorithm.filtered_ratio=true for that among the kept tokens")
    assert said({"filtered_ratio": True}, min_p=0.1) == []


def test_products_over_long_answers_are_warned_of() -> None:
    assert said({"correction": "sequence"}, max_new_tokens=128) == []
    assert said({"correction": "geometric"}, max_new_tokens=1024) == []
    [notice] = said({"correction": "sequence"}, max_new_tokens=1024)
    assert "up to rollout.max_new_tokens=1024 ratios: 0.01 nats a token become a factor of e^10.2 = 2.8e+04" in notice
    assert notice.endswith("algorithm.correction=geometric does not grow with length")


def test_a_filtered_ratio_needs_a_filter() -> None:
    with pytest.raises(ValueError, match="filtered_ratio=true needs rollout.top_k, top_p or min_p, got none of them"):
        said({"filtered_ratio": True})
