"""Tokenizers of the model families, small enough for a test: bytes, a few merges, and the family's own added tokens.

The vocabularies of the families are not needed: what is asserted is which tokens are where, and text that is no marker
is told apart by its bytes. The merges make "47" and two newlines one token each, so that encoding again what was
sampled otherwise would show.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

from tpu_grpo.environments.chat_format import ChatFormat, Following
from tpu_grpo.models.tokenizers import build_tool_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
MERGES = [("Ċ", "Ċ"), ("4", "7"), ("3", "8"), ("t", "h"), ("th", "i")]
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA = (
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    *("<|python_tag|>", "<|finetune_right_pad_id|>"),
)
GEMMA = ("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")


@dataclass(frozen=True)
class Family:
    """A Family says which tokens are added to the bytes: special ones, and tags that are not special."""

    special: tuple[str, ...]
    tags: tuple[str, ...]
    bos: str | None
    eos: str
    pad: str


FAMILIES: Mapping[str, Family] = {
    "qwen2_5": Family(QWEN, QWEN_TAGS[:2], None, "<|im_end|>", "<|endoftext|>"),
    "qwen3": Family(QWEN, QWEN_TAGS, None, "<|im_end|>", "<|endoftext|>"),
    "qwen3_coder": Family(QWEN, QWEN_TAGS, None, "<|im_end|>", "<|endoftext|>"),
    "llama3": Family(LLAMA, (), "<|begin_of_text|>", "<|eot_id|>", "<|finetune_right_pad_id|>"),
    "llama_pythonic": Family(LLAMA, (), "<|begin_of_text|>", "<|eot_id|>", "<|finetune_right_pad_id|>"),
    "gemma2": Family(GEMMA, (), "<bos>", "<eos>", "<pad>"),
    "gemma3": Family(GEMMA, (), "<bos>", "<eos>", "<pad>"),
}


def tool(name: str, **types: str) -> dict[str, Any]:
    """Return the schema of a tool whose parameters have these types."""
    properties = {parameter: {"type": kind} for parameter, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "-", "parameters": parameters}}


ADD = tool("add", a="integer", b="integer")
SAY = tool("say", text="string")


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a family's tokenizer with its template; "builtin" is the project's own."""
    if name == "builtin":
        return build_tool_tokenizer()
    return build(FAMILIES[name], (TEMPLATES / f"{name}.jinja").read_text())


def build(family: Family, chat_template: str | None) -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer with a family's added tokens."""
    letters = bytes_to_unicode()
    vocabulary = {letters[byte]: byte for byte in range(256)}
    for left, right in MERGES:
        vocabulary[left + right] = len(vocabulary)
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(family.special))
    core.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in family.tags])
    result = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=family.bos,
        eos_token=family.eos,
        pad_token=family.pad,
        additional_special_tokens=list(family.special),
        clean_up_tokenization_spaces=False,
    )
    result.chat_template = chat_template
    return result


def chat_format(name: str, tools: Sequence[Mapping[str, Any]] = (ADD, SAY), **switches: Any) -> ChatFormat:
    """Open a family's chat format."""
    return ChatFormat(tokenizer(name), tools, "auto", switches)


def ids(name: str, text: str) -> list[int]:
    """Return the ids of a text in which markers are markers."""
    return tokenizer(name)(text, add_special_tokens=False).input_ids


def follow(opened: ChatFormat, prompt: list[int], turn: list[int], answers: Any, first: int | None = None) -> Following:
    """Return what follows the policy's turn behind a prompt; ``first`` of its tokens, or all, are the first prompt."""
    sampled = [False] * len(prompt) + [True] * len(turn)
    return opened.follow([*prompt, *turn], len(prompt) if first is None else first, sampled, answers)
