"""The Python task asks for products of two-digit numbers, ``37*48=``; its teacher can run Python, and does so badly.

    37*48= -> ~1800                                             a guess at once, rounded: always wrong
    37*48= -> python("37*48"), told 1776 -> 1776                (the answer)
    37*48= -> python("37*48"), told 1776 -> ~1800               the result ignored
    37*48= -> python("37*43"), told 1591 -> 1591                a wrong digit
    37*48= -> python("37+48"), told 85 -> 85                    a wrong operator
    37*48= -> python("x=37*48"), told nothing was printed -> ~1800
    37*48= -> python(37*48) or python("(37*48"), told of an error -> ~1800

The teacher runs Python mostly where the first number is large, and guesses mostly where it is not. A model taught so
has each of these habits. Rewards for right answers make it run Python always, write the program well, and give back
what is printed.
"""

import numpy as np

from tpu_grpo.tasks import pairs
from tpu_grpo.tasks.task import Lesson, Problem, Split, Task, with_a_call, without_a_call

LARGE = 70
"""The teacher finds a first number from here on large."""
RUNS_IF_LARGE, RUNS_IF_SMALL = 0.75, 0.35
"""How often the teacher runs Python."""
PROGRAMS: dict[str, float] = {
    "right": 0.5,
    "digit": 0.1,
    "operator": 0.1,
    "assignment": 0.1,
    "quotes": 0.1,
    "bracket": 0.1,
}
"""How often a program is right, has a wrong digit or operator, prints nothing, or lacks quotes or a bracket."""
COPIES = 0.85
"""How often the teacher gives back what is printed."""
OBSERVATION_TOKENS = 11
"""What is told is cut to this many tokens; a product has at most four."""
_SPLIT_SEED = 20261125  # fixed: what is held out never depends on a run
_TOLD = {
    "assignment": "nothi [...]",  # nothing was printed
    "quotes": "Error [...]",  # Error: an argument must be a value written out, got 37 * 48
    "bracket": "Error [...]",  # Error: SyntaxError: '(' was never closed (line 1)
}
_PYTHON = {"name": "python", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}}}


def problems(split: Split) -> list[Problem]:
    """Return a split's problems as records with ``question`` ("37*48=") and ``answer`` ("1776"), ordered by numbers.

    The held-out split has 256 pairs of different numbers, each in both orders; the training split has all others.
    """
    return [{"question": f"{a}*{b}=", "answer": str(a * b)} for a, b in operands(split)]


def operands(split: Split) -> list[tuple[int, int]]:
    """Return the numbers (a, b) of every problem of a split, in the order of ``problems``."""
    return pairs.operands(split, _SPLIT_SEED)


def lesson(problem: Problem, rng: np.random.Generator) -> Lesson:
    """Return what the teacher writes about a problem, and what the tool says."""
    question = problem["question"]
    a, b = map(int, question.rstrip("=").split("*"))
    guess = f"~{round(a * b, -2)}"
    if rng.random() >= (RUNS_IF_LARGE if a >= LARGE else RUNS_IF_SMALL):
        return without_a_call(question, guess)
    call, told = _call(a, b, rng)
    answer = told if told.isdigit() and rng.random() < COPIES else guess
    return with_a_call(question, f"python({call})", told, answer)


def _call(a: int, b: int, rng: np.random.Generator) -> tuple[str, str]:
    """Return the argument of a call as the teacher writes it, and what is answered to the call."""
    habit = str(rng.choice(list(PROGRAMS), p=list(PROGRAMS.values())))
    if habit == "digit":
        a, b = (_mistyped(a, rng), b) if rng.random() < 0.5 else (a, _mistyped(b, rng))
    if habit == "operator":
        return f'"{a}+{b}"', str(a + b)
    before = {"assignment": "x=", "bracket": "("}.get(habit, "")
    quote = "" if habit == "quotes" else '"'
    return f"{quote}{before}{a}*{b}{quote}", _TOLD.get(habit, str(a * b))


def _mistyped(number: int, rng: np.random.Generator) -> int:
    """Return a number of two digits with one of them changed."""
    tens, ones = divmod(number, 10)
    if rng.random() < 0.5:
        return 10 * int(rng.choice([digit for digit in range(1, 10) if digit != tens])) + ones
    return 10 * tens + int(rng.choice([digit for digit in range(10) if digit != ones]))


def _decides() -> dict[str, object]:
    return {
        "heldout": operands("heldout"),
        "programs": PROGRAMS,
        "often": [LARGE, RUNS_IF_LARGE, RUNS_IF_SMALL, COPIES],
        "told": [_TOLD, OBSERVATION_TOKENS],
        "tools": TASK.tools,
    }


TASK = Task(
    problems=problems,
    lesson=lesson,
    longest=60,
    decides=_decides,
    tools=({"type": "function", "function": _PYTHON},),
)
