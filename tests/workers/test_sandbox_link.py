"""What tests ask of a program in another process: tests of every form that hold in one interpreter hold here, too."""

from pathlib import Path

import pytest

from tests.workers.programs import programs
from tpu_grpo.workers.sandbox import Limits, run_tests

FORMS = programs("forms.txt")


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_tests_holds_as_in_one_interpreter(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program, tests = FORMS[form]
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {"__name__": "program"}
    for code in (program, *tests):
        exec(compile(code, "<test>", "exec", dont_inherit=True), space)
    passed = run_tests(program, tests, Limits())
    assert [test for test, held in zip(tests, passed, strict=True) if not held] == []


def test_a_test_that_is_no_python_fails_alone() -> None:
    tests = ["assert f(1) == 1", "assert f(", "assert f(2) == 3", "while True: pass"]
    assert run_tests("def f(x): return x", tests, Limits(1.0)) == [True, False, False, False]


@pytest.mark.parametrize("size", [0, 150, 300_000])
def test_answers_of_many_items_and_many_levels(size: int) -> None:
    code = "def nest(n):\n    made = []\n    for _ in range(min(n, 150)): made = [made]\n    return made"
    tests = [f"assert nest({size}) == eval('[' * {min(size, 150) + 1} + ']' * {min(size, 150) + 1})"]
    assert run_tests(
        f"{code}\ndef count(n): return list(range(n))", [*tests, f"assert len(count({size})) == {size}"], Limits()
    ) == [True, True]
