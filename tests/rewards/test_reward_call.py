"""Rewards of every form are called: with extras, by rows, async, as classes, with other trainers' signatures."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.rewards.conftest import MakeFile, make_rollout, scored
from tpu_grpo.config import RewardSpec
from tpu_grpo.records.errors import RewardError
from tpu_grpo.records.stages import Figure, Prompt, PromptBatch, Scores
from tpu_grpo.rewards import open_rewards, per_sample

PROMPTS, TEXTS, COLUMNS = ["p0", "p1"], ["a", "bb", "ccc", "dddd"], [{"answer": "a"}, {"answer": "dddd"}]


def score(
    reward_file: MakeFile, source: str, name: str = "f", step: int = 0, columns: Any = COLUMNS, **spec: Any
) -> Scores:
    path = reward_file(source)
    reward = RewardSpec(name=f"{path}:{name}", **(dict[str, Any](workers=0) | spec))
    return scored(make_rollout(PROMPTS, TEXTS, columns, step=step), reward)


# --- extras ----------------------------------------------------------------------------------------------------------


def test_extras_come_to_those_who_declare_them(reward_file: MakeFile):
    source = """
def f(completions, completion_ids, step, options, log_metric, trainer_state):
    assert completion_ids == [[1], [1], [1], [1]] and options == {"any": 5} and trainer_state.global_step == step
    assert trainer_state.max_steps == 0  # unknown without a run
    for text in completions:
        log_metric("length", len(text))
    return [float(step)] * len(completions)
"""
    scores = score(reward_file, source, step=12, options={"any": 5})
    np.testing.assert_array_equal(scores.total, [12.0] * 4)
    assert scores.figures["rewards/f/length"] == Figure(2.5, "mean", 4)  # 1, 2, 3, 4


@pytest.mark.full
def test_kwargs_bring_what_trl_passes_and_no_other_extra(reward_file: MakeFile):
    path = reward_file("""
def f(completions, **rest):
    assert sorted(rest) == ["answer", "log_metric", "prompts", "trainer_state"], sorted(rest)
    state = rest["trainer_state"]
    rest["log_metric"]("share", state.global_step / state.max_steps)
    return [float(state.global_step)] * len(completions)
""")
    for workers in (0, 1):  # in this process, and in another
        rollout = make_rollout(PROMPTS, TEXTS, COLUMNS, step=15)
        scores = scored(rollout, RewardSpec(name=f"{path}:f", workers=workers), max_steps=60)
        np.testing.assert_array_equal(scores.total, [15.0] * 4)
        assert scores.figures["rewards/f/share"].value == 0.25


def test_an_extra_that_kwargs_do_not_bring_is_to_be_declared(reward_file: MakeFile):
    source = "def f(completions, **rest):\n    return [len(ids) for ids in rest['completion_ids']]\n"
    with pytest.raises(RewardError, match=r"raised KeyError: 'completion_ids' .*; it comes to a function that"):
        score(reward_file, source)


def test_a_column_goes_before_an_extra_of_its_name(reward_file: MakeFile):
    scores = score(reward_file, "def f(completions, step):\n    return step\n", step=9, columns=[{"step": 3.0}] * 2)
    np.testing.assert_array_equal(scores.total, [3.0] * 4)


@pytest.mark.parametrize("logged", ["'mean', 1.0", "'x', float('nan')", "'x', None", "'x', 'much'"])
def test_log_metric_refuses_what_it_cannot_show(reward_file: MakeFile, logged: str):
    source = f"def f(completions, log_metric):\n    log_metric({logged})\n    return [0.0] * len(completions)\n"
    with pytest.raises(RewardError, match="raised ValueError: log_metric takes a name other than mean, std,"):
        score(reward_file, source)


# --- one row at a time -----------------------------------------------------------------------------------------------


def test_a_function_of_one_row(reward_file: MakeFile):
    source = """
