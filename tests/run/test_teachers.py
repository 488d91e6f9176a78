"""What is said about teachers before anything is loaded: tokenizers, templates, columns and hints."""

from typing import Any

import pytest

from tpu_grpo.config import DataSection, RunConfig, parse_config
from tpu_grpo.data.rendering import PromptRenderer
from tpu_grpo.models.tokenizers import build_byte_tokenizer, build_tool_tokenizer, decode
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.run.teachers import check_teachers, compare_tokenizers, hint_of, read_teachers

COLUMNS = ("question", "answer")


def config_of(**teacher: Any) -> RunConfig:
    return parse_config({"teachers": [teacher], "algorithm": {"beta": teacher.pop("beta", 0.0)}})


def notes_of(config: RunConfig, tokenizer: Any = None) -> tuple[str, ...]:
    read = read_teachers(config.teachers, config.model, config.data, config.rollout)
    given = (config.teachers, read, tokenizer or build_byte_tokenizer(), COLUMNS)
    return check_teachers(*given, data=config.data, beta=config.algorithm.beta)


def test_the_first_token_that_differs_is_named() -> None:
    """The tokenizer with tools has other names for the three reserved ids; the first of them is 261."""
    policy, teacher = build_byte_tokenizer(), build_tool_tokenizer()
    own, other = (each.convert_ids_to_tokens(261) for each in (policy, teacher))
    with pytest.raises(ConfigError) as caught:
        compare_tokenizers(policy, teacher, "big")
    assert str(caught.value) == (
        f"the teacher big must have the policy's tokenizer, token by token; id 261 is {own!r} to the policy, and "
        f"{other!r} to the teacher, the first of 3 such ids; take a teacher of the same family"
    )
    teacher = build_byte_tokenizer()
    teacher.add_tokens(["more"])
    compare_tokenizers(policy, teacher, "larger")  # the policy never samples that one
    with pytest.raises(ConfigError, match=r"id 264 is 'more' to the policy, and none to the teacher"):
        compare_tokenizers(teacher, policy, "smaller")


def test_notes_of_a_penalty_and_of_another_template() -> None:
    assert notes_of(config_of(path="builtin:careful_addition")) == ()
    [note] = notes_of(config_of(path="builtin:careful_addition", beta=0.5))
    assert note.startswith("algorithm.beta=0.5 beside teachers: the penalty draws the policy to where it began")
    tokenizer, config = build_byte_tokenizer(), config_of(path="builtin:careful_addition")
    tokenizer.chat_template = "{{ messages[0].content }}"
    [note] = notes_of(config, tokenizer)
    assert note.startswith("the chat template of the teacher careful_addition is not the policy's")


@pytest.mark.parametrize(
    ("teacher", "told"),
    [
        ({"hint": "It is {solution}"}, "hint of the teacher self needs the column 'solution' of the data"),
        ({"path": "builtin:careful_addition", "only_if": "hard"}, "only_if of the teacher careful_addition needs the"),
        ({"hint": "{}"}, "hint of the teacher self"),
        ({"path": "builtin:nothing"}, "builtin:nothing is not built in"),
    ],
)
def test_what_a_teacher_lacks(teacher: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        notes_of(config_of(**teacher))


def test_a_hint_is_a_system_message_or_the_end_of_one() -> None:
    tokenizer, record = build_byte_tokenizer(), {"question": "4+5=", "answer": "9"}
    seen = []
    for system in ("", "Add."):
        renderer = PromptRenderer(DataSection(system_prompt=system), tokenizer)
        prompt, hint = renderer.render(record, "here"), hint_of(config_of(hint="It is {answer}.").teachers[0])
        [ids] = renderer.hinted([prompt], hint)
        seen.append(decode(tokenizer, ids))
        assert seen[-1].endswith(decode(tokenizer, prompt.token_ids)[-20:])
    assert "It is 9." in seen[0]
    assert "Add.\n\nIt is 9." in seen[1]
    plain = PromptRenderer(DataSection(chat_template=False), tokenizer)
    [ids] = plain.hinted([plain.render(record, "here")], hint)
    assert decode(tokenizer, ids) == "It is 9.\n\n4+5="
