"""Hosts that die, hang, fail or are slow, while the others wait in Python, in an exchange or in a collective."""

import pytest

from tests.hosts.processes import Ended, run
from tpu_grpo.hosts import End, Hosts, Watch
from tpu_grpo.hosts.watch import REMEMBERED, Progress

waits = pytest.mark.slow  # a minute of waiting for timeouts, together
COLLECTIVE = "multihost_utils.sync_global_devices('never')"
BODY = """
from jax.experimental import multihost_utils
with Watch(hosts, timeout_seconds=2, every=0.4) as watch:
    multihost_utils.sync_global_devices("all are here")
    with watch.stage("rollout"):
        if index == {lost}:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.{signal})
        {wait}
"""


def last_line(end: Ended) -> str:
    return [line for line in end.errors.splitlines() if line.startswith("LockstepError")][-1]


@waits
@pytest.mark.parametrize(
    ("signal", "lost", "wait"),
    [
        ("SIGKILL", 0, COLLECTIVE),
        ("SIGKILL", 1, COLLECTIVE),
        ("SIGSTOP", 0, COLLECTIVE),
        ("SIGSTOP", 1, COLLECTIVE),
        ("SIGKILL", 1, "time.sleep(60)"),
        ("SIGSTOP", 0, "hosts.barrier('never')"),
    ],
    ids=["kill-0", "kill-1", "stop-0", "stop-1", "kill-1-python", "stop-0-exchange"],
)
def test_a_lost_host_ends_the_others_and_is_named(signal: str, lost: int, wait: str) -> None:
    ended = run(BODY.format(lost=lost, signal=signal, wait=wait), 2, stuck=[lost])
    end = ended[1 - lost]
    assert end.code == 3, end
    assert last_line(end).startswith(f"LockstepError: lost host {lost}: "), end
    assert last_line(end).endswith(f"(seen by host {1 - lost}, in stage rollout)"), end
    assert end.errors.count("LockstepError") == 1
    assert end.at < 20


@waits
def test_of_three_hosts_the_lost_one_is_named_not_the_one_that_noticed() -> None:
    ended = run(BODY.format(lost=2, signal="SIGKILL", wait=COLLECTIVE), 3, stuck=[2])
    assert {index: (end.code, last_line(end).split(": ")[1]) for index, end in ended.items()} == {
        0: (3, "lost host 2"),
        1: (3, "lost host 2"),
    }, ended


@waits
def test_a_slow_host_is_waited_for() -> None:
    ended = run(
        """
        from jax.experimental import multihost_utils
        with Watch(hosts, timeout_seconds=2, every=0.5) as watch, watch.stage("compilation"):
            end = time.monotonic() + (4 if index == 1 else 0)
            while time.monotonic() < end:  # busy, as a long trace is
                sum(range(1000))
            multihost_utils.sync_global_devices("both are here")
            if index == 0:
                time.sleep(2.5)  # and the first to leave waits for the last
        print("done")
        """,
        2,
    )
    for end in ended.values():
        assert (end.code, end.out.splitlines()[-1]) == (0, "done"), end
        assert "Error" not in end.errors


@waits
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failing_host_tells_the_others(failing: int) -> None:
    ended = run(
        f"""
        from tpu_grpo.records.errors import DataError
        from jax.experimental import multihost_utils
        with Watch(hosts, timeout_seconds=20, every=0.5) as watch, watch.stage("data"):
            multihost_utils.sync_global_devices("all are here")
            if index == {failing}:
                raise DataError("a.jsonl:7 is no JSON")
            {COLLECTIVE}
        """,
        2,
    )
    assert ended[failing].code == 2, ended
    assert ended[failing].errors.rstrip().endswith("DataError: a.jsonl:7 is no JSON")
    assert ended[1 - failing].code == 3, ended
    message, seen = last_line(ended[1 - failing]).split(" (")
    assert message == f"LockstepError: host {failing} failed: DataError: a.jsonl:7 is no JSON"
    assert seen == f"seen by host {1 - failing}, in stage data)"
    assert max(end.at for end in ended.values()) < 15


