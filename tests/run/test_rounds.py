"""Which groups of a step's rounds are learnt from, and what the next step begins with."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tpu_grpo.records.stages import Completion, Figure, Prompt, PromptBatch, Rollout, ScoredRollout, Scores
from tpu_grpo.run.rounds import Rounds, StepGroups, join

G = 2


def scored(first: int, count: int, number: int, seconds: float = 1.0) -> ScoredRollout:
    """A round whose prompts stand at positions from ``first`` on; every row has a reward of its own."""
    positions = tuple(range(first, first + count))
    prompts = tuple(Prompt(str(position), (position,)) for position in positions)
    rows = [position * G + g for position in positions for g in range(G)]
    completions = tuple(Completion(np.array([row]), np.zeros(1, np.float32), "stop", 0) for row in rows)
    figures = {"rollout/wait_seconds": 0.5, "rollout/occupied_rows": float(number)}
    batch = PromptBatch(7, prompts, tuple(100 + position for position in positions), positions, number)
    rollout = Rollout(batch, G, completions, tuple(map(str, rows)), seconds, figures, (number,) * count)
    total = np.array(rows, np.float64)
    of_rewards = {"a": Figure(2.0, "sum"), "b": Figure(float(number), "mean", 1 + number)}
    return ScoredRollout(rollout, Scores(total, {"a": total / 2}, 0.25, of_rewards))


def groups(wanted: int, *rounds: str) -> StepGroups:
    """Rounds as the module's docstring draws them."""
    collected, first = Rounds(wanted), 0
    for number, pattern in enumerate(rounds):
        assert not collected.enough
        informative = np.array([sign == "+" for sign in pattern])
        collected.add(scored(first, len(pattern), number), informative)
        first += len(pattern)
    return collected.groups()


@pytest.mark.parametrize(
    ("wanted", "rounds", "chosen", "needed", "filled"),
    [
        (2, ["-+-", "+-+"], [1, 3], 4, 0),
        (2, ["-+-", "---"], [0, 1], 6, 1),
        (2, ["---"], [0, 1], 3, 2),
        (2, ["++-"], [0, 1], 2, 0),
        (3, ["+-+"], [0, 1, 2], 3, 1),
        (3, ["+++"], [0, 1, 2], 3, 0),
        (4, ["-----+", "+---++"], [5, 6, 10, 11], 12, 0),
    ],
)
def test_the_first_informative_groups_are_learnt_from(
    wanted: int, rounds: Sequence[str], chosen: list[int], needed: int, filled: int
) -> None:
    found = groups(wanted, *rounds)
    assert list(found.chosen) == chosen
    assert found.learnt.rollout.batch.positions == tuple(chosen)
    assert found.learnt.scores.total.tolist() == [number * G + g for number in chosen for g in range(G)]
    assert found.used.rollout.batch.positions == tuple(range(needed))
    sampled = sum(map(len, rounds))
    assert found.metrics() == {"groups/sampled": sampled, "groups/rounds": len(rounds), "groups/padded": filled}


def test_against_a_count_one_by_one() -> None:
    """Many random steps: walk through the prompts in order, as a reader of the rule would."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        wanted, per_round = int(rng.integers(1, 6)), int(rng.integers(0, 4))
        patterns = ["".join(rng.choice(["+", "-"], wanted + per_round, p=[0.3, 0.7])) for _ in range(3)]
        until = next((n for n in (1, 2, 3) if "".join(patterns[:n]).count("+") >= wanted), 3)
        signs, taken, end = "".join(patterns[:until]), list[int](), 0
        for number, sign in enumerate(signs):
            if len(taken) < wanted:
                end = number + 1
                taken += [number] * (sign == "+")
        spare = [number for number, sign in enumerate(signs) if sign == "-"][: wanted - len(taken)]
        found = groups(wanted, *patterns[:until])
        assert list(found.chosen) == sorted(taken + spare)
        assert found.needed == end


def with_tokens(each: ScoredRollout) -> ScoredRollout:
    """The round with a per-token reward, by their ids."""
    per_token = tuple(np.array([float(c.token_ids[0])]) for c in each.rollout.completions)
    return replace(each, scores=replace(each.scores, per_token=per_token, token_rewards=("a",)))


def test_rounds_are_put_together_in_order() -> None:
    one, two = with_tokens(scored(0, 2, 0, seconds=1.0)), with_tokens(scored(5, 3, 1, seconds=3.0))
    assert join([one]) is one
    both = join([one, two])
    assert both.rollout.batch.positions == (0, 1, 5, 6, 7)
    assert both.rollout.batch.records == (100, 101, 105, 106, 107)
    assert [p.text for p in both.rollout.row_prompts] == [str(p) for p in (0, 1, 5, 6, 7) for _ in range(G)]
    assert [int(c.token_ids[0]) for c in both.rollout.completions] == [0, 1, 2, 3, *range(10, 16)]
    assert both.rollout.texts == tuple(map(str, [0, 1, 2, 3, *range(10, 16)]))
    assert both.scores.total.tolist() == [0, 1, 2, 3, *range(10, 16)]
    assert both.scores.by_name["a"].tolist() == [v / 2 for v in (0, 1, 2, 3, *range(10, 16))]
    assert (both.rollout.seconds, both.scores.seconds, both.rollout.scoring_hosts) == (4.0, 0.5, (0, 0, 1, 1, 1))
    assert both.rollout.figures == {"rollout/wait_seconds": 1.0, "rollout/occupied_rows": 0.75}
    assert both.scores.figures == {"a": Figure(4.0, "sum", 2), "b": Figure(2 / 3, "mean", 3)}
    assert [values.tolist() for values in both.scores.per_token] == [[row] for row in (0, 1, 2, 3, *range(10, 16))]
    assert [values.tolist() for values in both.select([1, 2]).scores.per_token] == [[2], [3], [10], [11]]
    assert both.scores.token_rewards == ("a",)


def test_mean_rewards_are_over_what_a_reward_applies_to() -> None:
    step = scored(0, 3, 0)
    step.scores.by_name["a"][[1, 4, 5]] = np.nan
    assert step.mean_rewards() == (0.5, 2.5, 4.5)
