"""The reference runs under configs/reference: rewards, prompts and learning rates by hand, on problems of GSM8K."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.config.asking import REPOSITORY
from tests.environments.template_families import tokenizer
from tpu_grpo.algorithms import open_algorithm
from tpu_grpo.config import RunConfig, load_config
from tpu_grpo.config.plugins import find_function
from tpu_grpo.data.stream import open_prompts
from tpu_grpo.learner.optimizers import learning_rate_schedule
from tpu_grpo.models.checkpoint import abstract_checkpoint
from tpu_grpo.records.errors import RewardError
from tpu_grpo.report.published import read_published
from tpu_grpo.rewards import open_rewards
from tpu_grpo.run.inputs import check_model

REFERENCES = REPOSITORY / "configs" / "reference"
NAMES = sorted(path.stem for path in REFERENCES.glob("*.yaml"))
GSM8K = REPOSITORY.parent / "shared" / "data" / "gsm8k" / "test.jsonl"
VTC = """Solve the following math problem.
First, put your detailed step-by-step reasoning process inside <reasoning>...</reasoning> tags.
Then, put your final numerical answer inside <answer>\\boxed{}</answer> tags. \
Do not put anything else in the answer tags.

Problem: QUESTION
<reasoning>
"""
MAXTEXT = """<|im_start|>user
<start_of_turn>user
You are given a problem. Think about the problem and provide your reasoning. Place it between <reasoning> and \
</reasoning>. Then, provide the final answer (i.e., just one numerical value) between <answer> and </answer>.

QUESTION<end_of_turn>
<start_of_turn>model<|im_end|>
<|im_start|>assistant
"""


def reference(name: str) -> RunConfig:
    return load_config(REFERENCES / f"{name}.yaml")


def problem(line: int) -> dict[str, str]:
    """A problem of GSM8K's test set, by its line."""
    if not GSM8K.exists():
        pytest.skip("the GSM8K test set is not here: ../shared/data/gsm8k/test.jsonl")
    return json.loads(GSM8K.read_text().splitlines()[line - 1])


@pytest.mark.parametrize("name", NAMES)
def test_a_reference_fits_its_model_and_says_what_departs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    config, header = reference(name), (REFERENCES / f"{name}.yaml").read_text()
    open_algorithm(config.algorithm)
    check_model(config, abstract_checkpoint(REPOSITORY / "configs/models" / Path(config.model.path).name))
    with open_rewards(config.rewards, ("question", "answer")) as rewards:
        metrics = {"rewards/mean"} | {f"evaluation/greedy/{reward}" for reward in rewards.names}
    published = read_published(str(config.logging.against))
    assert (published.path.stem, config.run.name) == (name, name)
    assert published.metric in metrics
    assert published.source.rpartition("/")[2] in header
    assert all(point.steps[1] <= config.run.max_steps for point in published.points)
    assert "\n# What departs from it:\n" in header
    assert re.search(r"^# Partly a guess: ", header, re.M) or name == "qwen3_4b_gsm8k"


@pytest.mark.parametrize(("name", "text"), [("qwen3_1p7b_gsm8k", VTC), ("qwen3_4b_gsm8k", MAXTEXT)])
def test_prompts_by_hand(name: str, text: str, tmp_path: Path) -> None:
    """The template is Qwen3's own; with its thinking on, the assistant's turn begins empty."""
    (tmp_path / "ducks.jsonl").write_text(json.dumps(problem(1)))
    data = reference(name).data.model_copy(update={"path": str(tmp_path / "ducks.jsonl"), "max_prompt_tokens": 2000})
    qwen = tokenizer("qwen3")
    prompt = open_prompts(data, 0, qwen).batch(1).prompts[0]
    assert qwen.decode(prompt.token_ids) == text.replace("QUESTION", problem(1)["question"])


def rewarded(reward: str, completions: Sequence[str], answer: str) -> list[Any]:
    function = find_function(f"configs/reference/tagged_answers.py:{reward}", "reward", RewardError)
    given = {"answer": answer} if reward != "tags" else {}
    return [function(completion=completion, **given) for completion in completions]


THOUGHT = "16 - 3 - 4 is 9.\n</reasoning>\n"


