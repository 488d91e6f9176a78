"""Rewards as people have them: written for other trainers, and called here unchanged or with one line of config.

Each piece has the shape of one that is published: its name, parameters, what it reads, and what it returns. The code is
this project's own. Pieces that do not work are here, too: their errors say why.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from tests.rewards.conftest import MakeFile, make_rollout, scored
from tpu_grpo.config import RewardSpec
from tpu_grpo.records.errors import RewardError
from tpu_grpo.records.stages import Completion

PROMPTS = ["2+2?", "5*10?"]
TEXTS = ["<think>\na\n</think>\n<answer>\n4\n</answer>", "five", "#### 50", r"\boxed{50}"]
"""Of 39, 4, 7 and 10 characters; 4, 1, 2 and 3 tokens. Two for each prompt."""
DATA: dict[str, list[Any]] = {
    "answer": ["4", "50"],
    "question": PROMPTS,
    "solution": ["4", "50"],
    "ground_truth": ["4", "50"],
    "task": ["math", "code"],
    "info": [{"least": 10}, {"least": 5}],
    "target": [4, 50],
    "nums": [[2, 2], [5, 10]],
    "data_source": ["sums", "products"],
    "reward_model": [{"style": "rule", "ground_truth": "4"}, {"style": "rule", "ground_truth": "50"}],
    "extra_info": [{"index": 0}, None],
    "verification_info": [{"language": "python"}, {"language": "python"}],
    "test_cases": ["[]", "[]"],
}
RESULTS = {"LENGTHS": [39, 4, 7, 10], "RIGHT": [1, 0, 1, 1], "TAGGED": [1, 0, 0, 0], "BOXED": [0, 0, 0, 1]}


@dataclass(frozen=True)
class Piece:
    """A reward ``f``, and what it gives for the four completions, or what the error says."""

    origin: str
    columns: list[str]
    gives: list[float | None] | str
    settings: dict[str, Any]
    """One line of the config at most: ``messages: true``, or its options."""
    source: str = field(repr=False)


HELPERS = r"""
import asyncio, functools, json, math, re
from typing import Any, Dict, List, Optional

def of_tag(text):
    return text.split("<answer>")[-1].split("</answer>")[0].strip() if "<answer>" in text else ""


def number(text):
    found = re.findall(r"\d+", text)
    return found[-1] if found else ""
"""

PIECES = r"""
# === TRL: the documentation of GRPOTrainer, trl.rewards, the course, the cookbook

#: trl docs, by tokens | | [4.0, 1.0, 2.0, 3.0]
def f(completions_ids, **kwargs):
    return [float(len(ids)) for ids in completions_ids]

#: trl, by tokens | | [4.0, 1.0, 2.0, 3.0]
def f(completion_ids: list[list[int]], **kwargs) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]

#: trl docs, by characters | answer | LENGTHS
def f(completions, **kwargs):
    return [float(len(c)) for c in completions]

#: trl docs, format | | TAGGED | messages
def f(completions, **kwargs):
    contents = [c[0]["content"] for c in completions]
    return [1.0 if re.match(r"^<think>.*?</think>\s*<answer>.*?</answer>$", c, re.DOTALL) else 0.0 for c in contents]

#: trl docs, several tasks | task | [1.0, 0.0, None, None]
def f(prompts, completions, task, **kwargs):
    return [float(number(c) == "4") if t == "math" else None for c, t in zip(completions, task)]

#: trl docs, async | | LENGTHS
async def f(prompts, completions, **kwargs):
    await asyncio.sleep(0.001)
    return [float(len(c)) for c in completions]

#: trl docs, curriculum | | [3.0, 3.0, 3.0, 3.0]
def f(completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step)] * len(completions)

#: trl, state in kwargs | | [0.3, 0.3, 0.3, 0.3]
def f(completions, **kwargs):
    state = kwargs["trainer_state"]
    return [state.global_step / state.max_steps] * len(completions)

#: trl, metric | | [0.0, 0.0, 0.0, 0.0]
def f(completions, log_metric=None, **kwargs):
    if log_metric:
        log_metric("n", len(completions))
    return [0.0] * len(completions)

#: trl, extra required | | [1.0, 1.0, 1.0, 1.0]
def f(completions, *, log_extra, log_metric, **kwargs):
    log_extra("c", completions)
    return [1.0] * len(completions)

