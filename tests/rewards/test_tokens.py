"""Per-token rewards: numbers by hand, in the process, in workers and while others are sampled; refusals."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.rewards.conftest import MakeFile, make_rollout, scored
from tpu_grpo.config import RewardSpec
from tpu_grpo.records.errors import RewardError
from tpu_grpo.records.stages import Completion, Rollout, Scores
from tpu_grpo.rewards import open_rewards

REWARDS = """
import numpy as np
from tpu_grpo.rewards import per_sample, per_token

@per_token
def a(completions, completion_ids):
    found = [[0, 0.5, -1] if text == "abc" else None for text in completions]
    completion_ids[0].clear()                       # what a reward does to its arguments changes nothing
    return found

@per_token
@per_sample
def another(completion, completion_ids):
    return np.array([1.0, 0, 0]) if completion == "abc" else [0] * (len(completion_ids) - 1) + [0.2]

def size(completions):
    return [float(len(text)) for text in completions]

class Late:
    @per_token
    async def __call__(self, completions, completion_ids):
        return [[1.0] * len(ids) for ids in completion_ids]

@per_token
def bad(completions, completion_ids):
    return [VALUES, [0.0, 0.0]]

def unmarked(completions, completion_ids):
    return [[1.0] * len(ids) for ids in completion_ids]

@per_token
def blind(completions):
    return [[1.0], [1.0]]
"""


def two(texts: tuple[str, str] = ("abc", "de"), prompts: int = 1) -> Rollout:
    """As many tokens as letters."""
    rollout = make_rollout([f"p{n}" for n in range(prompts)], texts)
    completions = [Completion(np.arange(len(t)), np.zeros(len(t), np.float32), "stop", 0) for t in texts]
    return replace(rollout, completions=tuple(completions))


def spec(path: str, name: str, **settings: Any) -> RewardSpec:
    return RewardSpec(name=f"{path}:{name}", **settings)


def check(scores: Scores) -> None:
    """The example at the top of scoring.py, with a reward of completions beside it."""
    assert [values.tolist() for values in scores.per_token] == [[1, 1, -2], [0, 0.2]]
    np.testing.assert_array_equal(scores.by_name["a"], [-0.5, np.nan])
    np.testing.assert_array_equal(scores.by_name["another"], [1.0, 0.2])
    assert scores.total.tolist() == [30.0, 20.0]
    assert scores.token_rewards == ("a", "another")


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 1])
def test_by_hand_and_early(reward_file: MakeFile, workers: int) -> None:
    path = reward_file(REWARDS)
    specs = [
        spec(path, "a", weight=2.0, workers=workers, early=True),
        spec(path, "size", weight=10.0, workers=workers),
        spec(path, "another", workers=workers),
    ]
    with open_rewards(specs, ()) as rewards:
        check(rewards.score(two()))
        rollout = two(prompts=2)  # groups of one
        with rewards.begin(rollout.batch) as scoring:
            scoring.add(1, rollout.completions[1:], rollout.texts[1:])
            scoring.add(0, rollout.completions[:1], rollout.texts[:1])
            check(scoring.finish([rollout])[0])


def test_alone_behind_a_gate_and_in_a_class(reward_file: MakeFile) -> None:
    """Without a reward of completions all totals are 0; rows that a gate does not let pass get nothing at any token."""
    path = reward_file(REWARDS)
    scores = scored(two(), spec(path, "another", workers=0, weight=0.5))
    assert [values.tolist() for values in scores.per_token] == [[0.5, 0, 0], [0, 0.1]]
    assert scores.total.tolist() == [0.0, 0.0]
    gate = "lambda completions: [float(text == 'de') for text in completions]"
    path = reward_file(f"{REWARDS}\ngate = {gate}\ngate.__name__ = 'gate'\n", "gated.py")
    scores = scored(two(), spec(path, "gate", workers=0), spec(path, "Late", workers=0, only_if="gate"))
    assert [values.tolist() for values in scores.per_token] == [[0, 0, 0], [1, 1]]
    assert scores.by_name["Late"].tolist() == [0.0, 2.0]


def test_completion_rewards_of_weight_0_beside_it_leave_every_total_0(reward_file: MakeFile) -> None:
    """They are only watched: rows are scored by their tokens alone."""
    path = reward_file(REWARDS)
    scores = scored(two(), spec(path, "another", workers=0), spec(path, "size", weight=0.0, workers=0))
    assert scores.total.tolist() == [0.0, 0.0]
    assert scores.by_name["size"].tolist() == [3.0, 2.0]
    assert scores.figures["rewards/unscored"].value == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            "[0, 1]",
            r"one number per token, 3 for this completion \(the stop token counts, too\), got 2 values for row 0",
        ),
        ("1.0", r"one number per token, 3 for this completion \(the stop token counts, too\), got 1.0"),
        ("[0, None, 1]", r"finite numbers per token, got \[0, None, 1\]"),
        ("[0, 'b', 1]", r"finite numbers per token, got \[0, 'b', 1\]"),
        ("[0, float('inf'), 1]", r"finite numbers per token, got \[0, inf, 1\]"),
        ("np.zeros((3, 1))", "finite numbers per token, got array"),
    ],
)
def test_what_is_no_number_per_token_is_a_problem(reward_file: MakeFile, values: str, message: str) -> None:
    path = reward_file(REWARDS.replace("VALUES", values))
    with pytest.raises(RewardError, match=message):
        scored(two(), spec(path, "bad", workers=0))
    scores = scored(two(), spec(path, "bad", workers=0, on_error="skip"), spec(path, "size", workers=0))
    assert [values.tolist() for values in scores.per_token] == [[0, 0, 0], [0, 0]]
    assert np.isnan(scores.by_name["bad"]).tolist() == [True, False]
    assert scores.figures["rewards/bad/errors"].value == 1


def test_what_cannot_work_is_said_at_the_start(reward_file: MakeFile) -> None:
    path = reward_file(REWARDS)
    with pytest.raises(RewardError, match="must take completion_ids, which say how many tokens there are"):
        open_rewards([spec(path, "blind")], ())
    with pytest.raises(RewardError, match="must take completion_ids"):
        open_rewards([spec(path, "another")], ["completion_ids"])
    with pytest.raises(RewardError, match="its error_value must be 0, got 0.5"):
        open_rewards([spec(path, "another", on_error="value", error_value=0.5)], ())
    message = r"does not apply; marked with @per_token, a number per token\), got \[1.0, 1.0, 1.0\]"
    with pytest.raises(RewardError, match=message):
        scored(two(), spec(path, "unmarked", workers=0))
