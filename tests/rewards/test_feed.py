"""Batches on their way to where a reward runs: what is put together, what is left to do, and until when."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from tpu_grpo.rewards.feed import Feed, Task
from tpu_grpo.rewards.reward_call import Answer, Problem, RewardBatch


def batch(*texts: str) -> RewardBatch:
    return RewardBatch({"completions": list(texts)}, step=3, size=len(texts))


@contextmanager
def feed(timeout: float = 10.0, expected: int = 3, **settings: Any) -> Iterator[tuple[Feed, dict[Any, Answer]]]:
    answers: dict[Any, Answer] = {}
    with closing(Feed(timeout, expected, answers.__setitem__, **settings)) as made:
        yield made, answers


def test_batches_that_were_put_together_get_their_own_answers() -> None:
    """Rows 0 and 1 are the first batch's, 2 the second's, 3 to 5 the third's; the problem of row 4 is its row 1."""
    task = Task.of([("x", batch("a", "b")), ("y", batch("c")), ("z", batch("d", "e", "f"))], until=0.0)
    assert task.batch == RewardBatch({"completions": list("abcdef")}, step=3, size=6)
    of_one, of_all = Problem("raised", "raised", row=4), Problem("late", "was late")
    answer = Answer([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [of_one, of_all], {"n": [7.0, 8.0]})
    assert task.split(answer) == [
        Answer([0.0, 1.0], [of_all], {"n": [7.0, 8.0]}),  # what was logged belongs to no row
        Answer([2.0], [of_all], {}),
        Answer([3.0, 4.0, 5.0], [of_all, Problem("raised", "raised", row=1)], {}),
    ]


def test_a_batch_is_a_task_unless_batches_may_be_put_together() -> None:
    with feed() as (alone, _), feed(joins=True) as (together, _):
        for made in (alone, together):
            for key in "abcde":
                made.add(key, batch(key))
        assert [task.keys for _ in range(6) if (task := alone.take(2))] == [("a",), ("b",), ("c",), ("d",), ("e",)]
        # two workers are idle, then one: the first takes half of five batches, the second the rest
        assert [task.keys for places in (2, 1, 1) if (task := together.take(places))] == [("a", "b", "c"), ("d", "e")]


def test_a_feed_is_over_when_all_is_answered_and_no_more_will_come() -> None:
    with feed(expected=3) as (made, answers):
        assert (made.left, made.over) == (3, False)
        made.add("a", batch("a"))
        task = made.take()
        assert task is not None
        made.answer(task, Answer([1.0]))
        assert (made.left, made.over) == (2, False)
        made.add("b", batch("b", "c"))
        made.end()
        assert (made.left, made.over) == (1, False)  # there will be no third one
        made.answer_all(Problem("late", "did not answer"))
        assert (made.left, made.over) == (0, True)
        assert answers["a"].values == [1.0]
        assert [math.isnan(value) for value in answers["b"].values] == [True, True]
        assert answers["b"].problems == [Problem("late", "did not answer")]


def test_a_feed_that_is_cancelled_is_over() -> None:
    with feed() as (made, _):
        made.add("a", batch("a"))
        made.cancel()
        assert made.over


@pytest.mark.parametrize("rounds", [1, 2])
def test_deadlines(rounds: int) -> None:
    """A task has 10 s; all that is left has 10 s for each round, from when it is seen that no more will come."""
    with feed(timeout=10.0) as (made, _):
        made.add("a", batch("a"))
        made.add("b", batch("b"))
        assert made.deadline == math.inf
        first = made.take()
        assert first is not None
        assert first.until == pytest.approx(time.monotonic() + 10.0, abs=0.5)
        made.end(rounds)
        time.sleep(0.02)  # as long as workers still start: the clock stands
        seen = time.monotonic()
        assert made.deadline == pytest.approx(seen + 10.0 * rounds, abs=0.01)
        second = made.take()
        assert second is not None
        assert second.until <= made.deadline


def test_the_time_with_something_to_answer_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("tpu_grpo.rewards.feed.time.monotonic", lambda: now[0])
    with feed() as (made, _):
        for _ in range(2):
            made.add("a", batch("a"))
            now[0] += 0.5
            task = made.take()
            assert task is not None
            now[0] += 0.25
            made.answer(task, Answer([1.0]))
            now[0] += 100.0  # nothing to do
        assert made.seconds == 1.5


def test_whoever_waits_is_woken() -> None:
    with feed() as (made, _):
        started = time.monotonic()
        threading.Timer(0.05, made.ring).start()
        made.wait(None)
        assert 0.03 < time.monotonic() - started < 5.0
        made.ring()
        made.ring()
        made.wait(None)  # both at once
        started = time.monotonic()
        made.wait(0.05)
        assert time.monotonic() - started >= 0.04
    made.ring()  # nobody is there any more