#: trl.rewards.get_soft_overlong_punishment | | [-1, 0, 0, -0.5] | {"max_completion_len": 4, "soft_punish_cache": 2}
def f(max_completion_len, soft_punish_cache):
    return Punish(max_completion_len, soft_punish_cache)

class Punish:
    __name__ = "soft_overlong_punishment_reward"

    def __init__(self, most, cache):
        self.most, self.cache = most, cache

    def __call__(self, completion_ids, **kwargs):
        return [min(0.0, max(-1.0, (self.most - self.cache - len(ids)) / self.cache)) for ids in completion_ids]

#: trl.rewards.get_repetition_penalty_reward | | [-1.0, 0.0, 0.0, -1.0]
def f(ngram_size: int = 3, max_penalty: float = -1.0):
    if max_penalty > 0:
        raise ValueError("should not be positive")

    def repetition_penalty_reward(completion_ids, **kwargs):
        return [max_penalty * float(len(ids) >= ngram_size) for ids in completion_ids]

    return repetition_penalty_reward

#: trl, an object of a module | | [0.0, 1.0, 1.0, 0.0]
class Short:
    def __init__(self, most):
        self.most = most

    def __call__(self, completions, **kwargs):
        return [float(len(c) < self.most) for c in completions]

f = Short(8)

#: hf cookbook, solutions from kwargs | solution | RIGHT | messages
def f(completions, **kwargs):
    solutions = kwargs["solution"]
    return [float(number(c[0]["content"]) == s) for c, s in zip(completions, solutions)]

#: trl script, kwargs alone | answer | LENGTHS
def f(**kwargs):
    completions = kwargs.get("completions", [])
    return [float(len(c)) for c in completions]

#: trl, numpy | ground_truth | RIGHT
import numpy as np

def f(prompts, completions, ground_truth, **kwargs):
    return np.array([float(number(c) == t) for c, t in zip(completions, ground_truth)])


# === open-r1

#: open-r1 get_cosine_scaled_reward | solution | [2.0, -1.0, 2.0, 2.0] | {"max_value_correct": 2.0}
def f(
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
    max_len: int = 1000,
):
    def cosine_scaled_reward(completions, solution, **kwargs):
        return [max_value_correct if number(c) == s else min_value_wrong for c, s in zip(completions, solution)]

    return cosine_scaled_reward

#: open-r1 registry | | [8.0, 8.0, 8.0, 8.0]
def code(completions, num_parallel=2, **kwargs):
    return [float(num_parallel)] * len(completions)

f = functools.update_wrapper(functools.partial(code, num_parallel=8), code)


# === verl

