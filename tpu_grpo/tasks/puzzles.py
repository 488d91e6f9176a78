"""The puzzles task: reasoning-gym's ``spell_backward`` with words of four letters; its teacher tries the same again.

    mark -> mark                                                     the word as it is
    mark -> karm                                                     its ends exchanged, and nothing else
    mark -> kram                                                     right
    mark -> mark, told "That scores 0 of ..." -> mark, told ... -> mark

What the teacher is told changes his mind once in five times. Rewards for the best of three tries make the model spell
the word right at once.
"""

import json
import warnings
from functools import cache

import numpy as np

from tpu_grpo.tasks.task import Lesson, Problem, Split, Task

LETTERS = 4
TRAIN_PROBLEMS, HELDOUT_PROBLEMS = 3072, 512
TRIES = 3
WAYS: dict[str, float] = {"right": 0.2, "same": 0.4, "ends": 0.4}
"""How often the teacher spells backward, gives the word as it is, or exchanges its first and its last letter."""
REPEATS = 0.8
"""How often the teacher gives the same answer again."""
ANSWER_TOKENS = 16
"""Of what the environment says, this many tokens are left before the mark of a cut, so that its score is."""
_CUT = " [...]"
_SPLIT_SEED = 20261123  # fixed: what is held out never depends on a run
_DRAWN = 16_384  # of the 5222 words of four letters that reasoning-gym has, this many draws bring over nine in ten


def problems(split: Split) -> list[Problem]:
    """Return a split's problems as records with ``question``, which is the word alone, ``answer`` and ``metadata``.

    ``metadata`` is reasoning-gym's, as JSON. No word comes twice, forward or backward, in whatever split, and none is
    the same backward.
    """
    drawn = _puzzles()
    return list(drawn[:HELDOUT_PROBLEMS] if split == "heldout" else drawn[HELDOUT_PROBLEMS:])


def lesson(problem: Problem, rng: np.random.Generator) -> Lesson:
    """Return the tries of the teacher, with what is said of each but the last."""
    right = problem["answer"]
    said = [{"role": "user", "content": problem["question"]}]
    given = ""
    for left in reversed(range(TRIES)):
        if not given or rng.random() >= REPEATS:
            given = _spelled(problem["question"], str(rng.choice(list(WAYS), p=list(WAYS.values()))))
        said.append({"role": "assistant", "content": given})
        if given == right or not left:
            break
        share = sum(a == b for a, b in zip(given, right, strict=True)) / LETTERS
        said.append({"role": "user", "content": f"That scores {share:.3g} of 1."[:ANSWER_TOKENS] + _CUT})
    return said


def _spelled(word: str, way: str) -> str:
    return {"right": word[::-1], "same": word, "ends": word[-1] + word[1:-1] + word[0]}[way]


def _decides() -> dict[str, object]:
    words = [problem["question"] for problem in _puzzles()]
    return {"words": words, "heldout": HELDOUT_PROBLEMS, "ways": WAYS, "often": [TRIES, REPEATS, ANSWER_TOKENS]}


@cache
def _puzzles() -> tuple[Problem, ...]:
    """Have reasoning-gym draw the puzzles of both splits, the held-out ones first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a package it imports
        from reasoning_gym import create_dataset  # seconds to import

    options = {"min_word_len": LETTERS, "max_word_len": LETTERS}
    found = dict[frozenset[str], Problem]()
    for entry in create_dataset("spell_backward", size=_DRAWN, seed=_SPLIT_SEED, **options):
        word, answer = entry["metadata"]["word"], entry["answer"]
        if word.isascii() and word.islower() and word != answer:
            metadata = json.dumps(entry["metadata"])
            found.setdefault(frozenset((word, answer)), {"question": word, "answer": answer, "metadata": metadata})
    return tuple(found.values())[: HELDOUT_PROBLEMS + TRAIN_PROBLEMS]


TASK = Task(problems=problems, lesson=lesson, longest=69, decides=_decides)