def test_vtc_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """18 dollars for the ducks' eggs, on line 1; 2,125 pieces of lego on line 147, with a comma."""
    monkeypatch.chdir(REPOSITORY)
    answer = problem(1)["answer"]
    expected = {
        rf"{THOUGHT}<answer>\boxed{{18}}</answer>": 1.0,
        rf"{THOUGHT}<answer>It is $\boxed{{ 18 }}$</answer> and more": 1.0,
        rf"{THOUGHT}<answer>\boxed 18</answer>": 1.0,  # without braces
        rf"{THOUGHT}<answer>\boxed{{17}}, no, \boxed{{18}}</answer>": 1.0,  # the last
        rf"{THOUGHT}<answer>\boxed{{18}}, no, \boxed{{17}}</answer>": 0.1,
        rf"{THOUGHT}<answer>\boxed{{18.0}}</answer>": 0.1,  # compared as text
        rf"{THOUGHT}<answer>18</answer>": 0.1,  # no box
        rf"{THOUGHT}\boxed{{18}} <answer></answer>": 0.1,  # a box, but not in the answer
        r"<answer>\boxed{18}</answer>": 0.5,  # reasoning never ends
        rf"{THOUGHT}{THOUGHT}<answer>\boxed{{18}}</answer>": 0.5,  # ends twice
        rf"<answer>\boxed{{18}}</answer>{THOUGHT}": 0.5,  # ends late
        r"so \boxed{18}": 0.5,
        r"so \boxed{17}": 0.0,
        "18": 0.0,
        "": 0.0,
    }
    assert dict(zip(expected, rewarded("vtc", [*expected], answer), strict=True)) == expected
    lego = rewarded("vtc", [rf"\boxed{{{said}}}" for said in ("2,125", "2125", "2.125")], problem(147)["answer"])
    assert lego == [0.5, 0.5, 0.0]


def test_maxtexts_rewards_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.0 for the last answer in tags, and a tenth for the form: together 1.1 at most."""
    monkeypatch.chdir(REPOSITORY)
    whole = f"<reasoning>{THOUGHT}"
    right = {
        f"{whole}<answer>18</answer>": (1.0, 1.0),
        f"{whole}<answer>\n$18 \n</answer>": (1.0, 1.0),
        f"{whole}<answer>18.0</answer>": (1.0, 1.0),  # as mathematics
        f"{whole}<answer>17</answer><answer>36/2</answer>": (1.0, 1.0),
        f"{whole}<answer>18</answer><answer>17</answer>": (0.0, 1.0),
        "<answer>18</answer>": (1.0, 0.0),
        f"{THOUGHT}<answer>18</answer>": (1.0, 0.0),  # reasoning that never began
        f"<answer>18</answer>{whole}": (1.0, 0.0),
        f"{whole}18": (0.0, 0.0),
        f"{whole}<answer></answer>": (0.0, 0.0),
        f"{whole}<answer>eighteen</answer>": (0.0, 1.0),
    }
    answer = problem(1)["answer"]
    found = zip(rewarded("right_answer", [*right], answer), rewarded("tags", [*right], answer), strict=True)
    assert dict(zip(right, found, strict=True)) == right
    lego = rewarded("right_answer", ["<answer>2125</answer>", "<answer>2,125</answer>"], problem(147)["answer"])
    assert lego == [1.0, 1.0]
    assert [(reward.shown, reward.weight) for reward in reference("qwen3_4b_gsm8k").rewards] == [
        ("right_answer", 1.0),
        ("tags", 0.1),
    ]


def test_learning_rates_by_hand() -> None:
    """Two updates a step: 200 of a schedule of 500, p/2 (1 + cos(pi (u - 50) / 450)); and 934 of 934, 93 to warm up."""
    configs = [reference(name) for name in ("qwen3_1p7b_gsm8k", "qwen3_4b_gsm8k")]
    small, large = (learning_rate_schedule(config.optimizer, config.updates) for config in configs)
    found = [float(np.asarray(small(update))) for update in (0, 25, 50, 199, 200, 275, 500)]
    late = 1e-7 * (1 + math.cos(math.pi * 149 / 450))
    np.testing.assert_allclose(found, [0, 1e-7, 2e-7, late, 1.5e-7, 1e-7, 0], rtol=1e-5, atol=1e-13)
    found = [float(np.asarray(large(update))) for update in (0, 31, 93, 934 - 841 // 2 - 1, 934)]
    np.testing.assert_allclose(
        found, [0, 1e-6, 3e-6, 1.5e-6 * (1 + math.cos(math.pi * 420 / 841)), 0], rtol=1e-5, atol=1e-12
    )
