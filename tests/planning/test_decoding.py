"""The simulated decoding against one that walks through every step of every row, and by hand."""

import random
from collections.abc import Sequence

import pytest

from tpu_grpo.planning.decoding import decode
from tpu_grpo.planning.engine_steps import Seconds, round_seconds
from tpu_grpo.planning.lengths import check_mean, completion_lengths


def step(rows: int, cached: float, steps: float) -> tuple[Seconds, float]:
    """Seconds that are easy to tell apart: 100 for weights, 1 for a cached token; the host's 9 a row and 1 a token."""
    return {"weights": 100.0, "cache": cached}, (9.0 + steps) * rows


def walked(engines: Sequence[Sequence[int]], *, prompt: int, slots: int) -> dict[str, float]:
    """Decode as `decode` describes it, a round at a time."""
    waiting = [list(lengths) for lengths in engines]
    running: list[list[tuple[int, int]]] = [[] for _ in engines]  # (tokens left, tokens in the cache) of each row
    total = {"weights": 0.0, "cache": 0.0, "host": 0.0}
    while any(waiting) or any(running):
        costs = []
        for rows, queue in zip(running, waiting, strict=True):
            entered = [(queue.pop(0), prompt) for _ in range(min(slots - len(rows), len(queue)))]
            if entered:
                costs.append(step(len(entered), prompt * len(entered), 1))
                rows += entered
            elif rows:
                rows[:] = [(left - 1, cached + 1) for left, cached in rows]
                costs.append(step(len(rows), sum(cached for _, cached in rows), 1))
                rows[:] = [row for row in rows if row[0]]
        (device, host) = max(costs, key=lambda cost: sum(cost[0].values()) + cost[1])
        working = sum(device.values())
        total["weights"] += device["weights"]
        total["cache"] += device["cache"]
        total["host"] += max(sum(own for _, own in costs), working + host) - working
    return total


def test_two_slots_for_three_rows_by_hand() -> None:
    """Lengths 3, 1, 2: a and b enter, a step of both, c enters, two steps of a and c."""
    found = decode([[3, 1, 2]], prompt=10, slots=2, step=step)
    assert found == {
        "weights": 5 * 100,
        "cache": 20 + (11 + 11) + 10 + (12 + 11) + (13 + 12),
        "host": 10 * (2 + 2 + 1 + 2 + 2),
    }


@pytest.mark.parametrize("seed", range(4))
def test_steps_counted_at_once_are_those_walked_one_by_one(seed: int) -> None:
    """One engine: with several, the slowest of a round may change between two ends of rows."""
    chance = random.Random(seed)
    lengths = [chance.randint(1, 40) for _ in range(chance.randint(1, 30))]
    assert decode([lengths], prompt=7, slots=5, step=step) == pytest.approx(walked([lengths], prompt=7, slots=5))


def test_steps_of_a_launch_share_the_hosts_time() -> None:
    """Lengths 6 and 2 for two slots, then 4 for the second: launches of 4 steps; the first ends with the row.

    After that no row waits, and the devices do not wait for the host.
    """
    found = decode([[6, 2, 4]], prompt=10, slots=2, step=step, launch_steps=4)
    entering, first = 20 + 10, 2 * 9 + 4
    assert found["host"] == entering + first
    assert found["weights"] == (1 + 2 + 1 + 4) * 100


def test_engines_of_a_host_go_through_rounds_together() -> None:
    """The first engine is the slowest in every round while it runs, and it runs longest."""
    engines = [[9, 8, 9], [2, 3], []]
    assert decode(engines, prompt=5, slots=3, step=step) == pytest.approx(walked(engines, prompt=5, slots=3))


def test_one_thread_drives_all_engines_of_a_host() -> None:
    engine = ({"weights": 5.0}, 1.0)
    assert round_seconds([engine]) == {"weights": 5.0, "host": 1.0}
    assert round_seconds([engine] * 6) == {"weights": 5.0, "host": 1.0}  # five launches while the first computes
    assert round_seconds([engine] * 8) == {"weights": 5.0, "host": 3.0}  # the thread has eight seconds of work
    assert round_seconds([engine, ({"weights": 7.0}, 0.5)]) == {"weights": 7.0, "host": 0.5}
    assert round_seconds([engine] * 5, ahead=True) == {"weights": 5.0, "host": 0.0}
    assert round_seconds([engine] * 8, ahead=True) == {"weights": 5.0, "host": 3.0}


def test_lengths_have_their_mean_and_are_cut() -> None:
    found = completion_lengths(256, mean=680, longest=2048)
    assert sum(found) / 256 == pytest.approx(680, abs=0.5)
    assert found.count(2048) == pytest.approx(0.06 * 256, abs=1)
    assert found == completion_lengths(256, mean=680, longest=2048)
    assert found != sorted(found)
    assert completion_lengths(3, mean=40, longest=40) == [40, 40, 40]
    assert completion_lengths(1, mean=25, longest=40) == [25]


@pytest.mark.parametrize("mean", [0.5, 41, float("nan")])
def test_a_mean_that_cannot_be_is_refused(mean: float) -> None:
    with pytest.raises(ValueError, match="--mean-new-tokens must be between 1 and rollout.max_new_tokens=40"):
        check_mean(mean, 40)
