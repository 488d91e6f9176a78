"""Every check of IFEval, and every language, meets a text that follows it and one that does not."""

from typing import Any

import pytest

from tests.goldens import labelled
from tests.rewards.shipped.test_correctness import LABELLED
from tpu_grpo.rewards.shipped.instructions import CHECKS, follows, instructions, language, sentences

GERMAN = "Das ist ein kurzer Text in deutscher Sprache, den jeder verstehen kann."
ENGLISH = "This is a short text in the English language that everybody understands."
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    *labelled(LABELLED, "instructions"),
    ("language:response_language", {"language": "de"}, GERMAN, ENGLISH),
]


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
def test_each_check(name: str, arguments: dict[str, Any], good: str, bad: str):
    assert follows(good, name, {**arguments, "unused": None})
    assert not follows(bad, name, arguments)


def test_every_check_is_tested_and_empty_texts_follow_nothing():
    assert {name for name, *_ in CASES} == set(CHECKS)
    assert not any(follows(" ", name, arguments) for name, arguments, *_ in CASES)


def test_shares_of_a_row_s_instructions():
    names = [["punctuation:no_comma", "startend:quotation"], ["startend:quotation"], []]
    given = [[{}, None], [{}], []]
    texts = ["a b", '"a"', "a"]
    assert instructions(texts, names, given) == [0.5, 1.0, None]
    assert instructions(texts, names, given, partial=False) == [0.0, 1.0, None]
    assert instructions(['Sure:\n"a"'], [["startend:quotation"]], [[{}]]) == [0.0]
    assert instructions(['Sure:\n"a"'], [["startend:quotation"]], [[{}]], loose=True) == [1.0]


def test_instructions_that_are_not_known():
    with pytest.raises(ValueError, match="got 'startend:rhyme'"):
        instructions(["a"], [["startend:rhyme"]], [[{}]])
    with pytest.raises(ValueError, match="kwargs of startend:end_checker do not fit"):
        instructions(["a"], [["startend:end_checker"]], [[{}]])
    with pytest.raises(ValueError, match="one mapping per instruction, got 0"):
        instructions(["a"], [["startend:quotation"]], [[]])


def test_sentences():
    assert sentences("One. Two? See e.g. This. 4 is 2.5!") == ["One.", "Two?", "See e.g. This.", "4 is 2.5!"]
    assert sentences('Dr. Who said "No." Then he left.') == ['Dr. Who said "No."', "Then he left."]


def test_languages():
    chinese = "这是一个用中文写的句子，大家都应该能够看懂它的意思，没有任何问题。"
    assert language([GERMAN, ENGLISH, chinese, "Ja."], "de") == [1.0, 0.0, 0.0, None]
    assert language([GERMAN, ENGLISH, chinese], ["de", "en", "zh"]) == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="language must be one of .*, got 'german'"):
        language([], "german")
