"""Builds the byte tokenizer of the built-in models, and loads the tokenizer of a checkpoint directory.

The byte tokenizer can encode any text: ids 0 to 255 are the values of bytes. Each role marker is one token, so that
prompts stay short:

    render([{"role": "user", "content": "47+38="}], add_generation_prompt=True)
        = "<|im_start|>user47+38=<|im_start|>assistant"          8 tokens
    and the model's answer is "85<|im_end|>"                     3 tokens

Text that happens to spell a marker is encoded as that marker, as with every chat template that renders to text. With
``split_special_tokens=True``, such text is encoded byte by byte instead.

A variant supports tools. Its chat template lists each tool in a message of its own, and writes calls as in Python:

    "<|im_start|>tooladd(a,b)<|im_start|>user47+38=<|im_start|>assistant"      17 tokens
    and the model's answer is "<|call|>add(47,38)<|end_call|><|im_end|>"       13 tokens
    then come "<|im_start|>tool85<|im_start|>assistant" and "85<|im_end|>"     4 and 3 tokens
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

from tpu_grpo.models.checkpoint import check_tokenizer_files, read_json, tokenizer_settings
from tpu_grpo.models.tasks.lessons import Task
from tpu_grpo.records.errors import CheckpointError, RequestError

CHECKED_FILES = ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json")
LONGEST_SPECIAL = 1000
MOST_GAPS = 100_000
"""The most ids that a vocabulary may leave out."""
PAD, END = "<pad>", "<|im_end|>"
IMAGE_TOKEN = "<image_soft_token>"
"""Gemma 3's token for a part of an image."""
ROLES = ("system", "user", "assistant")
REPLACEMENT = "\ufffd"
"""Stands in decoded text for bytes that are no character, or an incomplete character."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_MARKERS = tuple(f"<|im_start|>{role}" for role in ROLES)
ASSISTANT = _MARKERS[-1]
_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_RESERVED = tuple(f"<|reserved_{i}|>" for i in range(3))  # for 256 + 8 tokens, which 2, 4 or 8 devices can split
_FOR_TOOLS = ("<|im_start|>tool", "<|call|>", "<|end_call|>")  # replace the reserved tokens: still 256 + 8

# A marker opens each message. Only an assistant message gets an end token, because the model has to learn to write it.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant, got ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|im_end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)

# Arguments are written by position as long as they follow the order of the tool's parameters, and then by name.
TOOL_CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}"
    "{{ '<|im_start|>tool' + tool.function.name + '(' + tool.function.parameters.properties | join(',') + ')' }}"
    "{% endfor %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('roles are system, user, assistant and tool, got ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + (message['content'] or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{% set f = call.function if call.function else call %}"
    "{% set known = namespace(names=[], named=false) %}"
    "{% for tool in tools or [] if tool.function.name == f.name %}"
    "{% set known.names = tool.function.parameters.properties | list %}"
    "{% endfor %}"
    "{{ '<|call|>' + f.name + '(' }}"
    "{% for name, value in f.arguments.items() %}"
    "{% set known.named = known.named or known.names[loop.index0] != name %}"
    "{{ ('' if loop.first else ',') + (name + '=' if known.named else '') + value | tojson }}"
    "{% endfor %}"
    "{{ ')<|end_call|>' }}"
    "{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ '<|im_end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)


def build_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of 264 tokens: 256 bytes, padding, the end of a turn, three role markers, three reserved.

    Decoding an encoded text gives the same text, unless it spells markers (see the module). ``<|im_end|>`` is the end
    token; padding has a token of its own.
    """
    return _byte_tokenizer((*_MARKERS, *_RESERVED), CHAT_TEMPLATE)


def build_tool_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer of `build_byte_tokenizer` with a chat template that supports tools.

    The three reserved tokens become the marker of the role tool, and the opening and closing markers of a call.
    """
    return _byte_tokenizer((*_MARKERS, *_FOR_TOOLS), TOOL_CHAT_TEMPLATE)


def builtin_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a built-in task's model, with a chat template for tools if the task has tools."""
    return build_tool_tokenizer() if task.tools else build_byte_tokenizer()


