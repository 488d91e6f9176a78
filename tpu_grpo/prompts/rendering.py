"""From a record of the data to the prompt the model sees.

    {"question": "47+38="}  --prompt_template-->  "47+38="  --chat template-->  "<|im_start|>user\\n47+38=..."  -->  ids

With data.chat_template the text is written by the tokenizer's template, which places the special tokens itself;
without it the user's message is the text and the tokenizer adds its own (a BOS, where it has one).
"""

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpu_grpo.config import DataSection
from tpu_grpo.errors import ConfigError, DataError
from tpu_grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Record = Mapping[str, Any]


@dataclass(frozen=True)
class RenderedPrompts:
    """Prompts that fit, in the order of their records, and how many were dropped because they did not."""

    prompts: tuple[Prompt, ...]
    dropped: int


class PromptRenderer:
    """Renders records by data.prompt_template, data.system_prompt and data.chat_template.

    Raises:
        ConfigError: for a template that is malformed, or settings this tokenizer cannot follow.
    """

    def __init__(self, data: DataSection, tokenizer: "PreTrainedTokenizerFast"):
        self._data = data
        self._tokenizer = tokenizer
        self._fields = _template_fields(data.prompt_template)
        if data.chat_template and not tokenizer.chat_template:
            raise ConfigError(
                "data.chat_template=true needs a tokenizer with a chat template, this one has none; set "
                "data.chat_template=false, or use the instruction-tuned model's tokenizer"
            )
        if data.system_prompt and not data.chat_template:
            raise ConfigError(
                f"data.system_prompt needs data.chat_template=true, got {data.system_prompt!r} with false; write it "
                "into data.prompt_template"
            )

    def render(self, record: Record, where: str) -> Prompt:
        """The record's prompt; ``where`` names the record in errors.

        Raises:
            ConfigError: for a template field that is not a column, or a format that does not suit its value.
            DataError: for a null field, an empty prompt, or one that holds the tokenizer's pad token.
        """
        message = self._message(record, where)
        text = self._chat(message) if self._data.chat_template else message
        token_ids = self._tokenizer.encode(text, add_special_tokens=not self._data.chat_template)
        if not message.strip() or not token_ids:
            raise DataError(f"a prompt must not be empty, got {message!r} from {where}; remove or fill the record")
        pad = self._tokenizer.pad_token_id
        if pad is not None and pad in token_ids:
            raise DataError(
                f"a prompt must not hold the pad token, got {self._tokenizer.pad_token!r} (id {pad}) in the prompt of "
                f"{where}; padding is told from text by that id. Remove it from the record or the template, or give "
                "the tokenizer a pad token of its own"
            )
        return Prompt(text=text, token_ids=tuple(token_ids), columns=record)

    def _message(self, record: Record, where: str) -> str:
        for name in self._fields:
            if name not in record:
                raise ConfigError(
                    f"data.prompt_template uses the column {name!r}, which {where} lacks; available: "
                    f"{', '.join(record)}"
                )
            if record[name] is None:
                raise DataError(f"the column {name!r} of data.prompt_template must have a value, got null in {where}")
        try:
            return self._data.prompt_template.format_map(record)
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"data.prompt_template {self._data.prompt_template!r} must suit the columns, on {where} it fails with "
                f"{type(error).__name__}: {error}"
            ) from error

    def _chat(self, message: str) -> str:
        from jinja2 import TemplateError  # what chat templates are written in; transformers imports it lazily too

        messages = [{"role": "user", "content": message}]
        if self._data.system_prompt:
            messages.insert(0, {"role": "system", "content": self._data.system_prompt})
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ConfigError(
                f"the tokenizer's chat template must accept the roles {[m['role'] for m in messages]}, it says: "
                f"{error}; empty data.system_prompt or set data.chat_template=false"
            ) from error
        assert isinstance(text, str)  # tokenize=False
        return text


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


def _template_fields(template: str) -> tuple[str, ...]:
    """The columns a template uses: ``"{a} {b.c} {d[0]}"`` -> a, b, d."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise ConfigError(
            f"data.prompt_template must be a Python format string, got {template!r} ({error}); write literal braces "
            "as {{ and }}"
        ) from error
    names = [re.split(r"[.\[]", field, maxsplit=1)[0] for field in fields]
    if any(not name or name.isdigit() for name in names):
        raise ConfigError(
            f"data.prompt_template must name its columns, got {template!r} with a field that does not; write e.g. "
            "{question}, and literal braces as {{ and }}"
        )
    return tuple(dict.fromkeys(names))
