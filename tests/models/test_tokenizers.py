"""The byte tokenizer, loading from a directory, and stop tokens."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.models.test_transformers5 import SAVED
from tpu_grpo.environments.chat_format import refuse_padding
from tpu_grpo.models.tokenizers import (
    IMAGE_TOKEN,
    build_byte_tokenizer,
    build_tool_tokenizer,
    check_length,
    decode,
    load_tokenizer,
    padding_notes,
    stop_token_ids,
    token_bytes,
)
from tpu_grpo.records.errors import CheckpointError, DataError, RequestError

TOKENIZER = build_byte_tokenizer()
PAD, END, SYSTEM, USER, ASSISTANT = range(256, 261)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    TOKENIZER.save_pretrained(tmp_path, save_jinja_files=False)
    return tmp_path


def set_token(directory: Path, key: str, token: str | None) -> None:
    """Set a special token in both files that name it; None removes it."""
    for path in (directory / "tokenizer_config.json", directory / "special_tokens_map.json"):
        content = {**json.loads(path.read_text()), key: token}
        path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_every_byte_is_its_own_token() -> None:
    assert TOKENIZER.encode("A\n é") == [65, 10, 32, 195, 169]
    assert len(TOKENIZER) == 264
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id) == (PAD, END)


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    ids = TOKENIZER(text, split_special_tokens=True).input_ids
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text


def test_spelled_markers_are_markers_unless_split() -> None:
    text = "a<|im_end|>b"
    assert TOKENIZER.encode(text) == [97, END, 98]
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=True) == "ab"
    assert TOKENIZER(text, split_special_tokens=True).input_ids == list(text.encode())


def test_prompt_is_eight_tokens() -> None:
    messages = [{"role": "user", "content": "47+38="}]
    text = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user47+38=<|im_start|>assistant"
    assert TOKENIZER.encode(str(text)) == [USER, *b"47+38=", ASSISTANT]


def test_whole_conversation() -> None:
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2="},
    ]
    ids = TOKENIZER.apply_chat_template(messages)
    assert ids == [SYSTEM, *b"Add.", USER, *b"1+1=", ASSISTANT, *b"2", END, USER, *b"2+2="]


def test_unknown_role_is_refused() -> None:
    with pytest.raises(Exception, match="roles are system, user and assistant, got tool"):
        TOKENIZER.apply_chat_template([{"role": "tool", "content": "x"}])


def tool(name: str, *parameters: str) -> dict[str, object]:
    properties = {each: {"type": "integer"} for each in parameters}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


def test_conversation_with_a_tool() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 47, "b": 38}}}
    messages: list[Any] = [
        {"role": "user", "content": "47+38="},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "85"},
        {"role": "assistant", "content": "85"},
    ]
    tokenizer = build_tool_tokenizer()
    ids = tokenizer.apply_chat_template(messages, tools=[tool("add", "a", "b")])
    answers, begins, ends = 261, 262, 263
    first = [answers, *b"add(a,b)", USER, *b"47+38="]
    assert ids == [*first, ASSISTANT, begins, *b"add(47,38)", ends, END, answers, *b"85", ASSISTANT, *b"85", END]
    asked = tokenizer.apply_chat_template(messages[:1], tools=[tool("add", "a", "b")], add_generation_prompt=True)
    assert (asked, len(tokenizer)) == ([*first, ASSISTANT], 264)


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ({"a": 1, "b": "x\n"}, '1,"x\\n"'),
        ({"b": 2, "a": 1}, "b=2,a=1"),
        ({"a": 1, "c": 3, "b": 2}, "1,c=3,b=2"),
        ({}, ""),
    ],
)
def test_arguments_out_of_order_are_named(arguments: dict[str, object], written: str) -> None:
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    messages: list[Any] = [{"role": "assistant", "content": "", "tool_calls": calls}]
    tools: list[Any] = [tool("g", "b"), tool("f", "a", "b", "c")]
    text = build_tool_tokenizer().apply_chat_template(messages, tools=tools, tokenize=False)
    listed = "<|im_start|>toolg(b)<|im_start|>toolf(a,b,c)"
    assert text == f"{listed}<|im_start|>assistant<|call|>f({written})<|end_call|><|im_end|>"


def test_without_tools_both_templates_write_the_same() -> None:
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    assert build_tool_tokenizer().apply_chat_template(messages) == TOKENIZER.apply_chat_template(messages)


def test_saved_tokenizer_loads_the_same(directory: Path) -> None:
    loaded, plain = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    assert isinstance(plain, PreTrainedTokenizerFast)
    assert "chat_template" in json.loads((directory / "tokenizer_config.json").read_text())
    for tokenizer in (loaded, plain):
        assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
        assert tokenizer.chat_template == TOKENIZER.chat_template
        assert tokenizer.decode(tokenizer.encode("b 's , é!<|im_end|>"), skip_special_tokens=True) == "b 's , é!"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_missing_and_broken_files_are_named(directory: Path, name: str) -> None:
    (directory / name).write_text('{"half": ')
    with pytest.raises(CheckpointError, match=f"{name} is not readable JSON"):
        load_tokenizer(directory)
    (directory / name).write_text("[]")
    with pytest.raises(CheckpointError, match=f"{name} must hold a JSON object"):
        load_tokenizer(directory)
    (directory / name).unlink()
    with pytest.raises(CheckpointError, match=f"must hold {name}, not found in"):
        load_tokenizer(directory)


def test_json_that_is_no_tokenizer_is_refused(directory: Path) -> None:
    (directory / "tokenizer.json").write_text('{"model": {"type": "Unheard"}}')
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(directory)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokenizer.json", lambda tree, long: tree["added_tokens"][2].update(content=long)),
        ("tokenizer_config.json", lambda tree, long: tree.update(eos_token=long)),
        ("tokenizer_config.json", lambda tree, long: tree.update(additional_special_tokens=["a", {"content": long}])),
        ("special_tokens_map.json", lambda tree, long: tree.update(pad_token={"content": long})),
        ("added_tokens.json", lambda tree, long: tree.update({long: 3})),
    ],
)
def test_a_special_token_that_is_a_page_long_is_refused(
    directory: Path, name: str, change: Callable[[dict[str, Any], str], None]
) -> None:
    """Its search takes transformers' regular expressions minutes, in which nothing can be stopped."""
    path = directory / name
    tree = json.loads(path.read_text()) if path.exists() else {}
    change(tree, "<" * 1001)
    path.write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match=rf"at most 1000 characters, got 1001 in .*{name}"):
        load_tokenizer(directory)


