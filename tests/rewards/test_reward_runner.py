"""Rows on their way to where a reward runs: how they are split and joined, what is left to do, and until when."""

import math
import threading
import time
from typing import Any

import numpy as np
import pytest

from tests.rewards.conftest import make_rollout
from tpu_grpo.config import RewardSpec
from tpu_grpo.rewards import OpenReward
from tpu_grpo.rewards.reward_call import Answer, Call, Problem, RewardBatch, failed_answer
from tpu_grpo.rewards.reward_processes import RewardProcesses
from tpu_grpo.rewards.reward_runner import (
    RewardRunner,
    RewardThread,
    most_batches,
    split_rows,
)
from tpu_grpo.rewards.reward_table import Table, build_table
from tpu_grpo.workers.supervisor import Supervisor

ROWS: dict[str, Any] = {"concurrency": 1}
AWAITED: dict[str, Any] = {"concurrency": 1, "is_async": True}


def runner_of(function: Any = None, groups: int | None = 3, rollouts: int = 1, **call: Any) -> RewardRunner:
    made = Call("f", "f", **(call or ROWS))
    return RewardRunner(
        OpenReward(RewardSpec(name="f", workers=0, timeout=10.0), made, RewardThread(made, function)), groups, rollouts
    )


def group(*texts: str) -> Table:
    return build_table(make_rollout(["p"], texts, step=3), [])


def batch(*texts: str) -> RewardBatch:
    return RewardBatch({"completions": list(texts)}, step=3, size=len(texts))


def keys(runner: RewardRunner, places: int = 1) -> list[int] | None:
    """The prompts of the batches that a worker gets next."""
    task = runner.take(places)
    return None if task is None else [batch.group.key[1] for batch in task.batches]


@pytest.mark.parametrize(
    ("rows", "workers", "call", "expected"),
    [
        (range(4), 1, Call("f", "f"), [[0, 1, 2, 3]]),
        (range(8), 2, Call("f", "f"), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ([0, 3, 4], 2, Call("f", "f"), [[0], [3], [4]]),
        (
            range(20),
            2,
            Call("f", "f"),
            [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]],
        ),
        (range(6), 1, Call("f", "f", concurrency=1), [[0, 1], [2, 3], [4, 5]]),
        (range(6), 0, Call("f", "f", concurrency=1, is_async=True), [[0, 1, 2, 3, 4, 5]]),
        (range(5), 2, Call("f", "f", concurrency=1, is_async=True), [[0, 1, 2], [3, 4]]),
        ([], 2, Call("f", "f"), []),
    ],
)
def test_rows_are_split_into_batches(rows: Any, workers: int, call: Call, expected: list[list[int]]):
    assert split_rows(rows, 2, most_batches(workers, call), call) == expected


