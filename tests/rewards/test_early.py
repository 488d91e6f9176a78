"""Groups are scored while others are still sampled: real workers, values as without it, and faults in the middle."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rewards.conftest import MakeFile, make_rollout
from tests.rewards.test_loading import NEEDS
from tpu_grpo.config import RewardSpec
from tpu_grpo.records.errors import RewardError
from tpu_grpo.records.stages import Figure, Rollout
from tpu_grpo.rewards import open_rewards
from tpu_grpo.rewards.scoring import Scoring
from tpu_grpo.rewards.shipped import SHIPPED

PROMPTS = 5
TEXTS = ["a", "bb", "c", "dd", "eee", "f", "g", "hh", "ii", "jjjj"]
ANSWERS = [{"answer": answer} for answer in ("a", "dd", "f", "x", "ii")]
ROLLOUT = make_rollout([f"p{n}" for n in range(PROMPTS)], TEXTS, ANSWERS)
REWARDS = """
import os, time
from tpu_grpo.rewards import per_sample

@per_sample
def third(completion, log_metric):
    log_metric("length", len(completion) / 3)
    return len(completion) / 3

@per_sample
def seldom(completion):
    return 0.1 if completion in ("bb", "f", "hh") else None

def rank(completions):              # sees all rows of a host
    ordered = sorted(completions)
    return [ordered.index(text) / 7 for text in completions]

def size(completions):
    return [float(len(completions))] * len(completions)

@per_sample
def noted(completion):
    open(f"asked_{completion}", "w").close()
    return 1.0

@per_sample
def slow(completion):
    time.sleep(0.05)
    return float(len(completion))

@per_sample
def bad(completion):
    if completion == "eee":
        raise KeyError("nothing there")
    if completion == "dd":
        open("asked_dd", "w").close()
        time.sleep(1000)
    if completion == "jjjj":
        os._exit(3)
    return 1.0

@per_sample
async def together(completion, log_metric):
    import asyncio
    log_metric("process", os.getpid())
    await asyncio.sleep(0.3)
    return 1.0