from tpu_grpo.rewards import per_sample

@per_sample
def f(completion, prompt, answer, bonus=0.0):
    return float(completion == answer) + bonus * (prompt == "p1")
"""
    np.testing.assert_array_equal(score(reward_file, source, options={"bonus": 0.5}).total, [1.0, 0.0, 0.5, 1.5])


def test_a_marked_function_stays_as_it_is():
    @per_sample(concurrency=3)
    def f(completion: str) -> float:
        return float(len(completion))

    assert f("abc") == 3.0
    with pytest.raises(ValueError, match="concurrency must be >= 1, got 0"):
        per_sample(concurrency=0)


PARTLY = """
from tpu_grpo.rewards import per_sample

@per_sample
def f(completion):
    if completion == "bb":
        raise KeyError(completion)
    return {"a": 1.0, "ccc": float("nan"), "dddd": None}[completion]

def good(completions):
    return [2.0] * len(completions)
"""


def test_a_row_that_fails_costs_only_that_row(reward_file: MakeFile, caplog: pytest.LogCaptureFixture):
    path = reward_file(PARTLY)
    specs = [
        RewardSpec(name=f"{path}:f", workers=0, on_error="value", error_value=-1.0),
        RewardSpec(name=f"{path}:good", workers=0),
    ]
    scores = scored(make_rollout(PROMPTS, TEXTS), *specs)
    np.testing.assert_array_equal(scores.by_name["f"], [1.0, -1.0, -1.0, np.nan])
    np.testing.assert_array_equal(scores.total, [3.0, 1.0, 1.0, 2.0])
    assert scores.figures["rewards/f/errors"] == Figure(2, "sum")
    assert scores.figures["rewards/f/timeouts"] == Figure(0, "sum")
    (message,) = [record.getMessage() for record in caplog.records]  # the first one speaks for the step
    assert message.startswith("step 0: reward f raised KeyError: 'bb' (my_rewards.py:7 in f); for row 1 (prompt 'p0'")


def test_rows_that_are_too_slow_together(reward_file: MakeFile):
    source = """
import time
from tpu_grpo.rewards import per_sample

@per_sample
def f(completion):
    time.sleep(0.4)
    return 1.0
"""
    scores = score(reward_file, source, timeout=1.0, on_error="skip")
    assert scores.figures["rewards/f/timeouts"].value in (1, 2)
    assert np.isnan(scores.by_name["f"]).sum() == scores.figures["rewards/f/timeouts"].value
    assert scores.by_name["f"][0] == 1.0


# --- async -----------------------------------------------------------------------------------------------------------


def test_async_functions_of_a_batch_and_of_a_row(reward_file: MakeFile):
    source = """
import asyncio
from tpu_grpo.rewards import per_sample

async def f(completions):
    await asyncio.sleep(0)
    return [float(len(c)) for c in completions]

@per_sample
async def row(completion):
    await asyncio.sleep(0.2)
    return float(len(completion))

running = most = 0

@per_sample(concurrency=2)
async def two(completion):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.01)
    running -= 1
    return float(most)
"""
    np.testing.assert_array_equal(score(reward_file, source).total, [1.0, 2.0, 3.0, 4.0])
    started = time.perf_counter()
    np.testing.assert_array_equal(score(reward_file, source, "row").total, [1.0, 2.0, 3.0, 4.0])
    assert time.perf_counter() - started < 0.6  # four rows of 0.2 s each, at the same time
    assert max(score(reward_file, source, "two").total) == 2.0


def test_async_rows_that_are_late_are_cancelled_and_the_others_count(reward_file: MakeFile):
    source = """
import asyncio
from tpu_grpo.rewards import per_sample

@per_sample
async def f(completion):
    if completion == "bb":
        await asyncio.sleep(60)
    if completion == "ccc":
        raise ConnectionError("no route")
    return 1.0