@waits
def test_an_error_of_the_program_keeps_its_traceback_and_an_interruption_is_orderly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TPU_GRPO_SECRET", "a secret of the test")  # else host 0 says that it has none
    ended = run(
        """
        from tpu_grpo.records.errors import Interrupted
        with Watch(hosts, timeout_seconds=20, every=0.5):
            raise Interrupted("stopped at step 3")
        """,
        2,
    )
    for end in ended.values():
        assert (end.code, end.errors) == (4, "Interrupted: stopped at step 3\n"), end
    ended = run(
        """
        with Watch(hosts, timeout_seconds=20, every=0.5):
            if index == 1:
                raise KeyError("a bug")
            time.sleep(30)
        """,
        2,
    )
    assert ended[1].code == 1
    assert "Traceback" in ended[1].errors
    assert "KeyError: 'a bug'" in ended[1].errors
    assert (ended[0].code, last_line(ended[0]).split(" (")[0]) == (3, "LockstepError: host 1 failed: KeyError: 'a bug'")


@waits
def test_of_three_hosts_the_one_that_fails_is_named_by_both_others() -> None:
    """Host 0 hears of it, and does not leave before host 1 has."""
    ended = run(
        """
        with Watch(hosts, timeout_seconds=20, every=4):
            if index == 2:
                raise KeyError("a bug")
            time.sleep(1.5 * index)
            time.sleep(30)
        """,
        3,
    )
    assert ended[2].code == 1
    for index in (0, 1):
        assert ended[index].code == 3
        assert last_line(ended[index]).startswith("LockstepError: host 2 failed: KeyError: 'a bug'"), ended
    assert max(end.at for end in ended.values()) - min(end.at for end in ended.values()) < 4


@waits
def test_an_abort_of_another_cause_stays_one() -> None:
    ended = run(
        """
        import ctypes
        if index == 1:
            thread = threading.Thread(target=ctypes.CDLL(None).abort)
            thread.start()
        time.sleep(3)
        """,
        2,
        stuck=[0],
    )
    assert ended[1].code == -6, ended
    assert "LockstepError" not in ended[1].errors


def test_one_host_is_not_watched() -> None:
    with Watch(Hosts()) as watch, watch.stage("rollout"):
        watch.report_end(End("failed", 1, "nobody listens"))
    with pytest.raises(KeyError), Watch(Hosts()):
        raise KeyError


def test_a_timeout_holds_two_heartbeats() -> None:
    with pytest.raises(ValueError, match="timeout_seconds must hold two heartbeats, got 5, with every=3"):
        Watch(Hosts(), timeout_seconds=5, every=3)


# --- progress --------------------------------------------------------------------------------------------------------


def test_hosts_that_parted_contradict_each_other_at_any_step_both_know() -> None:
    ahead, behind = Progress(), Progress()
    for step, (left, right) in enumerate([("a", "a"), ("b", "b"), ("c", "X"), ("d", "Y")]):
        ahead.note("replica 0", step, left * 20)
        if step < 3:
            behind.note("replica 0", step, right * 20)
    assert behind.latest() == {"replica 0": (2, "X" * 20)}
    assert ahead.contradiction(behind.latest()) == "replica 0 at step 2, cccccccccccc here and XXXXXXXXXXXX there"
    assert behind.contradiction(ahead.latest()) is None  # it has not come to step 3, and hears of it from the other


def test_hosts_in_step_and_those_that_share_nothing_do_not() -> None:
    one, other = Progress(), Progress()
    for step in range(REMEMBERED + 10):
        one.note("replica 0", step, str(step))
    other.note("replica 1", 3, "z")
    assert one.contradiction({"replica 0": (5000, "later"), "replica 1": (3, "z")}) is None
    assert one.contradiction({"replica 0": (5, "too long ago to know")}) is None
    assert one.contradiction({"replica 0": (REMEMBERED, str(REMEMBERED))}) is None
    assert other.contradiction(one.latest()) is None
    assert Progress().latest() == {}
