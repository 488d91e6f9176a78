"""Three turns in tokens, for every template: what is sampled, what is observed, and where."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.environments.template_families import ADD, FAMILIES, SAY, build, chat_format, follow, ids, tokenizer
from tpu_grpo.config import DataSection
from tpu_grpo.data.rendering import PromptRenderer, template_switches
from tpu_grpo.environments.actions import ToolCall
from tpu_grpo.environments.chat_format import ChatFormat


@dataclass(frozen=True)
class Case:
    """Two turns that call tools, and what the template writes behind each, by hand; then a turn that answers."""

    turns: tuple[str, str, str]
    between: tuple[str, str]
    prompt_ends: str
    """The end of the first prompt, by hand."""


QWEN_CALLS = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 47, "b": 38}}\n</tool_call><|im_end|>',
    "Now twice.\n"
    '<tool_call>\n{"name": "say", "arguments": {"text": "hi"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>',
    "It is 85.<|im_end|>",
)
QWEN_ANSWERS = (
    "\n<|im_start|>user\n<tool_response>\n85\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "\n<|im_start|>user\n<tool_response>\nhi there\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n",
)
QWEN_ASKS = "<|im_start|>user\n47+38=<|im_end|>\n<|im_start|>assistant\n"
LLAMA_OPENS = "<|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA_TOOL = "<|start_header_id|>ipython<|end_header_id|>\n\n"
CASES = {
    "qwen2_5": Case(QWEN_CALLS, QWEN_ANSWERS, QWEN_ASKS),
    "qwen3": Case(
        (
            f"<think>\nI add.\n</think>\n\n{QWEN_CALLS[0]}",
            f"<think>\nAnd again.\n</think>\n\n{QWEN_CALLS[1]}",
            f"<think>\nDone.\n</think>\n\n{QWEN_CALLS[2]}",
        ),
        QWEN_ANSWERS,
        QWEN_ASKS,
    ),
    "qwen3_coder": Case(
        (
            "<tool_call>\n<function=add>\n<parameter=a>\n47\n</parameter>\n<parameter=b>\n38\n</parameter>\n"
            "</function>\n</tool_call><|im_end|>",
            "Now twice.\n\n"
            "<tool_call>\n<function=say>\n<parameter=text>\nhi\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
            "</function>\n</tool_call><|im_end|>",
            "It is 85.<|im_end|>",
        ),
        (
            "\n<|im_start|>user\n<tool_response>\n85\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n",
            "\n<|im_start|>user\n<tool_response>\nhi there\n</tool_response>\n<tool_response>\n3\n</tool_response>\n"
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        QWEN_ASKS,
    ),
    "llama3": Case(
        (
            '{"name": "add", "parameters": {"a": 47, "b": 38}}<|eot_id|>',
            '{"name": "say", "parameters": {"text": "hi"}}<|eot_id|>',
            "It is 85.<|eot_id|>",
        ),
        (f'{LLAMA_TOOL}"85"<|eot_id|>{LLAMA_OPENS}', f'{LLAMA_TOOL}"hi there"<|eot_id|>{LLAMA_OPENS}'),
        f"47+38=<|eot_id|>{LLAMA_OPENS}",
    ),
    "llama_pythonic": Case(
        ("[add(a=47, b=38)]<|eot_id|>", '[say(text="hi"), add(a=1, b=2)]<|eot_id|>', "It is 85.<|eot_id|>"),
        (
            f'{LLAMA_TOOL}{{"output": "85"}}<|eot_id|>{LLAMA_OPENS}',
            f'{LLAMA_TOOL}{{"output": "hi there"}}<|eot_id|>{LLAMA_TOOL}{{"output": "3"}}<|eot_id|>{LLAMA_OPENS}',
        ),
        f"<|start_header_id|>user<|end_header_id|>\n\n47+38=<|eot_id|>{LLAMA_OPENS}",
    ),
    "builtin": Case(
        (
            "<|call|>add(47,38)<|end_call|><|im_end|>",
            'Now twice.<|call|>say("hi")<|end_call|><|call|>add(1,2)<|end_call|><|im_end|>',
            "It is 85.<|im_end|>",
        ),
        ("<|im_start|>tool85<|im_start|>assistant", "<|im_start|>toolhi there<|im_start|>tool3<|im_start|>assistant"),
        "<|im_start|>tooladd(a,b)<|im_start|>toolsay(text)<|im_start|>user47+38=<|im_start|>assistant",
    ),
}
FIRST = [{"role": "user", "content": "47+38="}]
ONE = [{"role": "tool", "name": "add", "content": "85"}]
TWO = [{"role": "tool", "name": "say", "content": "hi there"}, {"role": "tool", "name": "add", "content": "3"}]
CALLS = (
    (ToolCall("add", {"a": 47, "b": 38}),),
    (ToolCall("say", {"text": "hi"}), ToolCall("add", {"a": 1, "b": 2})),
    (),
)


@dataclass
class Sequenced:
    """A conversation as it grows: ids, and which of them were sampled."""

    chat_format: ChatFormat
    prompt: list[int]

    def __post_init__(self) -> None:
        self.ids, self.sampled = list(self.prompt), [False] * len(self.prompt)

    def turn(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.sampled += [True] * len(ids)

    def answer(self, answers: Sequence[Mapping[str, Any]]) -> None:
        following = self.chat_format.follow(self.ids, len(self.prompt), self.sampled, answers)
        assert following.new_prompt is None
        self.ids += following.suffix
        self.sampled += [False] * len(following.suffix)


def played(name: str, turns: Sequence[Sequence[int]]) -> Sequenced:
    """Three turns with a family's chat format; the second has one call where the template takes no more."""
    opened = chat_format(name)
    played = Sequenced(opened, opened.first(FIRST, None)[1])
    for turn, answers in zip(turns, (ONE, TWO[:1] if name == "llama3" else TWO, None), strict=True):
        played.turn(turn)
        if answers:
            played.answer(answers)
    return played