"""
    scores = score(reward_file, source, timeout=0.5, on_error="value", error_value=0.25)
    np.testing.assert_array_equal(scores.total, [1.0, 0.25, 0.25, 1.0])
    assert (scores.figures["rewards/f/timeouts"].value, scores.figures["rewards/f/errors"].value) == (1, 1)


def test_an_async_batch_that_is_late(reward_file: MakeFile):
    source = "import asyncio\nasync def f(completions):\n    await asyncio.sleep(60)\n"
    with pytest.raises(RewardError, match=r"f did not finish within its timeout of 0\.3 s, for 4 rows from 0 to 3"):
        score(reward_file, source, timeout=0.3)


# --- classes ---------------------------------------------------------------------------------------------------------

JUDGE = """
import asyncio, pathlib

class Judge:
    def __init__(self, plus):
        self.plus, self.calls = plus, 0

    async def setup(self):
        self.loop = asyncio.get_running_loop()

    async def __call__(self, completions, answer):
        assert self.loop is asyncio.get_running_loop()  # so that connections can be kept
        self.calls += 1
        return [self.calls + self.plus * (c == a) for c, a in zip(completions, answer)]

    async def close(self):
        pathlib.Path("closed").write_text(str(self.calls))
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_class_is_built_once_and_closed(reward_file: MakeFile, tmp_path: Any, workers: int):
    path = reward_file(JUDGE)
    rollout = make_rollout(PROMPTS, TEXTS, COLUMNS)
    with open_rewards([RewardSpec(name=f"{path}:Judge", options={"plus": 10}, workers=workers)], ["answer"]) as rewards:
        np.testing.assert_array_equal(rewards.score(rollout).total, [11.0, 1.0, 1.0, 11.0])
        np.testing.assert_array_equal(rewards.score(rollout).total, [12.0, 2.0, 2.0, 12.0])
    assert (tmp_path / "closed").read_text() == "2"


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 1])
def test_a_class_that_cannot_be_set_up(reward_file: MakeFile, workers: int):
    source = """
class f:
    def setup(self):
        raise ConnectionError("nobody answers")
    def __call__(self, completions): ...
"""
    with pytest.raises(RewardError, match=r"reward f could not be set up.*ConnectionError: nobody answers"):
        score(reward_file, source, workers=workers, on_error="skip")


# --- rewards written for other trainers ------------------------------------------------------------------------------


VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert data_source == "sums" and not kwargs, (data_source, kwargs)
    right = solution_str == ground_truth
    return {"score": 1.0 if right else -extra_info.get("penalty", 0.25), "acc": right, "pred": solution_str}

async def plain(data_source, solution_str, ground_truth):
    return solution_str == ground_truth

def names_a_mean(solution_str):
    return {"score": 1.0, "mean": 2.0}