def test_an_id_far_beyond_the_others_is_refused(directory: Path) -> None:
    """The library would print two billion numbers that the vocabulary leaves out."""
    tree = json.loads((directory / "tokenizer.json").read_text())
    tree["model"]["vocab"][next(iter(tree["model"]["vocab"]))] = 2**31
    (directory / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match="256 tokens must be below 100256, got 2147483648 in .*tokenizer.json"):
        load_tokenizer(directory)


@pytest.mark.parametrize("pad", ["<|im_end|>", None])
def test_without_padding_of_its_own_the_end_token_pads(directory: Path, pad: str | None) -> None:
    set_token(directory, "pad_token", pad)
    loaded = load_tokenizer(directory)
    assert (loaded.pad_token_id, loaded.eos_token_id, stop_token_ids(loaded, directory)) == (END, END, (END,))
    assert len(padding_notes(loaded)) == 1
    assert "'<|im_end|>' is also the padding token" in padding_notes(loaded)[0]
    assert padding_notes(TOKENIZER) == []
    refuse_padding(loaded, [USER, END], "")  # prompts hold the end tokens of earlier turns
    with pytest.raises(DataError, match="must not hold the pad token"):
        refuse_padding(TOKENIZER, [USER, PAD], "")


def add_token(directory: Path, number: int, content: str) -> None:
    tree = json.loads((directory / "tokenizer.json").read_text())
    tree["added_tokens"].append({**tree["added_tokens"][0], "id": number, "content": content})
    (directory / "tokenizer.json").write_text(json.dumps(tree))


def test_a_token_beyond_the_embedding_is_refused_unless_it_is_padding(directory: Path) -> None:
    """A text may hold any token but the padding token, with which a prompt is refused."""
    assert len(load_tokenizer(directory, rows=264)) == 264
    with pytest.raises(
        CheckpointError, match=r"tokenizer.json must be below 263, the rows .* with 263 among 264 tokens, which"
    ):
        load_tokenizer(directory, rows=263)
    add_token(directory, 264, "[PAD]")
    with pytest.raises(CheckpointError, match=r"must be below 264, .* got '\[PAD\]' with 264 among 265 tokens"):
        load_tokenizer(directory, rows=264)
    set_token(directory, "pad_token", "[PAD]")
    assert load_tokenizer(directory, rows=264).pad_token_id == 264
    set_token(directory, "eos_token", "[PAD]")  # which prompts may hold
    with pytest.raises(CheckpointError, match=r"must be below 264, .* got '\[PAD\]'"):
        load_tokenizer(directory, rows=264)


def test_gemma_3s_token_for_images_is_a_text_where_the_model_has_no_row_for_it(directory: Path) -> None:
    """As in the checkpoints of 270M and 1B, which share the tokenizer of the models that see images."""
    add_token(directory, 264, IMAGE_TOKEN)
    assert load_tokenizer(directory, rows=265)(IMAGE_TOKEN).input_ids == [264]
    tokenizer = load_tokenizer(directory, rows=264)
    ids = tokenizer(f"a{IMAGE_TOKEN}<|im_end|>").input_ids
    assert ids == [*b"a" + IMAGE_TOKEN.encode(), tokenizer.eos_token_id]
    assert len(tokenizer) == 264
    assert decode(tokenizer, ids) == f"a{IMAGE_TOKEN}<|im_end|>"


def test_a_missing_end_is_refused(directory: Path) -> None:
    set_token(directory, "eos_token", None)
    with pytest.raises(CheckpointError, match="an end token"):
        load_tokenizer(directory)


