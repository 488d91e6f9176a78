"""The seconds of a step, by hand; decoding against a simulation that walks through every step of every row."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.planning.figures import V6E, run_of, work_of
from tpu_grpo.planning.compiled_programs import TRAIN_STEP
from tpu_grpo.planning.costs import (
    Seconds,
    decode_step,
    host_seconds,
    pass_seconds,
    round_seconds,
)
from tpu_grpo.planning.step_seconds import StageTime, StepTime, TeacherWork, carried_work, completion_lengths, decode

RATES = V6E.rates


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


def test_steps_counted_at_once_are_those_walked_one_by_one() -> None:
    """One engine: with several, the slowest of a round may change between two ends of rows."""
    chance = random.Random(0)
    for _ in range(4):
        lengths = [chance.randint(1, 40) for _ in range(chance.randint(1, 30))]
        assert decode([lengths], prompt=7, slots=5, step=step) == pytest.approx(walked([lengths], prompt=7, slots=5))
    engines = [[9, 8, 9], [2, 3], []]  # the first is the slowest in every round while it runs, and it runs longest
    assert decode(engines, prompt=5, slots=3, step=step) == pytest.approx(walked(engines, prompt=5, slots=3))


def test_steps_of_a_launch_share_the_hosts_time() -> None:
    """Lengths 6 and 2 for two slots, then 4 for the second: launches of 4 steps; the first ends with the row.

    After that no row waits, and the devices do not wait for the host.
    """
    found = decode([[6, 2, 4]], prompt=10, slots=2, step=step, launch_steps=4)
    entering, first = 20 + 10, 2 * 9 + 4
    assert found["host"] == entering + first
    assert found["weights"] == (1 + 2 + 1 + 4) * 100


def test_lengths_have_their_mean_and_are_cut() -> None:
    found = completion_lengths(256, mean=680, longest=2048)
    assert sum(found) / 256 == pytest.approx(680, abs=0.5)
    assert found.count(2048) == pytest.approx(0.06 * 256, abs=1)
    assert found == completion_lengths(256, mean=680, longest=2048) != sorted(found)
    assert completion_lengths(3, mean=40, longest=40) == [40, 40, 40]
    assert completion_lengths(1, mean=25, longest=40) == [25]


def test_a_step_of_the_longest_completions() -> None:
    """Each host has two engines with 4 rows each, all at once; 16 rows of 80 tokens are 4 micro-batches."""
    work, step = work_of(), work_of().step()
    assert [stage.stage for stage in step.stages] == ["prefill", "decode", "update", "sync"]
    assert step.completion_tokens == 16 * 60
    assert step.seconds == pytest.approx(sum(stage.seconds for stage in step.stages))
    device = decode_step(work.engine, V6E, 4, 4 * (20 + 30.5))
    round_ = round_seconds([(device, host_seconds(work.engine, 4))] * 2)
    entering = decode_step(work.engine, V6E, 4, 4 * 20)
    first = round_seconds([(entering, host_seconds(work.engine, 4))] * 2)
    assert step.of("decode") == pytest.approx(60 * sum(round_.values()) + sum(first.values()))
    one = pass_seconds(work.trainer, V6E, head_tokens=4 * 60, accessed_bytes=1e6, updates=True)
    assert step.of("update") == pytest.approx(4 * sum(one.parts.values()) + 1e9 / (RATES.memory * 1640e9))
    assert step.stages[-1].by_cause == {"links": 1e9 / (RATES.links * 448e9 / 2)}


def test_a_cache_has_room_for_fewer_rows_the_longer_they_are() -> None:
    """Of 170 tokens: 2 of an engine's 4 rows of 80 tokens at a time, and all of its rows of 40 on average."""
    work = work_of()
    rollout = {"max_new_tokens": 60, "kv_tokens": 170}
    small = replace(work, config=run_of(data={"prompts_per_step": 8, "max_prompt_tokens": 20}, rollout=rollout))
    rounds, first = (
        round_seconds([(decode_step(work.engine, V6E, 2, 2 * tokens), host_seconds(work.engine, 2))] * 2)
        for tokens in (20 + 30.5, 20)
    )
    assert small.step().of("decode") == pytest.approx(2 * (60 * sum(rounds.values()) + sum(first.values())))
    device = decode_step(work.engine, V6E, 2, 2 * (20 + 30))
    assert small.planned()["decode_step"] == pytest.approx(sum(device.values()) + host_seconds(work.engine, 2))
    assert small.step(20) == work.step(20)


def test_what_a_run_can_compare_with_follows_the_rates() -> None:
    """Links half as fast and a host four times as slow; the other stages stay."""
    work = work_of()
    slower = replace(work, generation=replace(V6E, rates=replace(RATES, links=RATES.links / 2, host=4.0)))
    own, other, step = work.planned(), slower.planned(), work.step()
    device, host = decode_step(work.engine, V6E, 4, 4 * (20 + 30)), host_seconds(work.engine, 4)
    assert own["decode_step"] == pytest.approx(sum(device.values()) + host)
    assert (own["rollout"], own["sync"]) == pytest.approx((step.of("prefill", "decode"), step.of("sync")))
    assert other["sync"] == pytest.approx(2 * own["sync"])
    engine = decode_step(work.engine, slower.generation, 4, 4 * (20 + 30))
    assert other["decode_step"] == pytest.approx(sum(engine.values()) + 4 * host)