"""


def spec(name: str, **settings: Any) -> RewardSpec:
    return RewardSpec(name=f"my_rewards.py:{name}", **settings)


def add(scoring: Scoring, *prompts: int, rollout: Rollout = ROLLOUT) -> None:
    size = rollout.group_size
    for p in prompts:
        rows = slice(p * size, (p + 1) * size)
        scoring.add(p, rollout.completions[rows], rollout.texts[rows])


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert true()


def scored(scoring: Scoring, name: str) -> dict[Any, Any]:
    """What a reward gave so far, by group."""
    return scoring.early[name].results


@pytest.fixture(autouse=True)
def _file(reward_file: MakeFile) -> None:
    reward_file(REWARDS)


# --- values ----------------------------------------------------------------------------------------------------------

ALL = [
    RewardSpec(name="exact_answer", weight=0.3),
    spec("third", weight=0.0, only_if="exact_answer"),
    spec("third", label="third_2", workers=2, weight={0: 0.1, 10: 0.7}),
    spec("seldom", workers=1, weight=3.0),
    spec("rank", weight=0.9),
    spec("rank", label="late", only_if="seldom", weight=0.2),
    spec("size", workers=0, only_if="exact_answer"),
]


def same(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(found.total, expected.total)
    assert list(found.by_name) == list(expected.by_name)
    for name, values in expected.by_name.items():
        np.testing.assert_array_equal(found.by_name[name], values)
    assert list(found.figures) == list(expected.figures)
    shown = {name: figure for name, figure in found.figures.items() if not name.endswith("/seconds")}
    assert shown == {name: figure for name, figure in expected.figures.items() if not name.endswith("/seconds")}


@pytest.mark.full
def test_every_bit_is_that_of_a_rollout_scored_at_once() -> None:
    """Groups that come in any order, or only with the rollout; gates in both directions; twice in the same workers."""
    with open_rewards(ALL, ["answer"]) as rewards:
        expected = rewards.score(ROLLOUT)
        assert expected.by_name["rank"][0] == 0.0  # of all ten rows, the first text in the alphabet
        assert expected.by_name["rank"][9] == 9 / 7
        for prompts in ([3, 0, 4, 1, 2], [2], []):
            with rewards.begin(ROLLOUT.batch) as scoring:
                add(scoring, *prompts)
                [found] = scoring.finish([ROLLOUT])
            same(found, expected)


@pytest.mark.full
def test_rollouts_of_the_same_prompts_are_scored_together() -> None:
    greedy = make_rollout([f"p{n}" for n in range(PROMPTS)], list("adegi"), ANSWERS)
    with open_rewards([RewardSpec(name="exact_answer"), spec("third"), spec("rank")], ["answer"]) as rewards:
        expected = [rewards.score(greedy), rewards.score(ROLLOUT)]
        with rewards.begin(ROLLOUT.batch, rollouts=2) as scoring:
            # ten groups count towards recycle as the four batches of rows that come together
            assert scoring.early["third"]._weight * 2 * PROMPTS == pytest.approx(4)
            scoring.add(3, ROLLOUT.completions[6:8], TEXTS[6:8], rollout=1)
            scoring.add(3, greedy.completions[3:4], ["g"])
            scoring.add(0, greedy.completions[:1], ["a"])
            found = scoring.finish([greedy, ROLLOUT])
    for one, other in zip(found, expected, strict=True):
        same(one, other)


def test_a_part_of_the_prompts_is_scored_alone() -> None:
    """As hosts do: rows of prompts 3 and 1, in this order."""
    with (
        open_rewards([RewardSpec(name="exact_answer"), spec("rank")], ["answer"]) as rewards,
        rewards.begin(ROLLOUT.batch) as scoring,
    ):
        add(scoring, 1)
        [found] = scoring.finish([ROLLOUT], [3, 1])
    assert found.by_name["exact_answer"].tolist() == [0.0, 0.0, 0.0, 1.0]  # g hh, c dd
    assert found.by_name["rank"].tolist() == [2 / 7, 3 / 7, 0.0, 1 / 7]


COLUMNS: dict[str, dict[str, Any]] = {
    "multiple_choice": {"answer": "B"},
    "countdown": {"target": 4, "nums": [1, 3]},
    "instructions": {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    "think_answer": {},
}


@pytest.mark.parametrize("name", [n for n, shipped in SHIPPED.items() if shipped.workers == 0 and n != "environment"])
def test_shipped_rewards_of_a_batch_are_functions_of_one_row(name: str) -> None:
    """So that it changes nothing when they are asked about one group at a time."""
    texts = [
        "#### 4",
        "the answer, is (B)",
        "<answer>1 + 3</answer>",
        "a a a a a a a a",
        "<think>x</think><answer>4</answer>",
    ]
    column, (_, options) = COLUMNS.get(name, {"answer": "4"}), NEEDS.get(name, ((), {}))
    specs = [RewardSpec(name=name, options=options), RewardSpec(name="xml_count", label="applies")]
    with open_rewards(specs, list(column)) as rewards:
        expected = rewards.score(make_rollout([str(n) for n in range(5)], texts, [column] * 5)).by_name[name]
        alone = [rewards.score(make_rollout([str(n)], [t], [column])).by_name[name] for n, t in enumerate(texts)]
    np.testing.assert_array_equal(np.concatenate(alone), expected)


# --- who starts early -------------------------------------------------------------------------------------------------


COSINE = RewardSpec(name="cosine_length", options={"max_tokens": 9})


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ([spec("third")], {"third"}),  # a function of one row in a worker
        ([spec("third", workers=0)], set()),  # it would hold the interpreter
        ([spec("third", early=False)], set()),
        ([spec("size"), spec("rank", workers=4)], set()),  # they may compare all rows that they see
        ([spec("size", early=True)], {"size"}),
        ([RewardSpec(name="gsm8k"), COSINE], {"gsm8k", "cosine_length"}),
        ([COSINE.model_copy(update={"workers": 0})], set()),  # a long computation, which gets a worker otherwise
        ([RewardSpec(name="gsm8k"), spec("third", only_if="gsm8k")], {"gsm8k", "third"}),
        ([spec("size"), spec("third", only_if="size"), spec("seldom", only_if="third")], set()),
    ],
)
def test_rewards_start_early_where_no_value_can_depend_on_it(specs: list[RewardSpec], expected: set[str]) -> None:
    with open_rewards(specs, ["answer"]) as rewards, rewards.begin(ROLLOUT.batch) as scoring:
        assert set(scoring.early) == expected


def test_a_group_is_scored_before_the_rollout_is_there() -> None:
    specs = [RewardSpec(name="exact_answer"), spec("noted", only_if="exact_answer")]
    with open_rewards(specs, ["answer"]) as rewards, rewards.begin(ROLLOUT.batch) as scoring:
        add(scoring, 2, 0)
        wait_until(Path("asked_a").exists)
        wait_until(Path("asked_f").exists)
        assert not Path("asked_ii").exists()
        [scores] = scoring.finish([ROLLOUT])
    assert [path.name for path in sorted(Path().glob("asked_*"))] == ["asked_a", "asked_dd", "asked_f", "asked_ii"]
    assert scores.by_name["noted"].tolist() == [1, 0, 0, 1, 0, 1, 0, 0, 1, 0]


@pytest.mark.full
def test_the_config_can_have_a_group_scored_in_a_call_of_its_own() -> None:
    with open_rewards([spec("size", workers=2, early=True)], []) as rewards:
        with rewards.begin(ROLLOUT.batch) as scoring:
            add(scoring, 1)
            assert scoring.finish([ROLLOUT])[0].total.tolist() == [2.0] * 10
        assert rewards.score(ROLLOUT).total.tolist() == [2.0] * 10  # five groups in at most eight batches
    with open_rewards([spec("size", workers=1)], []) as rewards, rewards.begin(ROLLOUT.batch) as scoring:
        add(scoring, 1)
        assert scoring.finish([ROLLOUT])[0].total.tolist() == [10.0] * 10


# --- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_what_is_done_during_the_rollout_takes_no_time_after_it() -> None:
    """20 rows of 0.05 s in two workers are 0.5 s; seconds of the reward are those in which it had something to do."""
    texts = [f"{n}" for n in range(20)]
    rollout = make_rollout([f"p{n}" for n in range(5)], texts)
    with open_rewards([spec("slow", workers=2)], []) as rewards:
        at_once = rewards.score(rollout)
        assert at_once.seconds >= 0.5
        with rewards.begin(rollout.batch) as scoring:
            for p in range(5):
                add(scoring, p, rollout=rollout)
                time.sleep(0.3)  # others are sampled
            [scores] = scoring.finish([rollout])
    np.testing.assert_array_equal(scores.total, at_once.total)
    assert scores.seconds < 0.25
    assert 0.5 <= scores.figures["rewards/slow/seconds"].value < 1.2  # of 1.5 s


@pytest.mark.full
def test_async_rows_of_groups_that_wait_are_awaited_together() -> None:
    """The first group takes 0.3 s; the other four, which come meanwhile, take 0.3 s together."""
    with open_rewards([spec("together", workers=1)], []) as rewards:
        rewards.score(ROLLOUT)
        started = time.perf_counter()
        with rewards.begin(ROLLOUT.batch) as scoring:
            add(scoring, 0)
            time.sleep(0.1)
            add(scoring, 1, 2, 3, 4)
            [scores] = scoring.finish([ROLLOUT])
        assert 0.6 <= time.perf_counter() - started < 1.1
    assert scores.figures["rewards/together/process"].count == 10


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_fault_costs_its_own_rows_and_the_others_go_on() -> None:
    """Row 3 hangs, row 4 raises and row 9 ends its worker; two workers divide the rows of a group."""
    with open_rewards([spec("bad", workers=2, timeout=1.0, on_error="value", error_value=-1.0)], []) as rewards:
        with rewards.begin(ROLLOUT.batch) as scoring:
            add(scoring, 4, 1, 2, 0, 3)
            wait_until(lambda: len(scored(scoring, "bad")) == 5)  # during the rollout: nothing waits for its end
            [scores] = scoring.finish([ROLLOUT])
        assert scores.seconds < 0.5
        assert rewards.score(make_rollout(["p"], ["a"])).total.tolist() == [1.0]  # its workers are as good as new
    assert scores.total.tolist() == [1.0, 1.0, 1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0, -1.0]
    figures = {name: scores.figures[f"rewards/bad/{name}"] for name in ("timeouts", "errors")}
    assert figures == {"timeouts": Figure(1, "sum"), "errors": Figure(2, "sum")}


@pytest.mark.full
def test_the_first_problem_of_a_step_is_written_and_the_rest_counted(caplog: pytest.LogCaptureFixture) -> None:
    bad = spec("bad", timeout=1.0, on_error="skip")
    with open_rewards([bad], []) as rewards, rewards.begin(ROLLOUT.batch) as scoring:
        add(scoring, 2)
        wait_until(lambda: len(scored(scoring, "bad")) == 1)
        [scores] = scoring.finish([ROLLOUT])
    [message] = [r.message for r in caplog.records if "reward bad" in r.message]
    assert message.startswith("step 0: reward bad raised KeyError: 'nothing there' (my_rewards.py:")
    assert message.endswith(
        "for row 4 (prompt 'p2', completion 'eee'). Return None for rows the reward does not apply to"
    )
    assert scores.figures["rewards/bad/errors"].value >= 1


def test_a_problem_that_ends_the_run_ends_it_with_the_next_group() -> None:
    """The message is that of a rollout scored at once: the row's number is that of the whole rollout."""
    message = r"reward bad raised KeyError: 'nothing there' \(.*; for row 4 \(prompt 'p2', completion 'eee'\)\. Return"
    with open_rewards([spec("bad", timeout=5.0)], []) as rewards:
        with pytest.raises(RewardError, match=message), rewards.begin(ROLLOUT.batch) as scoring:
            add(scoring, 2)
            deadline = time.monotonic() + 20.0
            while time.monotonic() < deadline:
                time.sleep(0.05)
                add(scoring, 0)
        assert rewards.score(make_rollout(["p"], ["a"])).total.tolist() == [1.0]


