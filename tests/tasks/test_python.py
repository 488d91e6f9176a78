"""The Python task: problems that leak nothing, and a teacher with every habit that training has to change."""

from collections import Counter

import numpy as np

from tests.tasks.playing import demo, told
from tpu_grpo.tasks import python
from tpu_grpo.tasks.task import Lesson


def test_no_pair_is_in_both_splits_in_whatever_order() -> None:
    train, heldout = python.operands("train"), python.operands("heldout")
    assert len(train) + len(heldout) == len({*train, *heldout}) == 90 * 90
    assert len({frozenset(pair) for pair in heldout}) == 256
    assert not {frozenset(pair) for pair in train} & {frozenset(pair) for pair in heldout}


def test_records_and_what_is_held_out_never_change() -> None:
    assert python.problems("heldout")[:2] == [
        {"question": "10*22=", "answer": "220"},
        {"question": "10*25=", "answer": "250"},
    ]
    for problem in python.problems("train"):
        a, b = map(int, problem["question"].rstrip("=").split("*"))
        assert problem["answer"] == str(a * b)


def kind(lesson: Lesson, a: int, b: int) -> str:
    """What the teacher did, worked out from its words."""
    first, last, right = lesson[1]["content"], lesson[-1]["content"], str(a * b)
    if len(lesson) == 2:
        assert first == f"~{round(a * b / 100) * 100}"
        return "guess"
    assert [message["role"] for message in lesson] == ["user", "assistant", "tool", "assistant"]
    call, told = first.removeprefix("<|call|>python(").removesuffix(")<|end_call|>"), lesson[2]["content"]
    if call == f'"{a}*{b}"':
        assert told == right
        return "right" if last == right else "ignored"
    wrong = {f'"x={a}*{b}"': "assignment", f"{a}*{b}": "quotes", f'"({a}*{b}"': "bracket"}
    if call in wrong:
        assert not told.isdigit()
        assert last.startswith("~")
        return wrong[call]
    if call == f'"{a}+{b}"':
        assert told == str(a + b)
        return "operator"
    x, y = map(int, call.strip('"').split("*"))
    assert told == str(x * y) != right
    assert min(x, y) >= 10
    assert sum(p != q for p, q in zip(f"{x}{y}", f"{a}{b}", strict=True)) == 1
    return "digit"


def habits(a: int, b: int) -> Counter[str]:
    problem, rng = {"question": f"{a}*{b}=", "answer": str(a * b)}, np.random.default_rng(0)
    return Counter(kind(python.lesson(problem, rng), a, b) for _ in range(4000))


def test_teacher_runs_python_mostly_for_large_numbers_and_writes_it_badly() -> None:
    large, small = habits(81, 17), habits(17, 81)
    for found, runs in ((large, 0.75), (small, 0.35)):
        expected = {"guess": 1 - runs, "right": runs * 0.5 * 0.85, "ignored": runs * 0.5 * 0.15}
        expected |= dict.fromkeys(("digit", "operator", "assignment", "quotes", "bracket"), runs * 0.1)
        for name, share in expected.items():
            assert abs(found[name] / 4000 - share) < 4 * (share * (1 - share) / 4000) ** 0.5, name
    # of the numbers from 10 to 99 a third are large, so that 0.206 of what the teacher says is right
    assert abs((large["right"] + 2 * small["right"]) / 12000 - 0.206) < 0.02


def test_lessons_are_what_the_environment_of_the_demo_answers() -> None:
    rng = np.random.default_rng(0)
    lessons = [python.lesson(problem, rng) for problem in python.problems("heldout")[:80]]
    assert {kind(lesson, *map(int, lesson[0]["content"].rstrip("=").split("*"))) for lesson in lessons} == {
        *python.PROGRAMS,
        "guess",
        "ignored",
    }
    assert told(demo("demo_python_cpu"), lessons) == [
        [message["content"] for message in lesson if message["role"] == "tool"] for lesson in lessons
    ]