def _byte_tokenizer(markers: tuple[str, ...], chat_template: str) -> PreTrainedTokenizerFast:
    bytes_in_order = bytes_to_unicode()
    vocabulary = {bytes_in_order[byte]: byte for byte in range(256)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # The library's type stubs declare both properties without their setters.
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([PAD, END, *markers])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(markers),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def load_tokenizer(directory: Path, rows: int | None = None) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a checkpoint directory, without a network.

    A tokenizer without a padding token gets its end token, because rows are masked by their lengths. ``rows`` are the
    rows of the model's embedding, if known. Without a row, Gemma 3's token for images becomes a text like any other.

    Raises:
        CheckpointError: for a missing or broken file, a tokenizer without an end token, or tokens beyond ``rows``.
    """
    check_tokenizer_files(directory)
    for name in CHECKED_FILES:
        if (path := directory / name).is_file():
            tree = read_json(path)
            _check_special_tokens(path, tree)
            _check_ids(path, tree)
    tokenizer = _load(directory)
    _check_end(tokenizer, directory)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    vocabulary = tokenizer.get_vocab()
    if rows is not None and vocabulary.get(IMAGE_TOKEN, 0) >= rows:
        _take_out(tokenizer, IMAGE_TOKEN)
        del vocabulary[IMAGE_TOKEN]
    if tokenizer.pad_token_id != tokenizer.eos_token_id:  # no prompt may hold it, so that its row is never read
        del vocabulary[str(tokenizer.pad_token)]
    last = max(vocabulary, key=vocabulary.__getitem__)
    if rows is not None and vocabulary[last] >= rows:
        raise CheckpointError(
            f"ids in {directory / 'tokenizer.json'} must be below {rows}, the rows of the model's embedding, got "
            f"{last!r} with {vocabulary[last]} among {len(tokenizer)} tokens, which a text may hold; take out "
            "such tokens, copy the weights' own, or give these more rows (transformers' resize_token_embeddings)"
        )
    return tokenizer


def padding_notes(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Say that the end token is the padding token, if it is."""
    note = (
        f"the end token {tokenizer.eos_token!r} is also the padding token, as the tokenizer has no other; lengths mask"
    )
    return [note] if tokenizer.pad_token_id == tokenizer.eos_token_id else []


def stop_token_ids(tokenizer: PreTrainedTokenizerFast, directory: Path) -> tuple[int, ...]:
    """Return the ids that end a completion, ascending.

    They are the tokenizer's end token, the ``eos_token_id`` (one or several) of ``config.json`` and
    ``generation_config.json`` where these exist, and the padding token.

    Raises:
        CheckpointError: for a config file that is broken, or names an end token that is not an id.
    """
    found = {cast(int, tokenizer.eos_token_id), cast(int, tokenizer.pad_token_id)}
    for name in ("config.json", "generation_config.json"):
        if (path := directory / name).is_file():
            found.update(_ends_in(path))
    return tuple(sorted(found))


def decode(tokenizer: PreTrainedTokenizerFast, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
    """Return the text of tokens. Bytes that are no character become U+FFFD, and change no other character.

    A tokenizer with byte fallback (Gemma's, Llama 2's) writes rare characters as tokens of one byte. In tokenizers
    0.22.2 one stray byte turns all bytes beside it to U+FFFD, and ``DecodeStream`` raises an exception after one.
    Therefore this function decodes each run of bytes itself.
    """
    ids = [int(token_id) for token_id in token_ids]
    text = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    if REPLACEMENT not in text or not getattr((core := tokenizer.backend_tokenizer).model, "byte_fallback", False):
        return text
    special = {n for n, added in core.get_added_tokens_decoder().items() if added.special and skip_special_tokens}
    tokens = [token for n in ids if n not in special and (token := core.id_to_token(n)) is not None]
    parts: list[str] = []
    for are_bytes, run in groupby(tokens, key=lambda token: _BYTE.fullmatch(token) is not None):
        if are_bytes:
            parts.append(bytes(int(token[3:5], 16) for token in run).decode(errors="replace"))
        else:
            parts += run
    return core.decoder.decode(parts)


def check_length(tokenizer: PreTrainedTokenizerFast, text: str, tokens: int) -> None:
    """Raise RequestError for a text that surely has more than ``tokens`` tokens, without tokenizing all of it.

    A text of more than 8 characters a token is counted piece by piece until there are twice as many tokens as allowed,
    and 64 for every cut through a word or marker. So a text of few but long tokens, such as spaces, is not refused.
    """
    size, found = max(2**12, 8 * tokens), 0
    for number, begin in enumerate(range(0, len(text) if len(text) > size else 0, size), start=1):
        found += len(tokenizer.backend_tokenizer.encode(text[begin : begin + size], add_special_tokens=False).ids)
        if found > 2 * tokens + number * 64:
            raise RequestError(f"a prompt must have at most {tokens} tokens here, got far more; shorten it")


def token_bytes(tokenizer: PreTrainedTokenizerFast, token_ids: Iterable[int]) -> tuple[bytes, ...]:
    """Return the bytes of each token, which can be a part of a character; joined, they are the text in UTF-8."""
    added, is_byte_level = tokenizer.added_tokens_decoder, "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)

    def of(number: int) -> bytes:
        if number in added:
            return added[number].content.encode()
        token = tokenizer.backend_tokenizer.id_to_token(number) or ""  # a model may have more rows than there are ids
        if is_byte_level and _BYTES.keys() >= set(token):
            return bytes(_BYTES[letter] for letter in token)
        return bytes.fromhex(token[3:5]) if _BYTE_TOKEN.fullmatch(token) else token.replace("\u2581", " ").encode()

    return tuple(map(of, token_ids))


def _ends_in(path: Path) -> Iterator[int]:
    ends = read_json(path).get("eos_token_id")
    for end in ends if isinstance(ends, list) else [] if ends is None else [ends]:
        if not isinstance(end, int) or isinstance(end, bool) or end < 0:
            raise CheckpointError(
                f"eos_token_id in {path} must be a token id or a list of them, got {ends!r}; correct it"
            )
        yield end


def _check_special_tokens(path: Path, tree: Mapping[str, Any]) -> None:
    """Check that no special token is so long that transformers' regular expressions take minutes to search for it."""
    left: list[Any] = [part for name, part in tree.items() if "token" in name]
    if path.name == "added_tokens.json":
        left += tree
    while left:
        match left.pop():
            case str(text) if len(text) > LONGEST_SPECIAL:
                raise CheckpointError(
                    f"a special token must have at most {LONGEST_SPECIAL} characters, got {len(text)} in {path}, "
                    f"beginning with {text[:40]!r}; copy the file again"
                )
            case dict() as parts:
                left += parts.values()
            case list() as parts:
                left += parts
            case _:
                pass


def _check_ids(path: Path, tree: Mapping[str, Any]) -> None:
    """Check that ids have few gaps; the library (tokenizers) prints every number that a vocabulary leaves out."""
    model = tree.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = [number for number in vocabulary.values() if isinstance(number, int)] if isinstance(vocabulary, dict) else []
    if ids and max(ids) >= (most := len(ids) + MOST_GAPS):
        raise CheckpointError(
            f"the ids of a vocabulary of {len(ids)} tokens must be below {most}, got {max(ids)} in {path}; copy the "
            "file again"
        )


def _load(directory: Path) -> PreTrainedTokenizerFast:
    settings = tokenizer_settings(directory)
    kind: Any = (
        PreTrainedTokenizerFast if settings.get("tokenizer_class") == "PreTrainedTokenizerFast" else AutoTokenizer
    )
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "use_fast": True}
    if "additional_special_tokens" in settings:
        options |= {"extra_special_tokens": {}, "additional_special_tokens": settings["additional_special_tokens"]}
    warns = logging.getLogger("transformers.tokenization_utils_base")
    level = warns.level
    if kind is PreTrainedTokenizerFast:
        warns.setLevel(logging.ERROR)  # it would warn that the settings name another class
    try:
        loaded = kind.from_pretrained(str(directory), **options)
    except MemoryError:
        raise
    except Exception as error:  # the libraries raise many types, even a bare Exception
        raise CheckpointError(
            f"the tokenizer in {directory} cannot be loaded ({error}); copy its files again"
        ) from error
    finally:
        warns.setLevel(level)
    if not isinstance(loaded, PreTrainedTokenizerFast):
        raise CheckpointError(
            f"the tokenizer in {directory} must be a fast one, got {type(loaded).__name__}; convert it with "
            "transformers and save it beside the weights"
        )
    return loaded


def _take_out(tokenizer: PreTrainedTokenizerFast, token: str) -> None:
    """Let an added token be a text like any other."""
    tree = json.loads(tokenizer.backend_tokenizer.to_str())
    tree["added_tokens"] = [each for each in tree["added_tokens"] if each["content"] != token]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(tree))


def _check_end(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    end = tokenizer.eos_token
    if end is None or not isinstance(tokenizer.eos_token_id, int):
        raise CheckpointError(
            f"a tokenizer must have an end token, got eos_token={end!r}; set eos_token in "
            f"{directory / 'tokenizer_config.json'} to the token that ends the model's turns"
        )
