"""Rewards run in processes of their own: what faults cost, who notices, and that nothing stays behind."""

import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.marks import left_after, marked
from tests.readers import nobody_reads
from tests.rewards import faulty
from tests.rewards.conftest import make_rollout, scored
from tpu_grpo.config import RewardSpec
from tpu_grpo.records.errors import RewardError
from tpu_grpo.rewards import open_rewards
from tpu_grpo.rewards.reward_call import Answer, Problem, RewardBatch
from tpu_grpo.workers.channel import decode, encode

ROLLOUT = make_rollout(["p0", "p1"], ["a", "bb", "ccc", "dddd"])
GOOD = [1.0, 2.0, 3.0, 4.0]


def spec(function: Callable[..., Any] | type, **settings: Any) -> RewardSpec:
    return RewardSpec(name=f"tests.rewards.faulty:{function.__name__}", **settings)


@pytest.fixture(autouse=True)
def _nothing_stays_behind() -> Iterator[None]:
    before = marked()
    yield
    assert marked() - before == set()


# --- faults ----------------------------------------------------------------------------------------------------------

FAULTS = {
    faulty.raises: (
        "errors",
        r"raises raised KeyError: 'nothing there' \(.*faulty\.py:\d+ in raises\); for 4 rows from 0 to 3",
    ),
    faulty.sleeps: ("timeouts", r"sleeps did not answer within its timeout of 1 s, for 4 rows from 0 to 3; make it"),
    faulty.hangs: ("timeouts", r"hangs did not answer within its timeout of 1 s"),
    faulty.not_a_number: ("errors", r"not_a_number must return finite numbers .*, got nan for row 0 \(prompt 'p0'"),
    faulty.infinite: ("errors", r"infinite must return finite numbers .*, got inf for row 0"),
    faulty.too_few: ("errors", r"too_few must return a list of one number .* per completion, 4 here, got 1 values"),
    faulty.strings: ("errors", r"strings must return finite numbers .*, got '1' for row 0"),
    faulty.leaves: (
        "errors",
        r"leaves lost its worker, which exited with code 3, for 4 rows from 0 to 3; a reward must",
    ),
    faulty.exits: ("errors", r"exits raised SystemExit: enough"),
    faulty.crashes: ("errors", r"crashes lost its worker, which was ended by SIGSEGV"),
    faulty.eats: ("errors", r"eats raised MemoryError"),
}


@pytest.mark.full
def test_others_are_unaffected_and_every_fault_is_counted_and_named(caplog: pytest.LogCaptureFixture):
    """All faults and one good reward, side by side, asked twice."""
    faults = [spec(f, timeout=1.0, on_error="skip") for f in FAULTS]
    with open_rewards([spec(faulty.good), *faults], []) as rewards:
        answers = [rewards.score(ROLLOUT) for _ in range(2)]
    for scores in answers:
        np.testing.assert_array_equal(scores.total, GOOD)
        for function, (kind, told) in FAULTS.items():
            name = function.__name__
            counts = {k: scores.figures[f"rewards/{name}/{k}"].value for k in ("errors", "timeouts")}
            assert counts == {"errors": 0, "timeouts": 0} | {kind: 4}, name
            assert np.isnan(scores.by_name[name]).all()
            assert sum(re.search(told, message) is not None for message in caplog.messages) == 2, caplog.messages


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (faulty.raises, r"in raises\); row 0 \(prompt 'p0'"),
        *((function, FAULTS[function][1]) for function in (faulty.hangs, faulty.too_few, faulty.leaves)),
    ],
)
def test_a_fault_ends_the_run_with_its_name_where_that_is_wanted(function: Callable[..., Any], told: str):
    with (
        open_rewards([spec(faulty.good, workers=0), spec(function, timeout=1.0)], []) as rewards,
        pytest.raises(RewardError, match=told),
    ):
        rewards.score(ROLLOUT)


@pytest.mark.full
def test_a_text_for_which_a_shipped_reward_takes_too_long_does_not_end_the_run():
    never = "```python\nwhile True: pass\n```"
    reward = RewardSpec(name="python_tests", options={"seconds": 30}, timeout=1.5, workers=1)
    scores = scored(make_rollout(["p"], [never, never], [{"tests": ["assert f()"]}]), reward)
    assert np.isnan(scores.by_name["python_tests"]).all()
    assert scores.figures["rewards/python_tests/timeouts"].value == 2
    assert np.isnan(scores.total).all()


@pytest.mark.full
def test_a_hang_costs_its_deadline_and_the_next_step_starts_afresh():
    with open_rewards([spec(faulty.late, timeout=1.0, on_error="value", error_value=-1)], []) as r:
        by_step = []
        for step in (1, 2, 3):
            started = time.perf_counter()
            total = r.score(make_rollout(["p"], ["a", "b"], step=step)).total
            by_step.append((total.tolist(), time.perf_counter() - started))
    assert [total for total, _ in by_step] == [[1.0, 1.0], [-1.0, -1.0], [3.0, 3.0]]
    assert 1.0 <= by_step[1][1] < 2.5


