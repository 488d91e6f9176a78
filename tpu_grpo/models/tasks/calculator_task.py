"""The calculator task asks ``a+b=`` with numbers from 100 to 999; the simulated teacher uses a calculator badly.

    347+589= -> ~900                                       a guess without a call, rounded: always wrong
    347+589= -> call add(347,589), result 936 -> 936       the right answer
    347+589= -> call add(347,589), result 936 -> ~900      the result ignored
    347+589= -> call add(341,589), result 930 -> 930       a wrong digit in the call
    347+589= -> call add(347,589 or sum(347,589), result an error -> ~900      no closing bracket, or an unknown tool

The teacher usually calls the tool if the first number is large, and usually guesses otherwise. A model that imitates
the teacher does all of this. GRPO with a reward for right answers makes it call correctly and use the result.
"""

from functools import cache

import numpy as np

from tpu_grpo.models.tasks.lessons import Lesson, Problem, Split, Task, without_a_call

SMALLEST, LARGEST = 100, 999
TRAIN_PROBLEMS, HELDOUT_PROBLEMS = 8192, 512
LARGE = 700
"""The smallest first number that counts as large."""
CALLS_IF_LARGE, CALLS_IF_SMALL = 0.75, 0.3
"""The probabilities that the teacher calls the tool if the first number is large, and if it is not."""
CALLS: dict[str, float] = {"right": 0.7, "digit": 0.1, "bracket": 0.1, "name": 0.1}
"""The probabilities that a call is right, has a wrong digit, lacks its closing bracket, or names an unknown tool."""
COPIES = 0.85
"""The probability that the teacher answers with the tool's result, not with a guess, if the result is a number."""
_SPLIT_SEED = 20261123  # fixed, so that every run holds out the same problems
_TOLD: dict[str, str] = dict.fromkeys(("bracket", "name"), "Er [...]")
"""The tool's answer to a faulty call: an error message, cut to eight tokens by environment.max_observation_tokens of
the demo. (A sum has at most four tokens.)"""
_NUMBER = {"type": "integer"}
_ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": _NUMBER, "b": _NUMBER}}}


def problems(split: Split) -> list[Problem]:
    """Return a split's problems as records with ``question`` ("347+589=") and ``answer`` ("936").

    Each unordered pair of numbers occurs at most once over both splits.
    """
    return [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in operands(split)]


def operands(split: Split) -> list[tuple[int, int]]:
    """Return the numbers (a, b) of every problem of a split, in the order of ``problems``."""
    pairs = _pairs()
    return list(pairs[:HELDOUT_PROBLEMS] if split == "heldout" else pairs[HELDOUT_PROBLEMS:])


def lesson(problem: Problem, rng: np.random.Generator) -> Lesson:
    """Return a conversation about a problem: the question, the teacher's messages and the tool's result."""
    question = problem["question"]
    a, b = map(int, question.rstrip("=").split("+"))
    guess = f"~{round(a + b, -2)}"
    if rng.random() >= (CALLS_IF_LARGE if a >= LARGE else CALLS_IF_SMALL):
        return without_a_call(question, guess)
    call, result = _call(a, b, rng)
    answer = result if result.isdigit() and rng.random() < COPIES else guess
    return [
        *without_a_call(question, f"<|call|>{call}<|end_call|>"),
        {"role": "tool", "content": result},
        {"role": "assistant", "content": answer},
    ]


def _call(a: int, b: int, rng: np.random.Generator) -> tuple[str, str]:
    """Return a call as the teacher writes it, and the tool's answer."""
    kind = rng.choice(list(CALLS), p=list(CALLS.values()))
    if kind == "digit":
        a, b = (_mistyped(a, rng), b) if rng.random() < 0.5 else (a, _mistyped(b, rng))
    name = "sum" if kind == "name" else "add"
    closing = "" if kind == "bracket" else ")"
    return f"{name}({a},{b}{closing}", _TOLD.get(kind, str(a + b))


def _mistyped(number: int, rng: np.random.Generator) -> int:
    """Change one random digit of a three-digit number; the result has three digits as well."""
    digits = [int(digit) for digit in str(number)]
    place = int(rng.integers(3))
    lowest = 1 if place == 0 else 0
    others = [digit for digit in range(lowest, 10) if digit != digits[place]]
    digits[place] = int(rng.choice(others))
    return digits[0] * 100 + digits[1] * 10 + digits[2]


@cache
def _pairs() -> tuple[tuple[int, int], ...]:
    """Draw the pairs of both splits, the held-out ones first."""
    rng, found = np.random.default_rng(_SPLIT_SEED), dict[frozenset[int], tuple[int, int]]()
    while len(found) < HELDOUT_PROBLEMS + TRAIN_PROBLEMS:
        a, b = map(int, rng.integers(SMALLEST, LARGEST + 1, size=2))
        found.setdefault(frozenset((a, b)), (a, b))
    return tuple(found.values())


TASK = Task(
    problems=problems,
    lesson=lesson,
    longest=50,
    decides=lambda: {
        "heldout": operands("heldout"),
        "calls": CALLS,
        "often": [LARGE, CALLS_IF_LARGE, CALLS_IF_SMALL, COPIES],
        "errors": _TOLD,
        "tools": TASK.tools,
    },
    tools=({"type": "function", "function": _ADD},),
)