def test_tunix_passes_hold_a_row_each_whatever_its_length() -> None:
    """4 micro-batches of 4 rows for either length, whose head sees prompts too, and no step beside them."""
    padded = replace(work_of().trainer, is_padded=True)
    config = run_of(
        data={"prompts_per_step": 8, "max_prompt_tokens": 20},
        rollout={"max_new_tokens": 60},
        algorithm={"name": "tunix:grpo", "group_size": 2, "options": {"num_iterations": 3}, "micro_batch_prompts": 2},
    )
    work = replace(work_of(), config=config, trainer=padded, forward_passes=1)
    work = replace(work, accessed_bytes={TRAIN_STEP: 1e6, "log-probabilities": 1e6})
    one, forward = (
        sum(pass_seconds(padded, V6E, head_tokens=4 * 80, accessed_bytes=1e6, updates=updates).parts.values())
        for updates in (True, False)
    )
    for step in (work.step(), work.step(20)):
        assert step.of("update") == pytest.approx(3 * 4 * one)
        assert step.of("logprobs") == pytest.approx(4 * forward)


def test_shorter_completions_take_less_update_and_leave_a_tail() -> None:
    """16 x 40 tokens packed to 95 % are 3 of 4 micro-batches; the rollout lasts as long as its longest completion."""
    longest, mean = work_of().step(), work_of().step(20)
    assert mean.completion_tokens == pytest.approx(16 * 20, abs=8)
    assert mean.of("update") == pytest.approx(longest.of("update") * 3 / 4, rel=0.1)  # 16 x 40 / 0.95 of 320
    assert mean.of("decode") > longest.of("decode") * 0.8
    assert mean.tokens_per_second < longest.tokens_per_second
    assert work_of().step(60).seconds == pytest.approx(longest.seconds)


def test_slices_share_the_micro_batches_and_add_their_gradients_once() -> None:
    """Four micro-batches on two slices; 10 GB of gradients at 80 % of 12.5 GB a second."""
    one, optimizer = work_of().step().of("update"), 1e9 / (RATES.memory * 1640e9)
    two = replace(work_of(meshes={"slices": 2}), summed_bytes=1e10).step()
    assert two.of("update") == pytest.approx((one - optimizer) / 2 + optimizer + 1.0)


def test_forward_passes_and_iterations_repeat() -> None:
    once = work_of().step()
    work = work_of(algorithm={"group_size": 2, "beta": 0.1, "old_policy": "trainer", "iterations": 2})
    step = replace(work, forward_passes=2).step()
    assert step.of("update") == pytest.approx(2 * once.of("update"))
    one = pass_seconds(work_of().trainer, V6E, head_tokens=4 * 60, accessed_bytes=1e6, updates=False)
    assert step.of("logprobs") == pytest.approx(2 * 4 * sum(one.parts.values()))


def test_one_step_off_takes_the_longer_of_rollout_and_update() -> None:
    ahead = {"algorithm": {"group_size": 2, "staleness": 1, "old_policy": "trainer"}, "meshes": {"layout": "split"}}
    for passes in (1, 1000):  # decoding takes longer than one forward pass, and less time than a thousand
        step = replace(work_of(**ahead), forward_passes=passes).step()
        sampling, learning = step.of("prefill", "decode"), step.of("logprobs", "update")
        assert (sampling > learning) == (passes == 1)
        assert step.seconds == max(sampling, learning) + step.of("sync")


def test_one_step_off_a_teacher_of_the_sampler_is_read_before_both() -> None:
    """Its four passes add to the rollout, which is longer; those on the trainer's devices are beside the rollout."""
    ahead = work_of(algorithm={"group_size": 2, "staleness": 1}, meshes={"layout": "split"})
    works = (TeacherWork("x", ahead.trainer, 20, 0.0, is_apart) for is_apart in (False, True))
    beside, before = (replace(ahead, teachers=(work,)).step() for work in works)
    one = pass_seconds(ahead.trainer, V6E, head_tokens=4 * 60, accessed_bytes=0, updates=False)
    assert before.of("logprobs") == beside.of("logprobs") == pytest.approx(4 * sum(one.parts.values()))
    assert beside.seconds == beside.of("prefill", "decode", "sync")
    assert before.seconds == pytest.approx(beside.seconds + before.of("logprobs"))


