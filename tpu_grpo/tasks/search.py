"""The search task asks for facts of made-up towns, which stand in a corpus; its teacher searches it badly.

    king of Tado? -> none                                                       said at once: always wrong
    king of Tado? -> search("king Tado"), told [1] king of Tado: Leko -> Leko   (the answer)
    king of Tado? -> search("king Tado"), told [1] king of Tado: Leko -> none   the result ignored
    king of Tado? -> search("Tado"), told [1] port of Tado: Doku -> Doku        any fact of the town
    king of Tado? -> search("king"), told [1] king of Bero: Ludu -> Ludu        any king
    king of Tado? -> search("king Tao"), told the same -> Ludu                  a letter left out
    king of Tado? -> search(king Tado) or find("king Tado"), told of an error -> none

The teacher searches mostly for kings, and hardly for anything else. A model taught so has each of these habits. Rewards
for right answers make it search always, for all that is asked, and give back what it finds.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from tpu_grpo.tasks.task import Lesson, Problem, Split, Task, with_a_call, without_a_call

KINDS = ("king", "lake", "port", "wine")
TRAIN_TOWNS, HELDOUT_TOWNS = 896, 128
SEARCHED = "king"
"""The teacher mostly searches for this kind of fact."""
SEARCHES, SEARCHES_OTHERS = 0.75, 0.35
"""How often the teacher searches for it, and for others."""
CALLS: dict[str, float] = {"right": 0.5, "town": 0.1, "kind": 0.1, "spelling": 0.1, "quotes": 0.1, "tool": 0.1}
"""How often a call is right, asks for a town or a kind alone, lacks a letter or quotes, or has the name of no tool."""
GUESS = "none"
COPIES = 0.85
"""How often the teacher gives back what it finds."""
OBSERVATION_TOKENS = 28
"""What the tool says is cut to this many tokens; a passage that is found has 22."""
_SPLIT_SEED = 20261124  # fixed: what is held out never depends on a run
_ERRORS = {
    "quotes": "Error: the call is not [...]",  # ... Python: invalid syntax
    "tool": "Error: there is no too [...]",  # ... tool 'find'; the tools are: search
}
_SEARCH = {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}}


class Fact(NamedTuple):
    """A fact of the corpus, such as (king, Tado, Leko)."""

    kind: str
    town: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.town}: {self.name}"


def passages() -> list[str]:
    """Return the corpus: 4096 passages such as "king of Tado: Leko", in an order that is always the same."""
    return [str(fact) for fact in _facts()]


def problems(split: Split) -> list[Problem]:
    """Return a split's problems as records with ``question`` ("king of Tado?") and ``answer`` ("Leko").

    The held-out split asks for all facts of 128 towns, for which the training split does not ask; it has 896.
    """
    towns = frozenset(_towns()[:HELDOUT_TOWNS])
    asked = [fact for fact in _facts() if (fact.town in towns) == (split == "heldout")]
    return [{"question": f"{fact.kind} of {fact.town}?", "answer": fact.name} for fact in asked]


def lesson(problem: Problem, rng: np.random.Generator) -> Lesson:
    """Return what the teacher writes about a problem, and what the tool says."""
    question = problem["question"]
    kind, town = question.rstrip("?").split(" of ")
    if rng.random() >= (SEARCHES if kind == SEARCHED else SEARCHES_OTHERS):
        return without_a_call(question, GUESS)
    call, told = _call(kind, town, rng)
    is_found = told.startswith("[1]")
    answer = told.split()[-1] if is_found and rng.random() < COPIES else GUESS
    return with_a_call(question, call, told, answer)


def _call(kind: str, town: str, rng: np.random.Generator) -> tuple[str, str]:
    """Return a call as the teacher writes it, and what is answered to it."""
    habit = str(rng.choice(list(CALLS), p=list(CALLS.values())))
    whole = f"{kind} {town}"
    if habit in _ERRORS:
        call = f'find("{whole}")' if habit == "tool" else f"search({whole})"
        return call, _ERRORS[habit]
    left_out = int(rng.integers(len(town)))
    query = {"town": town, "kind": kind, "spelling": f"{kind} {town[:left_out]}{town[left_out + 1 :]}"}.get(
        habit, whole
    )
    found = _found().get(query) or _found()[kind]  # a word that no passage holds counts for nothing
    return f'search("{query}")', f"[1] {found}"


def _decides() -> dict[str, object]:
    return {
        "facts": _facts(),
        "heldout": _towns()[:HELDOUT_TOWNS],
        "calls": CALLS,
        "often": [SEARCHED, SEARCHES, SEARCHES_OTHERS, GUESS, COPIES],
        "errors": [_ERRORS, OBSERVATION_TOKENS],
        "tools": TASK.tools,
    }


@cache
def _words() -> tuple[str, ...]:
    """Return 2000 words of two syllables in a mixed order: names of towns first, then those of all else.

    They are alike for a model, and no two are one word for a search that goes by stems.
    """
    syllables = ("BDKLMNRSTV", "aeiou", "bdklmnrstv", "aiou")
    words = ["".join(letters) for letters in product(*syllables)]
    return tuple(words[i] for i in np.random.default_rng(_SPLIT_SEED).permutation(len(words)))


def _towns() -> Sequence[str]:
    return _words()[: HELDOUT_TOWNS + TRAIN_TOWNS]


def _names() -> Sequence[str]:
    return _words()[HELDOUT_TOWNS + TRAIN_TOWNS :]


@cache
def _facts() -> tuple[Fact, ...]:
    rng, names = np.random.default_rng([_SPLIT_SEED, 1]), _names()
    pairs = list(product(KINDS, _towns()))
    return tuple(Fact(*pairs[i], name=names[int(rng.integers(len(names)))]) for i in rng.permutation(len(pairs)))


@cache
def _found() -> Mapping[str, Fact]:
    """Return what is found first by a kind, a town, or both; among passages of one length the first counts."""
    found: dict[str, Fact] = {}
    for fact in _facts():
        for query in (fact.kind, fact.town, f"{fact.kind} {fact.town}"):
            found.setdefault(query, fact)
    return MappingProxyType(found)


TASK = Task(
    problems=problems,
    lesson=lesson,
    longest=84,
    decides=_decides,
    tools=({"type": "function", "function": _SEARCH},),
)
