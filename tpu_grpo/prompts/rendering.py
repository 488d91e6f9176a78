"""A record of the data becomes the prompt that the model sees.

    {"question": "47+38="}  --prompt_template-->  "47+38="  --chat template-->  "<|im_start|>user\\n47+38=..."  -->  ids

With data.chat_template the text is written by the tokenizer's template, which places the special tokens itself;
without it the user's message is the text and the tokenizer adds its own (a BOS, where it has one).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpu_grpo.config import DataSection
from tpu_grpo.errors import ConfigError, DataError
from tpu_grpo.prompts.messages import Conversation, Message, Record
from tpu_grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

THINKING = ("enable_thinking", "thinking")
"""Chat templates name their thinking switch so: most the first way, DeepSeek's and Granite's the second."""


@dataclass(frozen=True)
class RenderedPrompts:
    """RenderedPrompts holds the prompts that fit, in the order of their records, and counts those too long."""

    prompts: tuple[Prompt, ...]
    dropped: int


class PromptRenderer:
    """A PromptRenderer renders records by the data section: templates, system prompt, examples, chat template.

    Raises:
        ConfigError: for a template that is malformed, or settings this tokenizer cannot follow.
    """

    def __init__(self, data: DataSection, tokenizer: "PreTrainedTokenizerFast"):
        self._data = data
        self._tokenizer = tokenizer
        self._conversation = Conversation(data)
        if data.chat_template and not tokenizer.chat_template:
            raise ConfigError(
                "data.chat_template=true needs a tokenizer with a chat template, this one has none; set "
                "data.chat_template=false, or use the instruction-tuned model's tokenizer"
            )
        for name in ("system_prompt", "messages"):
            if (value := getattr(data, name)) and not data.chat_template:
                raise ConfigError(
                    f"data.{name} needs data.chat_template=true, got {value!r} with false; write it into "
                    "data.prompt_template"
                )
        self._switches = _switches(data, tokenizer)

    def render(self, record: Record, where: str) -> Prompt:
        """Return the record's prompt; ``where`` names the record in errors.

        Raises:
            ConfigError: for a template field that is not a column, or a format that does not suit its value.
            DataError: for a null field, an empty prompt, or one that holds the tokenizer's pad token.
        """
        messages = self._conversation.messages(record, where)
        text = self._chat(messages) if self._data.chat_template else plain(messages)
        token_ids = self._tokenizer.encode(text, add_special_tokens=not self._data.chat_template)
        if not (asked := messages[-1]["content"]).strip() or not token_ids:
            raise DataError(f"a prompt must not be empty, got {asked!r} from {where}; remove or fill the record")
        pad = self._tokenizer.pad_token_id
        if pad is not None and pad in token_ids:
            raise DataError(
                f"a prompt must not hold the pad token, got {self._tokenizer.pad_token!r} (id {pad}) in the prompt of "
                f"{where}; padding is told from text by that id. Remove it from the record or the template, or give "
                "the tokenizer a pad token of its own"
            )
        before = self._conversation.before
        return Prompt(text, tuple(token_ids), columns=record, messages=messages, examples=before)

    def _chat(self, messages: list[Message]) -> str:
        from jinja2 import TemplateError  # what chat templates are written in; transformers imports it lazily too

        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._switches
            )
        except TemplateError as error:
            raise ConfigError(
                f"the tokenizer's chat template must accept the roles {[m['role'] for m in messages]}, it says: "
                f"{error}; empty data.system_prompt or set data.chat_template=false"
            ) from error
        assert isinstance(text, str)  # tokenize=False
        return text


def plain(messages: Sequence[Message]) -> str:
    """Join a conversation for a model without a chat template: an answer follows its question, then comes a blank line.

    The example "Q: 1+1\\nA:" with " 2" and the question "Q: 2+3\\nA:" make  Q: 1+1 / A: 2 / (blank) / Q: 2+3 / A:
    """
    return "".join(m["content"] + ("\n\n" if m["role"] == "assistant" else "") for m in messages)


def _switches(data: DataSection, tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """Return what the chat template is told beside the messages."""
    if data.thinking is None:
        return {}
    template = str(tokenizer.chat_template) if data.chat_template else ""
    code = " ".join(re.findall(r"\{[{%](.*?)[%}]\}", template, re.DOTALL))
    known = [name for name in THINKING if re.search(rf"(?<![\w.'\"<]){name}(?![\w'\">])", code)]
    if not known:
        raise ConfigError(
            f"data.thinking={str(data.thinking).lower()} needs a chat template with a switch for it "
            f"({' or '.join(THINKING)}), this tokenizer's has none; leave it unset"
        )
    return {known[0]: data.thinking}


def render_records(
    renderer: PromptRenderer, records: Sequence[Record], data: DataSection, source: str, *, limit: int | None = None
) -> RenderedPrompts:
    """Render the records, or the first ``limit`` that fit; ``source`` names the data in errors.

    Raises:
        DataError: for a prompt longer than data.max_prompt_tokens under data.too_long=error, or when none fits.
    """
    fitting: list[Prompt] = []
    too_long: dict[int, int] = {}  # tokens by index of the record
    for index, record in enumerate(records):
        if limit is not None and len(fitting) == limit:
            break
        prompt = renderer.render(record, f"record {index} of {source} (from 0)")
        if len(prompt.token_ids) > data.max_prompt_tokens:
            too_long[index] = len(prompt.token_ids)
        else:
            fitting.append(prompt)
    if too_long and (data.too_long == "error" or not fitting):
        raise DataError(_too_long(too_long, len(fitting), data, source))
    return RenderedPrompts(tuple(fitting), len(too_long))


def _too_long(too_long: Mapping[int, int], fitting: int, data: DataSection, source: str) -> str:
    first, longest = next(iter(too_long)), max(too_long.values())
    remedy = f"raise data.max_prompt_tokens to {longest}"
    if data.too_long == "error":
        remedy += " or set data.too_long=drop"
    return (
        f"prompts must have at most data.max_prompt_tokens={data.max_prompt_tokens} tokens, got {too_long[first]} in "
        f"record {first} of {source} (from 0; {len(too_long)} of {len(too_long) + fitting} are too long, the longest "
        f"{longest}); {remedy}"
    )
