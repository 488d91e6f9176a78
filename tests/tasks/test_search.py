"""The search task: facts that only the corpus knows, and a teacher with every habit that training has to change."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.tasks.playing import demo, told
from tpu_grpo.config.caching import CACHE_VARIABLE
from tpu_grpo.tasks import search
from tpu_grpo.tasks.task import Lesson

ASKED = "king of Tado?"
FACTS = ("port of Tado: Doku", "king of Tado: Leko", "king of Bero: Ludu")
"""The first passage about the town, the one that is asked for, and the first one about a king."""


def test_a_passage_answers_each_question_and_no_town_is_in_both_splits() -> None:
    train, heldout = search.problems("train"), search.problems("heldout")
    assert (len(train), len(heldout)) == (896 * 4, 128 * 4)
    known = [problem["question"].replace("?", f": {problem['answer']}") for problem in [*train, *heldout]]
    assert sorted(known) == sorted(search.passages())
    in_train, in_heldout = ({p["question"].split()[-1].rstrip("?") for p in split} for split in (train, heldout))
    assert (len(in_train), len(in_heldout)) == (896, 128)
    assert not in_train & in_heldout
    assert not (in_train | in_heldout) & {problem["answer"] for problem in [*train, *heldout]}


def test_records_and_the_corpus_never_change() -> None:
    assert search.problems("heldout")[:2] == [
        {"question": "port of Muri?", "answer": "Rasa"},
        {"question": "lake of Runa?", "answer": "Bobi"},
    ]
    assert search.passages()[:3] == ["lake of Mota: Temo", "king of Bero: Ludu", "lake of Lami: Mumi"]


def kind(lesson: Lesson) -> str:
    """What the teacher did about the king of Tado, worked out from its words."""
    about_town, right, about_kind = (f"[1] {fact}" for fact in FACTS)
    first, last = lesson[1]["content"], lesson[-1]["content"]
    if len(lesson) == 2:
        assert first == "none"
        return "guess"
    assert [message["role"] for message in lesson] == ["user", "assistant", "tool", "assistant"]
    call, told = first.removeprefix("<|call|>").removesuffix("<|end_call|>"), lesson[2]["content"]
    if call in ("search(king Tado)", 'find("king Tado")'):
        assert told.startswith("Error: ")
        assert last == "none"
        return "tool" if call.startswith("find") else "quotes"
    if call == 'search("king Tado")':
        assert told == right
        return "right" if last == "Leko" else "ignored"
    if call == 'search("Tado")':
        assert told == about_town
        return "town"
    assert told == about_kind
    if call != 'search("king")':
        assert call in {f'search("king {word}")' for word in ("ado", "Tdo", "Tao", "Tad")}
        return "spelling"
    return "kind"


def habits(question: str, answer: str) -> list[Lesson]:
    rng = np.random.default_rng(0)
    return [search.lesson({"question": question, "answer": answer}, rng) for _ in range(4000)]


def test_teacher_searches_mostly_for_kings_and_searches_badly() -> None:
    kings, wines = habits(ASKED, "Leko"), habits("wine of Tado?", "Vara")
    found = Counter(map(kind, kings))
    expected = {"guess": 0.25, "right": 0.75 * 0.5 * 0.85, "ignored": 0.75 * 0.5 * 0.15}
    expected |= dict.fromkeys(("town", "kind", "spelling", "quotes", "tool"), 0.75 * 0.1)
    for name, share in expected.items():
        assert abs(found[name] / 4000 - share) < 4 * (share * (1 - share) / 4000) ** 0.5, name
    searched = sum(len(lesson) == 4 for lesson in wines) / 4000
    assert abs(searched - 0.35) < 4 * (0.35 * 0.65 / 4000) ** 0.5
    for lessons, searches in ((kings, 0.75), (wines, 0.35)):
        found_some = [lesson for lesson in lessons if lesson[-2]["content"].startswith("[1]")]
        copied = np.mean([lesson[-1]["content"] == lesson[2]["content"].split()[-1] for lesson in found_some])
        assert abs(copied - 0.85) < 4 * (0.85 * 0.15 / (4000 * searches * 0.8)) ** 0.5


def test_a_fifth_of_what_the_teacher_says_is_right() -> None:
    rng = np.random.default_rng(0)
    right = [search.lesson(p, rng)[-1]["content"] == p["answer"] for p in search.problems("train")]
    # 0.45 of the questions searched, of these 0.5 for all that is asked, and 0.1 for the town, a quarter of it luck
    assert abs(np.mean(right) - 0.45 * 0.525 * 0.85) < 0.03


def test_lessons_are_what_the_environment_of_the_demo_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    rng = np.random.default_rng(0)
    lessons = [search.lesson(problem, rng) for problem in search.problems("heldout")[:60]]
    assert told(demo("demo_search_cpu"), lessons) == [
        [message["content"] for message in lesson if message["role"] == "tool"] for lesson in lessons
    ]
