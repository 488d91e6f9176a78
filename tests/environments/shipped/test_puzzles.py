"""Several tries at a puzzle, scored by reasoning-gym's own verifier."""

import json
from typing import Any

import pytest
import reasoning_gym

from tpu_grpo.environments.shipped.puzzles import Puzzle


def puzzle(task: str, **options: Any) -> dict[str, Any]:
    return dict(reasoning_gym.create_dataset(task, size=1, seed=0, **options)[0])


def test_tries_add_up_to_the_best_score():
    entry = puzzle("chain_sum")
    environment = Puzzle(tries=3)
    assert environment.reset(**entry) is None
    right = entry["answer"]
    said, rewards, done = [], [], []
    for text in (f"It is {right}", "<answer>-1</answer>", f"<answer>{right}</answer>"):
        observation, reward, over, _ = environment.step(text)
        said.append(observation)
        rewards.append(reward)
        done.append(over)
    assert said[0] == "There must be an answer in <answer>...</answer>. You may try 2 more times."
    assert said[1].startswith("That scores 0")
    assert said[1].endswith("You may try 1 more time.")
    assert said[2] == "That is right."
    assert done == [False, False, True]
    assert (rewards[0], sum(rewards)) == (0.0, pytest.approx(1.0))


def test_a_worse_try_takes_nothing_away_and_the_last_try_ends_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reasoning_gym, "get_score_answer_fn", lambda name: lambda answer, entry: float(answer))
    environment = Puzzle(tries=3, tag=None)
    environment.reset(metadata=json.dumps({"source_dataset": "of a test"}))
    steps = [environment.step(answer) for answer in ("0.25", "0.1", "0.5")]
    assert [reward for _, reward, _, _ in steps] == [0.25, 0.0, 0.25]
    assert [over for _, _, over, _ in steps] == [False, False, True]
    assert steps[0][0] == "That scores 0.25 of 1. You may try 2 more times."
    assert steps[2][0] == "That scores 0.5 of 1. That was the last try."


def test_an_answer_for_which_the_verifier_raises_scores_nothing():
    environment = Puzzle(tries=2)
    environment.reset(**puzzle("prime_factorization"))
    assert environment.step("<answer>five apples</answer>")[:3] == (
        "That scores 0 of 1. You may try 1 more time.",
        0.0,
        False,
    )


def test_what_it_cannot_begin_with():
    with pytest.raises(ValueError, match="metadata must hold source_dataset"):
        Puzzle().reset(metadata={})
    with pytest.raises(ValueError, match="tries must be >= 1, got 0"):
        Puzzle(tries=0)