def test_mini_batches_take_passes_and_steps_of_their_own() -> None:
    """2 prompts with 2 completions are 4 rows of 80 tokens: one pass, and one step of the optimizer."""
    work, once = work_of(), work_of().step()
    sizes = {"group_size": 2, "iterations": 2}
    changed = work_of(algorithm={**sizes, "mini_batch_prompts": 2, "old_policy": "trainer"})
    step = replace(changed, forward_passes=1).step()
    stepping = 1e9 / (RATES.memory * 1640e9)
    one = pass_seconds(work.trainer, V6E, head_tokens=4 * 60, accessed_bytes=1e6, updates=True)
    assert step.of("update") == pytest.approx(8 * (sum(one.parts.values()) + stepping))
    assert step.of("update") == pytest.approx(2 * once.of("update") + 6 * stepping)
    forward = pass_seconds(work.trainer, V6E, head_tokens=4 * 60, accessed_bytes=1e6, updates=False)
    assert step.of("logprobs") == pytest.approx(4 * sum(forward.parts.values()))  # once a step
    halves = work_of(algorithm={**sizes, "mini_batch_prompts": 1}).step()  # half a pass is computed whole
    half = pass_seconds(work.trainer, V6E, head_tokens=2 * 60, accessed_bytes=1e6, updates=True)
    assert halves.of("update") == pytest.approx(16 * (sum(half.parts.values()) + stepping))


def test_carried_steps_of_equal_lengths_sample_new_prompts_alone() -> None:
    """By hand: 12 groups end in the first step, and 8 are learnt from; then 4 whole ones are there, and 8 are begun."""
    assert work_of().carrying(0.5).config.open_groups == 12
    for work in carried_work(8, 2, 12, mean=60, longest=60):
        assert sorted(work.lengths) == [0] * 8 + [60] * 16
        assert (work.begun, work.resumed, work.done) == (8 / 12, 0, 0)


def test_carried_steps_sample_what_is_learnt_and_wait_for_no_tail() -> None:
    steps = carried_work(32, 8, 48, mean=680, longest=2048)
    assert sum(sum(work.lengths) for work in steps) / len(steps) == pytest.approx(32 * 8 * 680, rel=0.05)
    assert all(16 * 40 < max(work.lengths) < 16 * 100 and work.done > 16 * work.resumed > 0 for work in steps)
    work = work_of()
    assert work.carrying(1.0).step(20).of("decode") < work.step(20).of("decode")
    assert work.carrying(1.0).step().of("decode") == pytest.approx(work.step().of("decode"))


def test_efficiency_by_hand() -> None:
    """16 rows of 20 + 60 tokens on 8 devices; a token attends to 40 tokens on average, in the prefill to 10."""
    work, peak = work_of(), 918e12
    token, engine, found = work.engine.token, work.engine, work.efficiency()
    forward = 16 * 80 * (2 * token.layers + token.attention * 40) + 16 * 60 * 2 * token.head
    assert found["update_mfu"] == pytest.approx(3 * forward / (8 * peak * work.step().of("update")))
    read = engine.weight_bytes + 4 * (20 + 30) * engine.cache_bytes
    assert found["decode_of_least"] == pytest.approx(work.planned()["decode_step"] * 1640e9 / read)
    prompts = 40 * (2 * token.layers + token.attention * 10) + 2 * token.head  # 4 rows are 2 prompts
    assert found["prefill_mfu"] == pytest.approx(prompts / (2 * peak * work.step().of("prefill")))
    shorter = work.efficiency(20)
    assert shorter["update_mfu"] < found["update_mfu"]  # a third of the last micro-batch is empty
    adapters = replace(work, trainer=replace(work.trainer, trains_adapters=True))  # the matrices cost 2 of 3 passes
    attention = 16 * 80 * token.attention * 40
    needed = 2 * forward + attention
    assert adapters.efficiency()["update_mfu"] == pytest.approx(needed / (8 * peak * adapters.step().of("update")))


def test_the_efficiency_of_carried_steps_counts_the_tokens_of_their_seconds() -> None:
    work = work_of().carrying(1.0)
    step, mean = work.step(20), work.step(20).mean_new_tokens
    assert mean != 20
    token, tokens = work.trainer.token, 16 * (20 + mean)
    least = 3 * (tokens * 2 * token.layers + 16 * mean * 2 * token.head)  # without attention
    assert 1 < work.efficiency(20)["update_mfu"] * 8 * 918e12 * step.of("update") / least < 1.01


def test_the_range_of_a_step_is_wider_for_its_rollout() -> None:
    """4 s of rollout and 6 of the rest: 0.75 times both, and 2.5 times 4 plus 1.3 times 6."""
    stages = [StageTime("prefill", {"products": 1.0}), StageTime("decode", {"weights": 2.0, "links": 1.0})]
    rest = [StageTime("update", {"products": 5.0}), StageTime("sync", {"links": 1.0})]
    assert StepTime(1, 1.0, (*stages, *rest)).seconds_range == pytest.approx((7.5, 17.8))
    ahead = StepTime(1, 1.0, (*stages, *rest), is_ahead=True)  # the update takes longer at least, the rollout at most
    assert ahead.seconds_range == pytest.approx((0.75 * 6, 10 + 1.3))