@pytest.mark.full
def test_a_problem_of_the_last_group_ends_the_run_as_well() -> None:
    with open_rewards([spec("bad", timeout=0.5)], []) as rewards, rewards.begin(ROLLOUT.batch) as scoring:
        add(scoring, 0, 3)
        with pytest.raises(
            RewardError, match=r"bad did not answer within its timeout of 0\.5 s, for 2 rows from 2 to 3"
        ):
            scoring.finish([ROLLOUT])


@pytest.mark.full
def test_a_rollout_that_fails_leaves_no_thread_and_no_busy_worker() -> None:
    with open_rewards([spec("bad", timeout=100.0)], []) as rewards:
        started = time.monotonic()
        with pytest.raises(ValueError, match="broken engine"), rewards.begin(ROLLOUT.batch) as scoring:
            add(scoring, 1)
            wait_until(Path("asked_dd").exists)
            raise ValueError("broken engine")
        assert time.monotonic() - started < 10.0
        assert rewards.score(make_rollout(["p"], ["a"])).total.tolist() == [1.0]


@pytest.mark.full
def test_what_is_left_after_the_rollout_has_its_timeout() -> None:
    """Ten rows of 0.05 s in one worker, handed out at once, with 0.3 s for them: a few are late."""
    with open_rewards([spec("slow", timeout=0.3, on_error="value", error_value=-1.0)], []) as rewards:
        rewards.score(make_rollout(["p"], ["a"]))
        with rewards.begin(ROLLOUT.batch) as scoring:
            add(scoring, 0, 1)
            [scores] = scoring.finish([ROLLOUT])
        assert 0.2 < scores.seconds < 1.0
        late = int(scores.figures["rewards/slow/timeouts"].value)
        assert 4 <= late < 10
        assert (scores.total == -1.0).sum() == late


