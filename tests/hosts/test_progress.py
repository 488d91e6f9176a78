"""What hosts noted before they did it, compared by whoever hears of it."""

from tpu_grpo.hosts.progress import REMEMBERED, Progress


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