"""
VERL_COLUMNS = [
    {"data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "a"}, "extra_info": {"penalty": 0.5}},
    {"data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "dddd"}, "extra_info": None},
]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reward_written_for_verl(reward_file: MakeFile, workers: int):
    path = reward_file(VERL)
    specs = [RewardSpec(name=f"{path}:{name}", workers=workers) for name in ("compute_score", "plain")]
    scores = scored(make_rollout(PROMPTS, TEXTS, VERL_COLUMNS), *specs)
    np.testing.assert_array_equal(scores.by_name["compute_score"], [1.0, -0.5, -0.25, 1.0])
    np.testing.assert_array_equal(scores.by_name["plain"], [1.0, 0.0, 0.0, 1.0])
    assert scores.figures["rewards/compute_score/acc"] == Figure(0.5, "mean", 4)
    assert "rewards/compute_score/pred" not in scores.figures


def test_verls_arguments_from_other_data(reward_file: MakeFile):
    """A column ground_truth is taken as it is, what is missing may be an option, and extra_info is then empty."""
    given: dict[str, Any] = {"name": "compute_score", "options": {"data_source": "sums"}}
    scores = score(reward_file, VERL, columns=[{"ground_truth": "a"}, {"ground_truth": "dddd"}], **given)
    np.testing.assert_array_equal(scores.total, [1.0, -0.25, -0.25, 1.0])
    with pytest.raises(RewardError, match=r"requires the parameter 'ground_truth'.*\(data.columns gives one"):
        score(reward_file, VERL, **given)
    with pytest.raises(RewardError, match="the column reward_model must hold a ground_truth, as verl's data .*, got 5"):
        score(reward_file, VERL, columns=[{"reward_model": 5}] * 2, **given)
    with pytest.raises(RewardError, match="returned a score with a metric that cannot be logged: .* got 'mean', 2.0"):
        score(reward_file, VERL, "names_a_mean")


def test_a_text_goes_before_a_column_of_its_name(reward_file: MakeFile):
    source = "def f(prompt, completion):\n    return float(prompt in ('p0', 'p1') and completion in 'abbcccdddd')\n"
    scores = score(reward_file, source, columns=[{"prompt": "x", "completion": "y"}] * 2)
    np.testing.assert_array_equal(scores.total, [1.0] * 4)


# --- what a prompt is ------------------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Add."}
TALK = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "2+3"},
]
AS_MESSAGES = """
def f(prompts, completions, rendered_prompts):
    for prompt, completion, rendered in zip(prompts, completions, rendered_prompts):
        assert prompt[0] == {"role": "system", "content": "Add."} and prompt[-1] == {"role": "user", "content": "2+3"}
        assert rendered == "<|system|>Add...", rendered
        prompt[-1]["content"] = completion[0]["content"] = "changed"
    return [float(len(prompt)) for prompt in prompts]

def g(prompts, completions, rendered_prompts):
    assert rendered_prompts == ["<|system|>Add..."] * 2 and completions == ["5", "6"]
    return [float(prompt == "Hello\\n\\n2+3") for prompt in prompts]

def h(prompt, completion, rendered_prompt):
    assert (prompt, rendered_prompt) == ("Hello\\n\\n2+3", "<|system|>Add...")
    return float(completion)
"""


def test_prompts_are_what_the_user_says_or_the_conversation(reward_file: MakeFile):
    path = reward_file(AS_MESSAGES)
    prompt = Prompt("<|system|>Add...", (1,), messages=[SYSTEM, *TALK])
    rollout = replace(make_rollout(["p"], ["5", "6"]), batch=PromptBatch(1, (prompt,)))
    specs = [RewardSpec(name=f"{path}:{name}", workers=0, messages=name == "f") for name in "fgh"]
    with open_rewards(specs, []) as rewards:
        for _ in range(2):  # what a reward changes is its own
            scores = rewards.score(rollout)
            assert {name: values.tolist() for name, values in scores.by_name.items()} == {
                "f": [4.0, 4.0],
                "g": [1.0, 1.0],
                "h": [5.0, 6.0],
            }


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        ("[c[0]['content'] for c in completions]", False, "prompts and completions are texts here: .* messages: true"),
        ("[c.get('content') for c in completions]", False, "set messages: true for this reward"),
        ("[re.search('x', c) for c in completions]", True, "with messages: true prompts and completions are lists of"),
        ("[c.strip() for c in completions]", True, "if it expects texts, leave messages out"),
        ("[p + 1 for p in prompts]", False, r"raised TypeError: [^;]*; row 0"),
        ("[p[5] for p in prompts]", True, r"raised IndexError: [^;]*lists? [^;]*; row 0|if it expects texts"),
    ],
)
def test_a_reward_of_the_other_form_is_told_the_setting(reward_file: MakeFile, source: str, messages: bool, text: str):
    source = f"import re\ndef f(prompts, completions):\n    return {source}\n"
    with pytest.raises(RewardError, match=text):
        score(reward_file, source, messages=messages)