@pytest.mark.parametrize("name", CASES)
def test_three_turns(name: str) -> None:
    case = CASES[name]
    turns = [ids(name, turn) for turn in case.turns]
    result = played(name, turns)
    between = [ids(name, text) for text in case.between]
    prompt = result.prompt
    assert tokenizer(name).decode(prompt).endswith(case.prompt_ends)
    assert result.ids == [*prompt, *turns[0], *between[0], *turns[1], *between[1], *turns[2]]
    lengths = [len(each) for each in (prompt, turns[0], between[0], turns[1], between[1], turns[2])]
    marks = [is_sampled for n, length in enumerate(lengths) for is_sampled in [n % 2 == 1] * length]
    assert result.sampled == marks


@pytest.mark.parametrize("name", CASES)
def test_the_template_writes_the_same_of_the_conversation_as_it_was_read(name: str) -> None:
    opened, case = chat_format(name), CASES[name]
    turns = [ids(name, turn) for turn in case.turns]
    messages: list[Any] = list(FIRST)
    for turn, answers in zip(turns, (ONE, TWO[:1] if name == "llama3" else TWO, []), strict=True):
        action = opened.read(turn)
        message: dict[str, Any] = {"role": "assistant", "content": action.content}
        if action.thinking:
            message["reasoning_content"] = action.thinking
        if action.calls:
            calls = [call for call in action.calls if isinstance(call, ToolCall)]
            message["tool_calls"] = [{"function": {"name": c.name, "arguments": dict(c.arguments)}} for c in calls]
        messages += [message, *answers]
    whole: Any = tokenizer(name).apply_chat_template(messages, tools=[ADD, SAY], return_dict=False)
    result = played(name, turns).ids
    assert whole[: len(result)] == result
    assert len(whole) - len(result) == (1 if name.startswith("qwen") else 0)  # Qwen's newline behind the last turn


@pytest.mark.parametrize("name", CASES)
def test_turns_are_read(name: str) -> None:
    opened, case = chat_format(name), CASES[name]
    actions = [opened.read(ids(name, turn)) for turn in case.turns]
    two = CALLS[1][:1] if name == "llama3" else CALLS[1]
    assert [action.calls for action in actions] == [CALLS[0], two, ()]
    assert actions[0].content == ""
    assert actions[1].content == ("" if name.startswith("llama") else "Now twice.")
    assert actions[2].content == "It is 85."
    assert [action.thinking for action in actions] == (
        ["I add.", "And again.", "Done."] if name == "qwen3" else ["", "", ""]
    )
    assert "<|" not in "".join(action.text for action in actions)


