"""Regular expressions and tags are labelled by hand."""

import time

import pytest

from tpu_grpo.rewards.shipped.patterns import matches_format, regex_answer
from tpu_grpo.rewards.shipped.tags import think_answer, xml_count

SOFT = "Well. <think>a</think>\n <answer>5</answer> So."
STRICT = "<think>\na\nb\n</think>\n<answer>\n5\n</answer>\n"


def test_the_whole_text_or_a_part():
    assert matches_format(["xaby", "ab", ""], pattern="a.") == [1.0, 1.0, 0.0]
    assert matches_format(["xaby", "ab", ""], pattern="a.", full=True) == [0.0, 1.0, 0.0]


def test_the_group_is_the_answer():
    texts = ["so x = 5 and x = 7", "x = 5", "none"]
    assert regex_answer(texts, ["7", "7", "7"], r"x = (\d+)") == [1.0, 0.0, 0.0]
    assert regex_answer(texts[:1], [None], r"x = (\d+)") == [None]
    with pytest.raises(ValueError, match=r"pattern must have a group that holds the answer, got 'x'"):
        regex_answer([], [], "x")


def test_a_pattern_that_explodes_is_given_up():
    logged: list[tuple[str, float]] = []
    started = time.perf_counter()
    hostile = "a" * 50 + "b"
    assert matches_format([hostile], "(a|aa)+$", log_metric=lambda *a: logged.append(a)) == [0.0]
    assert logged == [("undecided", 1.0)]
    assert time.perf_counter() - started < 20.0  # the limit is one of processor time; without it, hours


@pytest.mark.parametrize(
    ("text", "soft", "strict", "per_tag"),
    [
        (STRICT, 1.0, 1.0, 1.0),
        (SOFT, 1.0, 0.0, 1.0),
        (f"x{STRICT}", 1.0, 0.0, 1.0),
        (f"{STRICT}x", 1.0, 0.0, 1.0),
        (STRICT.replace("\n</think>\n", "\n</think>\n\n"), 1.0, 0.0, 1.0),
        (SOFT.replace("\n <", " and <"), 0.0, 0.0, 1.0),
        (SOFT + "<think>", 0.0, 0.0, 0.75),
        ("<think>a</think>", 0.0, 0.0, 0.5),
        ("<answer>5</answer><think>a</think>", 0.0, 0.0, 1.0),
        ("5", 0.0, 0.0, 0.0),
    ],
)
def test_think_answer(text: str, soft: float, strict: float, per_tag: float):
    found = [think_answer([text], mode=mode)[0] for mode in ("soft", "strict", "per_tag")]
    assert found == [soft, strict, per_tag]


def test_tags_of_other_names():
    text = "<reasoning>a</reasoning><result>b</result>"
    assert think_answer([text], think="reasoning", answer="result") == [1.0]
    with pytest.raises(ValueError, match="mode must be one of soft, strict, per_tag, got 'hard'"):
        think_answer([], mode="hard")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tags must be names"):
        think_answer([], think="<think>")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think> <answer>5</answer>", 1.0),
        ("<think>a</think> <answer>5</answer>!", 1.0 - 0.001),
        ("<think>a</think> <answer>5</answer> \n", 1.0),
        ("<think>a</think> <answer>5", 0.75),
        ("<think><think>a</think> <answer>5</answer>", 0.75),
        ("5", 0.0),
        ("</answer>" + "x" * 1000, 0.0),
    ],
)
def test_xml_count(text: str, expected: float):
    assert xml_count([text]) == pytest.approx([expected])
