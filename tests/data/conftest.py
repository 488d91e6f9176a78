"""A byte-level tokenizer (one token per byte, no merges) and a chat template that is easy to write out by hand."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
WriteJsonl = Callable[[Sequence[Mapping[str, Any]]], str]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0-255 are bytes in the order of ByteLevel's alphabet; 256 <pad>, 257 <s>, 258 </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "<pad>", "<s>", "</s>"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    result = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", additional_special_tokens=["<s>"]
    )
    result.chat_template = CHAT_TEMPLATE
    return result


@pytest.fixture
def write_jsonl(tmp_path: Path) -> WriteJsonl:
    """Write records to a .jsonl file of the test's own; returns its path."""

    def write(records: Sequence[Mapping[str, Any]]) -> str:
        path = tmp_path / f"data{len(list(tmp_path.iterdir()))}.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in records))
        return str(path)

    return write