def test_children_that_a_reward_leaves_end_with_it():
    with open_rewards([spec(faulty.forks), spec(faulty.doubles)], []) as rewards:
        np.testing.assert_array_equal(rewards.score(ROLLOUT).total, [2.0] * 4)
        np.testing.assert_array_equal(rewards.score(ROLLOUT).total, [2.0] * 4)
        deadline = time.monotonic() + 10.0
        while len(marked()) < 2 + 2 * 3 and time.monotonic() < deadline:  # a child may fork after the reward returned
            time.sleep(0.05)
        assert len(marked()) >= 2 + 2 * 3


@pytest.mark.full
def test_what_a_reward_prints_when_nobody_reads_changes_nothing():
    with nobody_reads(), open_rewards([spec(faulty.prints)], []) as rewards:
        np.testing.assert_array_equal(rewards.score(ROLLOUT).total, GOOD)


def test_a_thread_cannot_be_ended_but_does_not_hold_up_the_step():
    specs = [spec(faulty.good, workers=0), spec(faulty.sleeps, workers=0, timeout=0.5, on_error="skip")]
    rewards = open_rewards(specs, [])
    for _ in range(2):
        started = time.perf_counter()
        scores = rewards.score(ROLLOUT)
        assert time.perf_counter() - started < 1.0
        np.testing.assert_array_equal(scores.total, GOOD)
        assert scores.figures["rewards/sleeps/timeouts"].value == 4


@pytest.mark.full
def test_workers_end_with_a_main_process_that_is_killed():
    script = """
        from tests.rewards.test_reward_workers import ROLLOUT, spec
        from tests.rewards import faulty
        from tpu_grpo.rewards import open_rewards
        busy = [spec(function, timeout=100) for function in (faulty.sleeps, faulty.hangs)]
        open_rewards([spec(faulty.good), *busy], []).score(ROLLOUT)
    """
    before = marked()
    main = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], start_new_session=True)
    deadline = time.monotonic() + 20.0
    while len(marked() - before) < 6 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(marked() - before) == 6  # three fork servers, and a worker of each
    time.sleep(2.0)  # for the workers to get to it
    os.kill(main.pid, signal.SIGKILL)
    main.wait()
    assert left_after(before, 5.0) == set()


@pytest.mark.full
def test_workers_end_at_the_exit_of_a_main_process_that_forgot_them():
    script = """
        from tests.rewards.test_reward_workers import ROLLOUT, spec
        from tests.rewards import faulty
        from tpu_grpo.rewards import open_rewards
        open_rewards([spec(faulty.good)], []).score(ROLLOUT)
    """
    before = marked()
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
    assert left_after(before, 5.0) == set()


# --- workers ---------------------------------------------------------------------------------------------------------


def test_workers_know_nothing_of_jax_and_the_accelerator(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "0")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    figures = scored(ROLLOUT, spec(faulty.inspects)).figures
    assert [figures[f"rewards/inspects/{name}"].value for name in ("jax", "variables", "cpu")] == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "told",
    [
        {"values": [1.0]},
        {"values": [1.0, math.inf]},
        {"problems": [Problem("raised", "raised", row=2)]},
        {"problems": [Problem("raised", "raised", failing_row=-1)]},
        {"of_tokens": [np.zeros(0)]},
        {"of_tokens": [np.zeros(0), np.ones(2)]},
        {"of_tokens": [np.zeros(0), np.full(3, np.nan)]},
    ],
)
def test_an_answer_of_a_worker_fits_its_batch(told: dict[str, Any]):
    batch = RewardBatch({"completion_ids": [[1, 2, 3], [4, 5, 6]]}, step=1, size=2)
    good = dict[str, Any](values=[1.0, math.nan], logged={"n": [1.0]})
    good["of_tokens"] = [np.zeros(0), np.array([0.1, 2.0, -3.0])]
    written = encode(7, Answer(**good))
    number, read = decode(written, (Answer,))
    assert (number, read.values[0], read.logged, read.fits(batch)) == (7, 1.0, {"n": [1.0]}, True)
    assert [values_T.tolist() for values_T in read.of_tokens] == [[], [0.1, 2.0, -3.0]]
    assert not decode(encode(7, Answer(**good | told)), (Answer,))[1].fits(batch)
    with pytest.raises(ValueError, match="of_tokens"):
        decode(written.replace(b'["",', b'["no base64",'), (Answer,))


@pytest.mark.full
def test_workers_are_replaced_after_so_many_calls():
    with open_rewards([spec(faulty.inspects, recycle=2)], []) as rewards:
        first, second, third = (rewards.score(ROLLOUT).total[0] for _ in range(3))
    assert first == second != third


@pytest.mark.full
def test_rewards_run_side_by_side():
    specs = [spec(faulty.naps, label=f"nap{i}", workers=i % 2) for i in range(4)]
    with open_rewards(specs, []) as rewards:
        rewards.score(ROLLOUT)
        assert 0.5 <= rewards.score(ROLLOUT).seconds < 1.5  # not 2


def test_a_batch_is_cut_for_several_workers():
    rollout = make_rollout(["p0", "p1", "p2", "p3"], list("aabbccdd"))
    with open_rewards([spec(faulty.inspects, workers=2)], []) as rewards:
        rewards.score(rollout)
        by_worker = rewards.score(rollout).total.reshape(4, 2)
    assert (by_worker[:, 0] == by_worker[:, 1]).all()  # a group stays together
    assert len(set(by_worker[:, 0])) == 2