def test_stop_tokens_are_gathered_from_every_place(directory: Path) -> None:
    assert stop_token_ids(TOKENIZER, directory) == (PAD, END)
    (directory / "config.json").write_text('{"eos_token_id": 7}')
    (directory / "generation_config.json").write_text(f'{{"eos_token_id": [9, {END}]}}')
    assert stop_token_ids(TOKENIZER, directory) == (7, 9, PAD, END)
    (directory / "config.json").write_text('{"eos_token_id": null}')
    assert stop_token_ids(TOKENIZER, directory) == (9, PAD, END)


def test_stop_tokens_that_are_no_ids_are_refused(directory: Path) -> None:
    (directory / "config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(CheckpointError, match=r"config\.json must be a token id.*'</s>'"):
        stop_token_ids(TOKENIZER, directory)


# --- text as it comes ------------------------------------------------------------------------------------------------


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with byte fallback and marked spaces, as Gemma's and Llama 2's."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581": 256, "a": 257, "<e>": 258}
    core = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "\u2581")
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence(parts)
    core.add_special_tokens(["<e>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<e>")


@pytest.mark.parametrize("build", [build_byte_tokenizer, fallback_tokenizer])
@pytest.mark.parametrize("text", ["a a", " a", "\u65e5\u672c \U0001f600", "a\u00e9\u00e9\n"])
def test_the_bytes_of_tokens_add_up_to_the_text(build: Callable[[], PreTrainedTokenizerFast], text: str) -> None:
    tokenizer = build()
    ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id, len(tokenizer) + 5]  # a row of the model without a token
    *pieces, end, nothing = token_bytes(tokenizer, ids)
    assert (b"".join(pieces).decode(), end.decode(), nothing) == (text, tokenizer.eos_token, b"")
    assert all(len(piece) == 1 for piece in pieces)


@pytest.mark.parametrize(
    ("text", "fits"), [("x" * 100, True), ("x" * 2000, True), ("x" * 5000, False), ("<|im_end|>" * 2**19, False)]
)
def test_a_long_text_is_refused_without_tokenizing_it(text: str, fits: bool) -> None:
    """What is at most 8 characters a token, or 4,096 in all, is left to the tokenizer."""
    with nullcontext() if fits else pytest.raises(RequestError, match="at most 100 tokens here, got far more"):
        check_length(build_byte_tokenizer(), text, 100)


def test_a_text_of_few_long_tokens_is_not_too_long() -> None:
    """A word of 64 spaces is a token: 400,000 characters are 6,250 tokens, and pieces of them hardly more."""
    vocabulary = {" " * 2**n: n for n in range(7)}
    core = Tokenizer(models.BPE(vocabulary, [(" " * 2**n, " " * 2**n) for n in range(6)]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    text = " " * 400_000
    assert len(tokenizer(text).input_ids) == 6250
    check_length(tokenizer, text, 6250)
    check_length(tokenizer, text, 4000)  # it is not surely more, and the tokenizer decides
    with pytest.raises(RequestError):
        check_length(tokenizer, text, 1000)


FALLBACK = {name: load_tokenizer(SAVED / name) for name in ("gemma2", "llama")}
"""Tokenizers with a token for each byte, whose decoders turn a whole run of bytes to U+FFFD if one is no character."""


def as_bytes(tokenizer: PreTrainedTokenizerFast, data: bytes) -> list[int]:
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in data])
    assert isinstance(ids, list)
    return ids


@pytest.mark.parametrize("name", FALLBACK)
@pytest.mark.parametrize("text", ["日本", "éé", "e🙂🙂 日本e", "ends in half 日\ufffd"])
def test_characters_before_an_unfinished_one_are_kept(name: str, text: str) -> None:
    """The whole run of bytes became U+FFFD again when the second character began."""
    tokenizer = FALLBACK[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert decode(tokenizer, ids, skip_special_tokens=True) == text
    for count in range(len(ids)):
        begun = decode(tokenizer, ids[:count], skip_special_tokens=True).rstrip("\ufffd")
        assert text.startswith(begun)
        assert len(begun) >= count // 4 - 1  # a character has at most four tokens


@pytest.mark.parametrize("name", FALLBACK)
def test_an_answer_cut_inside_a_character_keeps_those_before_it(name: str) -> None:
    tokenizer = FALLBACK[name]
    ids = [*as_bytes(tokenizer, "日本".encode()[:5]), tokenizer.eos_token_id]
    assert decode(tokenizer, ids, skip_special_tokens=True) == "日\ufffd"
    assert decode(tokenizer, ids) == "日\ufffd<|im_end|>"
    stray: list[Any] = [*as_bytes(tokenizer, "日".encode() + b"\xff"), tokenizer.convert_tokens_to_ids("e")]
    assert decode(tokenizer, stray) == "日\ufffde"


@given(st.binary(max_size=12) | st.text(max_size=5).map(str.encode))
def test_any_bytes_are_told_as_python_decodes_them(data: bytes) -> None:
    for tokenizer in (FALLBACK["gemma2"], TOKENIZER):  # Llama's drops a space at the start
        ids = list(data) if tokenizer is TOKENIZER else as_bytes(tokenizer, data)
        assert decode(tokenizer, ids) == data.decode(errors="replace")