@pytest.mark.parametrize("name", CASES)
def test_what_was_sampled_is_never_rendered_or_encoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns that a tokenizer would encode in fewer tokens come out as they went in, and no call is told of them."""
    case = CASES[name]
    own = tokenizer(name)
    secret = "4738zq"
    turns = [[*own(secret[:1]).input_ids, *ids(name, secret[1:] + turn)] for turn in case.turns]
    if name != "builtin":
        assert turns[0] != ids(name, secret + case.turns[0])  # "47" would be one token
    opened = chat_format(name)
    told: list[str] = []
    render, encode = PreTrainedTokenizerFast.apply_chat_template, PreTrainedTokenizerFast.__call__

    def rendered(self: Any, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        told.append(str(conversation))
        return render(self, conversation, *args, **kwargs)

    def encoded(self: Any, text: Any, *args: Any, **kwargs: Any) -> Any:
        told.append(str(text))
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", rendered)
    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", encoded)
    monkeypatch.setattr(type(opened.encoder), "plain", lambda self, text: encoded_plain(told, self, text))
    result = Sequenced(opened, opened.first(FIRST, None)[1])
    for turn in turns[:2]:
        result.turn(turn)
        opened.read(turn)
        result.answer(ONE)
    at = len(result.prompt)
    assert result.ids[at : at + len(turns[0])] == turns[0]
    assert len(told) == 6  # the prompt and two answers are rendered and encoded, each once
    assert not [text for text in told if secret in text or "It is" in text or "Now twice" in text]


def encoded_plain(told: list[str], self: Any, text: str) -> list[int]:
    told.append(text)
    return self._plain.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", CASES)
def test_what_a_tool_answers_is_no_special_token(name: str) -> None:
    """A tool that answers the end of a turn and a call gets the bytes that spell them."""
    own, opened = tokenizer(name), chat_format(name)
    words = [token.content for token in own.added_tokens_decoder.values()]
    text = "a" + "b".join(words) + "c"
    turn = ids(name, CASES[name].turns[0])
    prompt = opened.first(FIRST, None)[1]
    plain = follow(opened, prompt, turn, ONE).suffix
    spelled = follow(opened, prompt, turn, [{**ONE[0], "content": text}]).suffix
    markers = set(own.added_tokens_decoder)
    assert [n for n in spelled if n in markers] == [n for n in plain if n in markers]
    assert own.decode(spelled) == own.decode(plain).replace("85", text)


def test_a_reset_observation_goes_behind_the_last_user_message() -> None:
    opened, own = chat_format("qwen2_5"), tokenizer("qwen2_5")
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    text, prompt, told = opened.first(messages, " O<|im_end|>")
    assert text.endswith("<|im_start|>user\nQ O<|im_end|><|im_end|>\n<|im_start|>assistant\n")
    assert prompt.count(ids("qwen2_5", "<|im_end|>")[0]) == 2  # the system message's and the user's
    assert own.decode(prompt) == text
    assert messages[-1]["content"] == "Q"
    assert told == [messages[0], {"role": "user", "content": "Q O<|im_end|>"}]
    assert opened.first(messages, None)[1] == own.apply_chat_template(
        messages, tools=[ADD, SAY], add_generation_prompt=True, return_dict=False
    )


def test_the_date_in_a_prompt_is_the_configs() -> None:
    """A prompt that reset adds something to is rendered again, and must not be another one on another day."""
    own = build(FAMILIES["qwen2_5"], f"{{{{- strftime_now('%d %b %Y') }}}}{tokenizer('qwen2_5').chat_template}")
    for data, day in ((DataSection(), "26 Jul 2024"), (DataSection(date="2031-02-03"), "03 Feb 2031")):
        opened = ChatFormat(own, (ADD,), "auto", template_switches(data, own))
        assert opened.first(FIRST, " O")[0].startswith(day)
        assert PromptRenderer(data, own).render({"question": "47+38="}, "").text.startswith(day)


def test_the_record_has_a_reset_observation_where_the_tokens_have_it() -> None:
    """The data may bring a conversation that goes on behind the user's last message."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 4, "b": 7}}}
    said: list[dict[str, Any]] = [{"role": "assistant", "content": "", "tool_calls": [call]}, ONE[0]]
    text, _, told = chat_format("qwen2_5").first([{"role": "user", "content": "Q"}, *said], " O")
    assert "<|im_start|>user\nQ O<|im_end|>" in text
    assert told == [{"role": "user", "content": "Q O"}, *said]