@pytest.mark.full
def test_a_reward_that_cannot_be_set_up_ends_the_run(reward_file: MakeFile) -> None:
    reward_file(
        "from tpu_grpo.rewards import per_sample\nclass f:\n"
        "    def setup(self):\n        raise ConnectionError('nobody answers')\n"
        "    @per_sample\n    def __call__(self, completion): ...\n",
        "broken.py",
    )
    broken = RewardSpec(name="broken.py:f", on_error="skip")
    with open_rewards([broken], []) as rewards, rewards.begin(ROLLOUT.batch) as scoring:
        add(scoring, 0)
        with pytest.raises(RewardError, match="reward f could not be set up.*ConnectionError: nobody answers"):
            scoring.finish([ROLLOUT])


def test_a_column_that_some_row_lacks_is_found_with_its_group() -> None:
    rollout = make_rollout(["p0", "p1"], ["a", "b", "c", "d"], [{"answer": "a"}, {"solution": "d"}])
    message = r"column 'answer', which row 2 \(prompt 'p1', completion 'c'\) lacks; it has \['solution'\]"
    with (
        open_rewards([RewardSpec(name="exact_answer")], ["answer"]) as rewards,
        rewards.begin(rollout.batch) as scoring,
    ):
        add(scoring, 0, rollout=rollout)
        with pytest.raises(RewardError, match=message):
            add(scoring, 1, rollout=rollout)
        with pytest.raises(RewardError, match=message):
            rewards.score(rollout)
