"""Every check of IFEval, and every language, meets a text that follows it and one that does not."""

from typing import Any

import pytest

from tpu_grpo.rewards.shipped.instructions import CHECKS, follows, instructions, language, sentences

GERMAN = "Das ist ein kurzer Text in deutscher Sprache, den jeder verstehen kann."
ENGLISH = "This is a short text in the English language that everybody understands."
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "A Cat and a dog", "A cat"),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "at least"}, "cat, Cat", "cat"),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "less than"}, "cat", "cat cat"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "concatenate", "a Cat!"),
    ("keywords:letter_frequency", {"letter": "A", "let_frequency": 3, "let_relation": "at least"}, "aAa", "aA"),
    ("language:response_language", {"language": "de"}, GERMAN, ENGLISH),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One. Two!", "Mr. A went."),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "two words", "now three words"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n***\n\n***\nb"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        'a\n\n"then, b',
        "then\n\na",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] [city]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "a\nP.S. b", "a PS"),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        "Thanks for reading. P. S. Bring a coat.",
        "a\nPS b",
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "So. p.p.s. b", "P.S. b"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n**b**"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "Yes."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* **b**", "*a*"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "***a***", "**a** ** **"),
    ("detectable_format:multiple_sections", {"section_spliter": " PART ", "num_sections": 1}, "So PART1", "PART one"),
    ("detectable_format:title", {}, "a << <b>> >>", "<<\na>>"),
    ("keywords:frequency", {"keyword": " cat ", "frequency": 1, "relation": "at least"}, "cats", "c at"),
    ("keywords:forbidden_words", {"forbidden_words": ["C++"]}, "C + +", "in c++."),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        "really? yes. it is.",
        "a... b. c",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        "Это кот. Он спит.",
        "Say it, Mr. Cat.",
    ),
    ("language:response_language", {"language": "de"}, "1 2 3", "This is English, of course."),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "less than"}, "U.S.A.", "A B"),
    ("change_case:english_capital", {}, "YES", "DAS WETTER IST HEUTE SEHR WARM"),
    ("change_case:english_lowercase", {}, "the cat sat on the mat", "das wetter ist heute sehr warm"),
    ("detectable_format:multiple_sections", {"section_spliter": "PART", "num_sections": 2}, "PART 1\nPART 2", "PART 1"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<Joy>>\ntext", "<< >>"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. It.", "It. Say it."),
    ("startend:end_checker", {"end_phrase": "The end."}, "So. the end.", "The end. So"),
    ("startend:quotation", {}, '"a"', 'a"'),
    ("change_case:capital_word_frequency", {"capital_frequency": 1, "capital_relation": "at least"}, "a NO b", "a b"),
    ("change_case:english_capital", {}, "ALL OF IT", "ALL of IT"),
    ("change_case:english_lowercase", {}, "all of it", "All of it"),
    ("punctuation:no_comma", {}, "a b", "a, b"),
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
