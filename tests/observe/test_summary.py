import pytest

from tpu_grpo.observe.summary import build_summary, versions


def test_last_values_and_the_ends_of_the_reward() -> None:
    lines = [{"step": s, "rewards/mean": float(s), "rollout/tokens_digest": f"d{s}"} for s in range(1, 13)]
    lines[2]["weights/bytes_moved"] = 8
    evaluation = {"evaluation/before/accuracy": 0.1}
    summary = build_summary(lines, params_digest="aa", versions={"jax": "1"}, evaluation=evaluation)
    assert summary == {
        "step": 12,
        "steps": 12,
        "rewards/mean": 12.0,
        "rollout/tokens_digest": "d12",
        "weights/bytes_moved": 8,
        "rewards/first_mean": 3.0,  # 1..5
        "rewards/last_mean": 10.0,  # 8..12
        "params_digest": "aa",
        "versions": {"jax": "1"},
        "evaluation/before/accuracy": 0.1,
    }


def test_changes_and_an_early_end_are_told() -> None:
    change = {"step": 4, "name": "run.max_steps", "old": "4", "new": "6", "effect": "none"}
    summary = build_summary(
        [], params_digest="", versions={}, evaluation={}, changes=[change], ended_early="no prompts"
    )
    assert (summary["changes"], summary["ended_early"]) == ([change], "no prompts")


def test_short_runs_and_gaps() -> None:
    lines = [{"step": 1, "rewards/mean": 1.0}, {"step": 2, "rewards/mean": None}, {"step": 3, "rewards/mean": 2.0}]
    summary = build_summary(lines, params_digest="", versions={}, evaluation={})
    assert (summary["rewards/first_mean"], summary["rewards/last_mean"], summary["steps"]) == (1.5, 1.5, 3)
    assert build_summary([], params_digest="aa", versions={}, evaluation={}) == {
        "steps": 0,
        "params_digest": "aa",
        "versions": {},
    }


def test_versions_are_those_of_the_modules() -> None:
    import numpy as np

    found = versions()
    assert found["numpy"] == np.__version__
    assert {"python", "jax", "google-tunix", "sglang-jax"} <= set(found)


def test_a_package_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpu_grpo.observe.summary.PACKAGES", ("numpy", "no-such-package-here"))
    assert set(versions()) == {"python", "numpy"}