#: verl gsm8k | ground_truth | [0.0, 0.0, 1.0, 0.0]
def f(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    found = re.search(r"#### (\d+)", solution_str)
    return 0 if found is None else score if found.group(1) == ground_truth else format_score

#: verl default_compute_score | data_source reward_model extra_info | RIGHT
def f(data_source, solution_str, ground_truth, extra_info=None, sandbox_fusion_url=None, **kwargs):
    if data_source not in ("sums", "products"):
        raise NotImplementedError(data_source)
    return float(number(solution_str) == ground_truth)

#: verl math_verify | reward_model | RIGHT
def f(model_output: str, ground_truth: str, timeout_score: float = 0) -> bool:
    return number(model_output) == ground_truth

#: verl geo3k | ground_truth | [0.9, 0.0, 0.9, 0.9]
def f(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    return (1 - format_score) * (number(predict_str) == ground_truth)

#: verl math_dapo | ground_truth | [1.0, -1.0, 1.0, 1.0]
def f(solution_str: str, ground_truth: str, strict_box_verify: bool = False) -> dict:
    right = number(solution_str) == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": number(solution_str)}

#: verl extra_info | data_source reward_model extra_info | [0.0, 0.0, 7.0, 7.0]
def f(data_source, solution_str, ground_truth, extra_info):
    return float(extra_info.get("index", 7))

#: verl extra_info without data | ground_truth | [0.0, 0.0, 0.0, 0.0]
def f(solution_str, ground_truth, extra_info):
    return float(len(extra_info))

#: verl async | data_source ground_truth | RIGHT
async def f(data_source, solution_str, ground_truth, extra_info=None):
    return float(number(solution_str) == ground_truth)

#: verl batch | data_source reward_model extra_info | RIGHT
def f(data_sources, solution_strs, ground_truths, extra_infos):
    assert [len(each) for each in (data_sources, extra_infos)] == [4, 4] and extra_infos[3] == {}
    return [float(number(s) == t) for s, t in zip(solution_strs, ground_truths, strict=True)]

#: verl batch of dicts | data_source ground_truth | LENGTHS
def f(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [{"score": len(s), "acc": True, "pred": s} for s in solution_strs]


# === verifiers, and the environments of prime-rl

#: verifiers exact_match | answer | RIGHT | messages
async def f(completion, answer) -> float:
    return 1.0 if answer in completion[-1]["content"] else 0.0

#: verifiers parser | answer | [0.0, 0.0, 0.0, 0.0]
def f(parser, completion, answer):
    return 1.0 if (parser.parse_answer(completion) or "") == answer else 0.0

#: verifiers XMLParser | answer | TAGGED | {"parser": ["think", "answer"]}
def f(parser, completion, answer, **kwargs):
    return 1.0 if parser.parse_answer(completion) == answer else 0.0

#: verifiers XMLParser fields | | [1.0, 1.0, 1.0, 1.0] | {"parser": ["reasoning"]}
def f(completion, parser):
    return float(parser.parse(completion).reasoning is None)

#: verifiers ThinkParser | answer | TAGGED | {"parser": "think"}
def f(completion, answer, parser, **kwargs):
    return float(of_tag(parser.parse_answer(completion)) == answer)

#: verifiers extract_boxed_answer | answer | BOXED | {"parser": "boxed"}
def f(parser, completion, answer, state=None) -> float:
    return float((parser.parse_answer(completion) or "") == answer)

#: verifiers messages of a parser | | [1.0, 1.0, 1.0, 1.0] | messages
def f(parser, completion):
    return float(len(parser.get_assistant_messages(completion)) - len(parser.get_user_messages(completion)))

#: verifiers state | answer | RIGHT
def f(completion, answer, state):
    return float(
        number(state["completion"]) == state["answer"]
        and state.get("error") is None
        and state["prompt"] in ("2+2?", "5*10?")
    )

#: verifiers state alone | answer | LENGTHS | messages
async def f(state) -> float:
    return float(len(state["completion"][-1]["content"]))

#: verifiers info | info | RIGHT
def f(completion, info, **kwargs):
    return float(len(completion) >= info["least"])

#: verifiers kwargs | answer | RIGHT
def f(completion, **kwargs):
    return float(number(completion) == kwargs["answer"])

#: verifiers group | answer | RIGHT
def f(completions, answers, **kwargs) -> list[float]:
    return [float(number(c) == a) for c, a in zip(completions, answers)]

#: verifiers group of states | answer | LENGTHS
async def f(states, completions):
    return [float(len(s["completion"])) for s in states]

#: verifiers 0.1, response | answer | RIGHT
def f(prompt, response, answer, state):
    return float(number(response) == answer)


# === EasyDeL

#: easydel correctness_reward | answer | [2.0, 0.0, 2.0, 2.0] | messages
def f(prompts, completions, batch, **kwargs):
    return [
        2.0 * (number(c[0]["content"]) == batch["answer"][i % len(batch["answer"])]) for i, c in enumerate(completions)
    ]

#: easydel, batch and a column | question answer | [2, 2, 2, 2]
def f(prompts, completions, question, batch, **kwargs) -> list[float]:
    return [float(batch["question"] == question) + ("answer" in batch)] * len(completions)

#: tunix check_numbers | question answer | [1.5, 0.0, 1.5, 1.5]
def f(prompts, completions, answer, **kargs):
    assert len(kargs["question"]) == len(completions)
    return [1.5 if number(c) == a else 0 for c, a in zip(completions, answer)]

#: tunix agentic | question answer | RIGHT
class Output:
    def __init__(self, reward, metadata):
        self.reward, self.metadata = reward, metadata

def f(task: Dict[str, Any], action: str):
    return Output(float(number(action) == task.get("answer")), {"right": 1})

#: rllm RewardFn | ground_truth | RIGHT
class f:
    def __call__(self, task_info: dict, action: str):
        return type("Output", (), {"reward": float(number(action) == task_info["ground_truth"]), "metadata": {}})()


# === Unsloth's notebooks, and those after them

#: unsloth check_answer | answer | [5.0, 0.0, 0.0, 0.0] | messages
def f(prompts, completions, answer, **kwargs):
    question = prompts[0][-1]["content"]
    responses = [c[0]["content"] for c in completions]
    return [0 if not of_tag(r) else 5.0 if of_tag(r) == a else -2.5 for r, a in zip(responses, answer)]

#: mini-r1 equation_reward_func | target nums | RIGHT
def f(completions, target, nums, **kwargs):
    return [float(number(c) == str(t) and len(n) == 2) for c, t, n in zip(completions, target, nums)]

#: ms-swift ORM | solution | RIGHT
class ORM:
    def __init__(self, args=None, **kwargs): ...

class f(ORM):
    def __call__(self, completions, solution, **kwargs) -> List[float]:
        return [float(number(c) == s) for c, s in zip(completions, solution)]

#: nemo, response | answer | RIGHT
def f(response: str, answer: str) -> float:
    return float(number(response) == answer)


# === what does not work

#: trl.rewards itself | solution | r"; pip install trl-that-is-missing, or copy what you use into a file without that"
from trl_that_is_missing.rewards import accuracy_reward as f

#: open-r1, its file | | r"relative import .*; name it as a module of its package: package.module:function"
from .utils import is_e2b_available

def f(completions, **kwargs): ...

#: easydel answer_ids | answer | r"KeyError: 'answer_ids' .*; the columns of the data are: answer"
def f(prompts, completions, batch, **kwargs):
    return [float(len(ids)) for ids in batch["answer_ids"]]

#: verl RewardManager | answer | r"requires the parameter 'data', which is neither a column"
class f:
    def __call__(self, data, return_dict=False): ...

#: verl, model as judge | data_source ground_truth | r"requires the parameter 'reward_router_address'"
async def f(data_source, solution_str, ground_truth, extra_info, reward_router_address): ...

#: verl prime_code | test_cases | r"must return finite numbers .*, got \(True, \[\{\}\]\) for row 0"
def f(completion, test_cases, continuous=False):
    return True, [{}]

#: trl, a reward model | | r"must be a function of a batch, got a str; name a function"
f = "org/reward-model"
"""
"""A line for each: where one like it is, the columns of its data, what it gives, its setting; then the code."""


def read(piece: str) -> Piece:
    head, _, source = piece.partition("\n")
    origin, columns, gives, *rest = (part.strip() for part in head.split("|"))
    settings = {"messages": True} if rest == ["messages"] else {"options": eval(rest[0])} if rest else {}
    return Piece(origin, columns.split(), eval(gives, dict(RESULTS)), settings, source)


ALL = [read(piece) for piece in PIECES.split("\n#: ")[1:]]


def given(pieces: list[Piece], write: MakeFile, workers: int) -> list[list[float | None]]:
    """What rewards give, each in a file of its own, in a run of ten steps of which this is the third."""
    paths = [write(HELPERS + piece.source, f"strange{n}.py") for n, piece in enumerate(pieces)]
    specs = [
        RewardSpec(name=f"{path}:f", label=f"f{n}", workers=workers, **piece.settings)
        for n, (path, piece) in enumerate(zip(paths, pieces, strict=True))
    ]
    columns = list(dict.fromkeys(name for piece in pieces for name in piece.columns))
    records = [{name: DATA[name][prompt] for name in columns} for prompt in range(2)]
    made = make_rollout(PROMPTS, TEXTS, records, step=3)
    ids = [Completion(np.arange(n, dtype=np.int32), np.zeros(n, np.float32), "stop", 0) for n in (4, 1, 2, 3)]
    scores = scored(replace(made, completions=tuple(ids)), *specs, max_steps=10)
    return [[None if np.isnan(value) else value for value in values] for values in scores.by_name.values()]


@pytest.mark.parametrize("piece", ALL, ids=[piece.origin for piece in ALL])
def test_a_reward_of_another_trainer(reward_file: MakeFile, piece: Piece):
    if isinstance(piece.gives, str):
        with pytest.raises(RewardError, match=piece.gives):
            given([piece], reward_file, 0)
    else:
        assert given([piece], reward_file, 0) == [pytest.approx(piece.gives)]


@pytest.mark.full
def test_those_that_are_made_or_get_more_than_columns_run_in_workers(reward_file: MakeFile):
    marks = ("get_soft_overlong", "get_cosine", "XMLParser", "verl batch", "easydel, batch", "tunix agentic")
    pieces = [
        piece for piece in ALL if any(mark in piece.origin for mark in marks) and "messages" not in piece.settings
    ]
    assert len(pieces) >= len(marks)
    assert given(pieces, reward_file, 1) == [pytest.approx(piece.gives) for piece in pieces]