def test_gemma_converses_with_user_messages() -> None:
    """A step environment without tools: guesses, and what is said to them."""
    opened = chat_format("gemma2", tools=())
    prompt = opened.first([{"role": "user", "content": "Guess."}], " 1 to 9")[1]
    assert prompt == ids("gemma2", "<bos><start_of_turn>user\nGuess. 1 to 9<end_of_turn>\n<start_of_turn>model\n")
    played = Sequenced(opened, prompt)
    turns = [ids("gemma2", f"{guess}<end_of_turn>") for guess in ("5", "7", "6")]
    for turn, answer in zip(turns[:2], ("low", "high"), strict=True):
        played.turn(turn)
        played.answer([{"role": "user", "content": answer}])
    played.turn(turns[2])
    said = [
        ids("gemma2", f"\n<start_of_turn>user\n{each}<end_of_turn>\n<start_of_turn>model\n") for each in ("low", "high")
    ]
    assert played.ids == [*prompt, *turns[0], *said[0], *turns[1], *said[1], *turns[2]]
    assert opened.read(turns[0]).content == "5"
    assert opened.read(ids("gemma2", "[add(a=1)]<end_of_turn>")).calls == ()


def test_gemma_3s_system_message_opens_the_users_first_turn() -> None:
    opened = chat_format("gemma3", tools=())
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Guess."}]
    prompt = opened.first(messages, " 1 to 9")[1]
    first = "<bos><start_of_turn>user\nBe brief.\n\nGuess. 1 to 9<end_of_turn>\n<start_of_turn>model\n"
    assert prompt == ids("gemma3", first)
    assert opened.end_id == tokenizer("gemma3").convert_tokens_to_ids("<end_of_turn>")
    played = Sequenced(opened, prompt)
    played.turn(ids("gemma3", "5<end_of_turn>"))
    played.answer([{"role": "user", "content": "low"}])
    said = "5<end_of_turn>\n<start_of_turn>user\nlow<end_of_turn>\n<start_of_turn>model\n"
    assert played.ids == [*prompt, *ids("gemma3", said)]


@pytest.mark.parametrize(
    ("name", "empty"),
    [
        ("qwen3", "\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"),
        ("gemma2", "\n<start_of_turn>user\n<end_of_turn>\n<start_of_turn>model\n"),
        ("builtin", "<|im_start|>user<|im_start|>assistant"),
    ],
)
def test_an_empty_answer_is_an_empty_message(name: str, empty: str) -> None:
    opened = chat_format(name, tools=())
    ids_T = [*ids(name, "x"), opened.end_id]
    following = opened.follow(ids_T, 0, [True] * len(ids_T), [{"role": "user", "content": ""}])
    assert list(following.suffix) == ids(name, empty)


@pytest.mark.parametrize(("name", "last"), [("qwen2_5", "<|endoftext|>"), ("llama3", "x"), ("qwen3", "5")])
def test_nothing_follows_a_turn_that_was_cut(name: str, last: str) -> None:
    opened = chat_format(name)
    cut = [1, 2, *ids(name, last)]
    assert not opened.ends(cut)
    with pytest.raises(ValueError, match="nothing follows a turn that was cut"):
        opened.follow(cut, 1, [False, *[True] * (len(cut) - 1)], ONE)


def test_llama_may_end_a_call_with_its_own_token() -> None:
    opened = chat_format("llama3")
    turn = ids("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}<|eom_id|>')
    assert opened.ends(turn)
    assert opened.read(turn).calls == (ToolCall("add", {"a": 1, "b": 2}),)
    following = follow(opened, opened.first(FIRST, None)[1], turn, ONE)
    assert list(following.suffix) == ids("llama3", CASES["llama3"].between[0])