def test_batches_that_were_put_together_get_their_own_answers() -> None:
    """Rows 0 and 1 are the first batch's, 2 the second's, 3 to 5 the third's; the problem of row 4 is its row 1."""
    joined = RewardBatch.joined([batch("a", "b"), batch("c"), batch("d", "e", "f")])
    assert joined == RewardBatch({"completions": list("abcdef")}, step=3, size=6)
    of_one, of_all = Problem("raised", "raised", row=4), Problem("late", "was late")
    answer = Answer([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [of_one, of_all], {"n": [7.0, 8.0]})
    assert answer.split([2, 1, 3]) == [
        Answer([0.0, 1.0], [of_all], {"n": [7.0, 8.0]}),  # what was logged belongs to no row
        Answer([2.0], [of_all], {}),
        Answer([3.0, 4.0, 5.0], [of_all, Problem("raised", "raised", row=1)], {}),
    ]


def test_a_batch_is_a_task_unless_batches_may_be_put_together() -> None:
    alone, together = runner_of(), runner_of(**AWAITED)
    for runner in (alone, together):
        for prompt in range(5):
            runner.add((0, prompt), group("a"))
    assert [keys(alone, 2) for _ in range(6)] == [[0], [1], [2], [3], [4], None]
    # two workers are idle, then one: the first takes half of five batches, the second the rest
    assert [keys(together, places) for places in (2, 1, 1)] == [[0, 1, 2], [3, 4], None]


def test_a_runner_is_over_when_all_is_answered_and_no_more_will_come() -> None:
    started, go_on = threading.Event(), threading.Event()

    def score(completion: str) -> float:
        started.set()
        if completion == "b":
            go_on.wait(10.0)
        return 1.0

    runner = runner_of(score, groups=3, renamed={"completions": "completion"}, **ROWS)
    assert (runner.left, runner.is_over) == (3, False)
    runner.add((0, 0), group("a"))
    thread = threading.Thread(target=runner.serve)
    thread.start()
    while runner.left == 3:
        time.sleep(0.01)
    assert (runner.left, runner.is_over) == (2, False)
    runner.add((0, 1), group("b"))
    runner.end()
    assert (runner.left, runner.is_over) == (1, False)  # there will be no third one
    go_on.set()
    thread.join()
    assert (runner.left, runner.is_over) == (0, True)
    assert runner.result(0, [1, 0]).values.tolist() == [1.0, 1.0]


def test_a_runner_that_is_cancelled_is_over() -> None:
    runner = runner_of()
    runner.add((0, 0), group("a"))
    runner.cancel()
    assert runner.is_over


@pytest.mark.parametrize("rollouts", [1, 2])
def test_deadlines(rollouts: int) -> None:
    """A task has 10 s; all that is left has 10 s for each rollout, from when it is seen that no more will come."""
    runner = runner_of(rollouts=rollouts)
    for prompt in range(2):
        runner.add((0, prompt), group("a"))
    assert runner.deadline == math.inf
    first = runner.take()
    assert first is not None
    assert first.until == pytest.approx(time.monotonic() + 10.0, abs=0.5)
    runner.end()
    time.sleep(0.02)  # as long as workers still start: the clock stands
    seen = time.monotonic()
    assert runner.deadline == pytest.approx(seen + 10.0 * rollouts, abs=0.01)
    second = runner.take()
    assert second is not None
    assert second.until <= runner.deadline


def test_the_time_with_something_to_answer_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def score(completion: str) -> float:
        now[0] += 0.25
        return 1.0

    runner = runner_of(score, renamed={"completions": "completion"}, **ROWS)
    monkeypatch.setattr("tpu_grpo.rewards.reward_runner.time.monotonic", lambda: now[0])
    thread = threading.Thread(target=runner.serve)
    for prompt in range(2):
        runner.add((0, prompt), group("a"))
        if not prompt:
            now[0] += 0.5
            thread.start()
        while len(runner.results) == prompt:
            time.sleep(0.01)
        now[0] += 100.0  # nothing to do
    runner.end()
    thread.join()
    assert runner.result(0, [0]).seconds == 0.5 + 2 * 0.25


def test_whoever_waits_is_woken() -> None:
    supervisor, thread = Supervisor(), RewardThread(Call("f", "f"), None)
    for wait, wake in ((supervisor.advance, supervisor.wake), (thread.advance, thread.wake)):
        started = time.monotonic()
        threading.Timer(0.05, wake).start()
        wait(60.0)
        assert 0.03 < time.monotonic() - started < 5.0
        wake()
        wake()
        wait(60.0)  # both at once
        started = time.monotonic()
        wait(0.05)
        assert time.monotonic() - started >= 0.04
    supervisor.close(0.0)
    supervisor.wake()  # nobody is there any more


def test_a_late_row_of_a_shipped_reward_neither_ends_the_run_nor_its_group() -> None:
    """With a batch per worker, the other rows of its group are answered after it."""
    call, spec = Call("f", "f", **ROWS), RewardSpec(name="python_tests", workers=2)
    runner = RewardRunner(OpenReward(spec, call, RewardProcesses(call, 2**30, 2, 100)), groups=1)
    runner.add((0, 0), group("a", "b", "c"))
    first, second = runner.take(), runner.take()
    assert first is not None
    assert second is not None
    runner._take_in(first.batches[0], failed_answer(2, Problem("late", "did not answer")))
    assert runner.results == {}
    runner._take_in(second.batches[0], Answer([1.0]))
    result = runner.result(0, [0])
    np.testing.assert_array_equal(result.values, [np.nan, np.nan, 1.0])
    assert (result.timeouts, result.skipped.tolist()) == (2, [True, True, False])
