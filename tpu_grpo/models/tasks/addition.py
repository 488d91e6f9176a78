"""The addition task asks ``a+b=`` with numbers from 10 to 99; the simulated teacher usually forgets to carry.

    47+38= -> 85    (the right answer)
    47+38= -> 75    (without the carry: 7+8 writes 5, 4+3 writes 7)

A model that imitates the teacher gives both kinds of answers, mostly those without the carry. GRPO with a reward for
right answers then makes it carry. In about a quarter of the problems there is no carry, so that both answers agree.

In the task careful_addition the teacher never forgets. A model that has learnt from it can teach one that forgets.

In the task wordy_addition the teacher goes on after the answer, so that the lengths of completions have a long tail:

    47+38= -> 75...    (the larger the first number, the more dots on average)
"""

from collections.abc import Sequence
from functools import cache
from itertools import combinations

import numpy as np

from tpu_grpo.models.tasks.lessons import Lesson, Problem, Split, Task, without_a_call

SMALLEST, LARGEST = 10, 99
HELDOUT_PAIRS = 256
TEACHER_RIGHT = 0.25
"""The probability that the teacher remembers the carry."""
MOST_DOTS = 48
"""The most dots that a wordy teacher writes after an answer."""
_SPLIT_SEED = 20240207  # fixed, so that every run holds out the same problems


def problems(split: Split) -> list[Problem]:
    """Return a split's problems as records with ``question`` ("47+38=") and ``answer`` ("85"), ordered by a, then b.

    The held-out split has 256 unordered pairs of distinct numbers, each in both orders: 512 of the 8100 problems. The
    training split has the other 7588, so that no held-out pair occurs in it in either order.
    """
    return [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in operands(split)]


def operands(split: Split) -> list[tuple[int, int]]:
    """Return the numbers (a, b) of every problem of a split, in the order of ``problems``."""
    numbers = range(SMALLEST, LARGEST + 1)
    heldout, wanted = _heldout_pairs(), split == "heldout"
    return [(a, b) for a in numbers for b in numbers if ((min(a, b), max(a, b)) in heldout) == wanted]


@cache
def _heldout_pairs() -> frozenset[tuple[int, int]]:
    pairs = list(combinations(range(SMALLEST, LARGEST + 1), 2))
    chosen = np.random.default_rng(_SPLIT_SEED).choice(len(pairs), HELDOUT_PAIRS, replace=False)
    return frozenset(pairs[i] for i in chosen)


def without_carry(a: int, b: int) -> int:
    """Add without carrying: every column, the leading one too, keeps only the last digit of its sum.

    47+38 -> 75;  57+68 -> 15 (5+6 writes 1);  50+60 -> 10;  57+53 -> 0, since leading zeros are not written.
    """
    total, place = 0, 1
    while a or b:
        total += (a % 10 + b % 10) % 10 * place
        a, b, place = a // 10, b // 10, place * 10
    return total


def needs_carry(a: int, b: int) -> bool:
    """Whether any column, the leading one included, adds up to 10 or more, so that forgetting carries is wrong."""
    return without_carry(a, b) != a + b


def teacher_answer(a: int, b: int, rng: np.random.Generator) -> str:
    """Answer as the teacher does: with probability ``TEACHER_RIGHT`` the right sum, else the sum without carries."""
    return str(a + b if rng.random() < TEACHER_RIGHT else without_carry(a, b))


def lesson(problem: Problem, rng: np.random.Generator) -> Lesson:
    """Return the question and the teacher's answer."""
    a, b = _numbers(problem["question"])
    return without_a_call(problem["question"], teacher_answer(a, b, rng))


def careful_lesson(problem: Problem, rng: np.random.Generator) -> Lesson:
    """Return the question and the right answer."""
    return without_a_call(problem["question"], problem["answer"])


def mean_dots(a: int) -> float:
    """Return the mean of the geometric distribution from which a wordy teacher draws dots: 1.4 for 10 to 21 for 99."""
    return 1.4 ** (a // 10)


def wordy_lesson(problem: Problem, rng: np.random.Generator) -> Lesson:
    """Return the question and a wordy teacher's answer, with dots after it."""
    a, b = _numbers(problem["question"])
    dots = min(int(rng.geometric(1 / (1 + mean_dots(a)))) - 1, MOST_DOTS)
    return without_a_call(problem["question"], teacher_answer(a, b, rng) + "." * dots)


def forgot_carry(completions: Sequence[str], question: Sequence[str]) -> list[float | None]:
    """Score a completion 1 if it is the sum without carries, else 0; this reward is for watching, not for training.

    The score is None for problems that need no carry, because the sum without carries is right there.
    """
    values: list[float | None] = []
    for completion, asked in zip(completions, question, strict=True):
        a, b = _numbers(asked)
        values.append(float(completion.strip().rstrip(".") == str(without_carry(a, b))) if needs_carry(a, b) else None)
    return values


def _numbers(question: str) -> tuple[int, int]:
    a, b = question.rstrip("=").split("+")
    return int(a), int(b)


TASK = Task(
    problems=problems,
    lesson=lesson,
    longest=12,
    decides=lambda: {"heldout": operands("heldout"), "teacher_right": TEACHER_RIGHT},
)
CAREFUL_TASK = Task(
    problems=problems, lesson=careful_lesson, longest=12, decides=lambda: {**TASK.decides(), "teacher_right": 1.0}
)
WORDY_TASK = Task(
    problems=problems,
    lesson=wordy_lesson,
    longest=12 + MOST_DOTS,
    decides=lambda: {**TASK.decides(), "dots": [mean_dots(a) for a in range(SMALLEST, LARGEST + 1)], "most": MOST_DOTS},
)
