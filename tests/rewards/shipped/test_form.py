"""Regular expressions and tags are labelled by hand, lengths worked out from the formulas of the papers."""

import math
import time
from typing import Any

import pytest

from tests.goldens import labelled
from tests.rewards.shipped.test_correctness import LABELLED
from tpu_grpo.rewards.shipped.form import (
    cosine_length,
    length,
    matches_format,
    overlong,
    regex_answer,
    repetition,
    think_answer,
    xml_count,
)

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
    logged: list[Any] = []
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
        think_answer([], mode="hard")  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match="tags must be names"):
        think_answer([], think="<think>")


@pytest.mark.parametrize(
    ("text", "expected"),
    [*labelled(LABELLED, "xml_count"), ("</answer>" + "x" * 1000, 0.0)],
)
def test_xml_count(text: str, expected: float):
    assert xml_count([text]) == pytest.approx([expected])


@pytest.mark.parametrize(("completion", "expected"), labelled(LABELLED, "format"))
def test_format_wants_a_last_line_with_the_number(completion: str, expected: float):
    assert matches_format([completion]) == [expected]


def test_format_with_a_pattern_over_several_lines():
    pattern = r"<think>.+</think>\s*<answer>.+</answer>"
    texts = ["x <think>a\nb</think>\n<answer>5</answer> y", "<think>a</think>", "<answer>5</answer>"]
    assert matches_format(texts, pattern=pattern) == [1.0, 0.0, 0.0]


# --- lengths and repetition ------------------------------------------------------------------------------------------


def ids(*counts: int) -> list[list[int]]:
    return [[7] * n for n in counts]


def test_length():
    assert length(ids(0, 5, 10, 11), max_tokens=10, min_tokens=5) == [0.0, 1.0, 1.0, 0.0]
    assert length(ids(3, 12, 14, 99), max_tokens=10, min_tokens=5, margin=4) == [0.5, 0.5, 0.0, 0.0]


def test_overlong_is_dapo_s_penalty():
    # max 100, buffer 20: nothing up to 80, then (80 - n) / 20
    assert overlong(ids(10, 80, 85, 90, 100, 150), max_tokens=100, buffer=20) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="max_tokens must be >= 20, got 10"):
        overlong([], max_tokens=10, buffer=20)


def test_cosine_length():
    texts = ["#### 5"] * 4 + ["#### 6"] * 3 + ["#### 5"]
    found = cosine_length(texts, ids(0, 50, 100, 101, 0, 50, 100, 1), ["5"] * 7 + [None], max_tokens=100)
    assert found[:7] == pytest.approx([1.0, 0.75, 0.5, -1.0, -1.0, -0.75, -0.5])
    assert found[7] is None
    quarter = cosine_length(["5"], ids(25), ["5"], 100, verifier="exact_answer", correct=(2.0, 1.0))
    assert quarter == pytest.approx([1.0 + 0.5 * (1.0 + math.cos(math.pi / 4))])
    assert cosine_length([r"\boxed{1/2}"], ids(0), ["0.5"], 100, verifier="math") == [1.0]
    with pytest.raises(ValueError, match="verifier must be one of gsm8k, .*math, got 'x'"):
        cosine_length([], [], [], 10, verifier="x")


def test_repetition():
    # a b a b a b: aba bab aba bab -> 2 of 4 seen before
    assert repetition(["a b a b a b", "a b c d", "A a A a", "a b", ""]) == [-0.5, 0.0, -0.5, 0.0, 0.0]
    assert repetition(["a a a"], ngram=1, penalty=0.3) == pytest.approx([-0.2])
