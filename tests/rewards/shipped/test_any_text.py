"""No text that a policy can write makes a shipped reward raise, take for ever, or return anything but a number or None.

python -c "from tests.rewards.shipped.test_any_text import *; print(problems('math', texts(1, 3000)))"
"""

import json
import random
import time
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import reasoning_gym

from tests.rewards.conftest import answered, make_rollout
from tpu_grpo.config import RewardSpec
from tpu_grpo.rewards.shipped import SHIPPED
from tpu_grpo.rewards.shipped.judge import Judge

DIGITS = "５ ٣ २ ² ½ Ⅷ 𝟛 ③ 1,234.50 1.234,5 12:00 3:0 -0 007 1e400 1e-400 1e999999999 0x1F 50% $18.90 \\$3 €5 1/0 0/0"
LATEX = (
    r"\frac{1 \frac{0}{0} \boxed{ \boxed{\boxed{3} \boxed{} \boxed{5} \sqrt[3 \left( \begin{pmatrix}1&2 $ $$ \[ \( \) "
    r"10^{10^{10}} 9^9^9^9 2^{999999} 9**9**9 \infty -\infty i^i x=5 [1,2) (1,2,3) {1,2} \text{5 \pi 10\,000 } {"
)
TAGS = (
    "<answer> </answer> <answer></answer> <think> </think> <think></think> #### ####5 ```json ```python ``` [] {} ( "
    '* ** *** ****** {"n": {"n":5} [1,{"n":1e400}] <tool_call>{"name": </tool_call> <function=add> [add(a= <|im_end|> '
    "exit() __import__ lambda: NaN null P.S. << >> - * (B) answer: (B).\nAnswer\tis \x00 \ufeff \u202e \U0010ffff \r\n"
)
WORDS = "The answer is 日本語 Ответ: sechs يساوي five apples and then therefore"
PIECES = [piece for text in (DIGITS, LATEX, TAGS, WORDS) for piece in text.split(" ")] + ["\n", "\n\n", " "]
AROUND = ["{}", "<answer>{}</answer>", "#### {}", "\\boxed{{{}}}", "$ {} $", "```json\n{}\n```", "```python\n{}\n```"]
NAMES = ["detectable_format:json_format", "combination:two_responses", "detectable_format:title"]
ROW = {
    "answer": "5",
    "target": 24,
    "nums": [1, 2, 3, 4],
    "tests": ["assert add(1, 2) == 3", {"input": "1", "output": "2"}],
    "instruction_id_list": [*NAMES, "length_constraints:number_sentences", "change_case:english_lowercase"],
    "kwargs": [{}, {}, {}, {"num_sentences": 2, "relation": "at least"}, {}],
    "schema": {"properties": {"n": {"multipleOf": 0.1, "pattern": "^(a|aa)+$"}}, "items": {"$ref": "#"}},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "regex": {"pattern": r"(?s)####\s*(.*)"},
    "length": {"max_tokens": 9},
    "overlong": {"max_tokens": 9, "buffer": 4},
    "cosine_length": {"max_tokens": 9, "verifier": "math"},
    "language": {"language": "en"},
    "countdown": {"tag": None},
    "reasoning_gym": {"tag": None},
    "judge": {"url": "http://127.0.0.1:1/v1", "model": "m"},
}
TASKS = ("prime_factorization", "boxnet", "coin_flip", "game_of_life", "countdown", "n_queens", "simple_integration")


def texts(seed: int, count: int) -> Iterator[str]:
    """Make texts of pieces, some of them very often, some inside of what marks an answer."""
    rng = random.Random(seed)
    for _ in range(count):
        pieces = [rng.choice(PIECES) * (1 if rng.random() < 0.97 else 3000) for _ in range(rng.choice([0, 1, 2, 4, 9]))]
        yield rng.choice(["", "<think>", "So "]) + rng.choice(AROUND).format(rng.choice(["", " ", "\n"]).join(pieces))


@cache
def puzzles() -> list[dict[str, Any]]:
    return [dict(reasoning_gym.create_dataset(task, size=1, seed=1)[0]) for task in TASKS]


def problems(name: str, completions: Sequence[str]) -> list[str]:
    """Score texts, and return what went wrong."""
    spec = RewardSpec(name=name, options=OPTIONS.get(name, {}))
    answers = {"multiple_choice": "B"}
    rows: list[dict[str, Any]] = [{**ROW, "answer": answers.get(name, ROW["answer"])} for _ in completions]
    if name == "reasoning_gym":
        rows = [puzzles()[n % len(TASKS)] for n in range(len(rows))]
    prompts = ["p<think>\n" if n % 3 == 0 else "p" for n in range(len(rows))]
    rollout = make_rollout(prompts, completions, rows)
    answer = answered(rollout, spec)
    assert len(answer.values) == len(rows)
    assert not np.isinf(answer.values).any()
    return [f"{problem.text} for {completions[problem.row or 0]!r:.200}" for problem in answer.problems]


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(SHIPPED) - {"environment"}))
def test_any_text_has_a_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(self: Judge, messages: Any) -> float:
        return float(json.dumps(messages).count("5") > 0)

    monkeypatch.setattr(Judge, "_ask", ask)
    count = {"python_tests": 4, "reasoning_gym": 35, "math": 60}.get(name, 150)
    started = time.perf_counter()
    assert problems(name, list(texts(5, count))) == []
    assert time.perf_counter() - started < 60.0
