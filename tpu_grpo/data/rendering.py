"""Renders a record of the data into the prompt that the model sees.

    {"question": "47+38="}  --prompt_template-->  "47+38="  --chat template-->  "<|im_start|>user\\n47+38=..."  -->  ids

With data.chat_template, the tokenizer's template writes the text, special tokens included. Without it, the text is the
user's message, and the tokenizer adds its special tokens (such as a BOS).

    rendered = render_records(renderer, records, "train.jsonl")
    rendered.prompts[7]                       # reads the record, fills the template, and makes the tokens
    rendered.dropped                          # the number of prompts that are too long

All prompts of a source are checked once at the start, and rendered again when they are used, so that a file of any
size takes a few bytes of memory for each record. The check renders every prompt, but tokenizes only those that may be
too long by their length in bytes.
"""

import datetime
import hashlib
import json
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from tpu_grpo.config import DataSection
from tpu_grpo.data.chat_messages import Conversation, Message, Record, Template
from tpu_grpo.data.lazy_records import reading
from tpu_grpo.records.errors import ConfigError, DataError
from tpu_grpo.records.stages import Prompt
from tpu_grpo.records.untrusted_input import bounded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

AT_ONCE = 500
"""The number of records that are rendered together."""
LARGE = 2**17
"""A prompt of more characters is not tokenized if it is surely too long."""
TEMPLATE_SECONDS = 30.0
TEMPLATE_BYTES = 2**32
Tools = Sequence[Mapping[str, Any]]
"""The JSON schemas of the tools that a prompt offers."""
ToolsOf = Callable[[Record, str], Tools]
"""Takes a record and its name for errors, and returns the tools of the environment with which the record's prompt
begins a conversation."""
CLOCK = "strftime_now"
"""The name under which transformers passes chat templates a function that formats the current time."""
THINKING = ("enable_thinking", "thinking")
"""The names of the thinking switch in chat templates: most use the first, DeepSeek's and Granite's the second."""


class PromptRenderer:
    """Renders records with the template, system prompt and chat template of the data section. Raises
    ConfigError for a malformed template, or settings that this tokenizer cannot follow."""

    def __init__(self, data: DataSection, tokenizer: "PreTrainedTokenizerFast", tools_of: ToolsOf | None = None):
        self.data = data
        self._tools_of = tools_of
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
        self.switches = template_switches(data, tokenizer)
        self._is_tried = False
        self.longest_token = max(len(token.encode("utf-8", "replace")) for token in tokenizer.get_vocab())
        """The most bytes of a text that one token stands for."""

    def render(self, record: Record, where: str) -> Prompt:
        """Return the record's prompt; ``where`` names the record in errors.

        Raises:
            ConfigError: for a template field that is not a column, or a format that does not suit its value.
            DataError: for a null field, an empty prompt, or a prompt that holds the tokenizer's pad token.
        """
        return self.prompts([record], [where])[0]

    def prompts(self, records: Sequence[Record], where: Sequence[str]) -> list[Prompt]:
        """Return the prompts of some records; raises as `render` does."""
        conversations = self.conversations(records, where)
        texts = self.texts(conversations, where, self.tools(records, where))
        parts = zip(texts, self.encoded(texts, where), records, conversations, strict=True)
        return [Prompt(text, tuple(ids), columns=record, messages=messages) for text, ids, record, messages in parts]

    def conversations(self, records: Sequence[Record], where: Sequence[str]) -> list[list[Message]]:
        """Return the messages of some records; raises as `render` does.

        Without an environment, which could add text, an empty last message raises DataError.
        """
        with self._bounded("data.prompt_template", where):
            conversations = [self._conversation.messages(*each) for each in zip(records, where, strict=True)]
        if self._tools_of is not None:
            return conversations
        for messages, place in zip(conversations, where, strict=True):
            if not (asked := messages[-1]["content"]).strip():
                raise DataError(f"a prompt must not be empty, got {asked!r} from {place}; remove or fill the record")
        return conversations

    def tools(self, records: Sequence[Record], where: Sequence[str]) -> Sequence[Tools]:
        """Return the tools that the prompts of some records offer."""
        tools_of = self._tools_of
        return [() if tools_of is None else tools_of(*each) for each in zip(records, where, strict=True)]

    def texts(
        self, conversations: list[list[Message]], where: Sequence[str], tools: Sequence[Tools] | None = None
    ) -> list[str]:
        """Render conversations; raises ConfigError if a template fails, DataError for half a surrogate pair."""
        if not self.data.chat_template:
            texts = [plain(messages) for messages in conversations]
        else:
            with self._bounded("the tokenizer's chat template", where):
                texts = self._chats(conversations, where, tools or [()] * len(conversations))
            self._is_tried = True
        for text, place in zip(texts, where, strict=True):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                half = f"{text[error.start]!a}"
                raise DataError(
                    f"a prompt must be text, got half of a surrogate pair ({half}) from {place}; remove it"
                ) from None
        return texts

    @contextmanager
    def _bounded(self, what: str, where: Sequence[str]) -> Iterator[None]:
        """Limit a template's time. Until the chat template first succeeds, also limit the memory, which is that of the
        whole process: later, other code of the process may need more."""
        try:
            with bounded(TEMPLATE_SECONDS, None if self._is_tried else TEMPLATE_BYTES):
                yield
        except (MemoryError, TimeoutError) as error:
            raise ConfigError(
                f"{what} must write prompts within {TEMPLATE_SECONDS:g} s for {AT_ONCE} of them and "
                f"{TEMPLATE_BYTES / 2**30:g} GiB, got {type(error).__name__} from {where[0]} on; correct it"
            ) from None

    def encoded(self, texts: list[str], where: Sequence[str]) -> list[list[int]]:
        """Return the token ids of prompts; raises DataError for a prompt without a token, or with the pad token."""
        core = self._tokenizer.backend_tokenizer
        core.no_truncation()  # tokenizer.json may enable both
        core.no_padding()
        encodings = core.encode_batch_fast(texts, add_special_tokens=not self.data.chat_template)
        found = [encoding.ids for encoding in encodings]
        pad = self._tokenizer.pad_token_id
        for text, token_ids, place in zip(texts, found, where, strict=True):
            if not token_ids:
                raise DataError(f"a prompt must not be empty, got {text!r} from {place}; remove or fill the record")
            if pad != self._tokenizer.eos_token_id and pad in token_ids:
                raise DataError(
                    f"a prompt must not hold the pad token, got {self._tokenizer.pad_token!r} (id {pad}) in the prompt "
                    f"of {place}; padding is told from text by that id. Remove it from the record or the template, or "
                    "give the tokenizer a pad token of its own"
                )
        return found

    def hinted(self, prompts: Sequence[Prompt], hint: Template) -> list[list[int]]:
        """Return the token ids of prompts with a hint in a system message, which comes first or ends with the hint.
        Raises as `render` does."""
        where = [f"the prompt {prompt.text!r:.60}" for prompt in prompts]
        conversations = [
            self._with_hint(prompt.conversation, hint.fill(prompt.columns, place))
            for prompt, place in zip(prompts, where, strict=True)
        ]
        texts = self.texts(conversations, where, self.tools([prompt.columns for prompt in prompts], where))
        return self.encoded(texts, where)

    def _with_hint(self, messages: Sequence[Mapping[str, Any]], hint: str) -> list[Message]:
        first, others = messages[0], [dict(message) for message in messages]
        if not self.data.chat_template:
            return [{"role": "system", "content": f"{hint}\n\n"}, *others]
        if first["role"] != "system":
            return [{"role": "system", "content": hint}, *others]
        return [{**first, "content": f"{first['content']}\n\n{hint}"}, *others[1:]]

    def most_tokens(self, text: str) -> int | None:
        """Return an upper bound of a text's number of tokens; None if the caller must tokenize the text.

        The bound counts bytes, because a token of a byte-level tokenizer stands for at least one byte. A text with the
        pad token gets None, so that the caller tokenizes it with `encoded`, which refuses it.
        """
        pad = self._tokenizer.pad_token
        if not self._byte_level or (pad not in (None, self._tokenizer.eos_token) and str(pad) in text):
            return None
        if not text.isascii() and self._tokenizer.backend_tokenizer.normalizer is not None:
            return None
        return len(text.encode("utf-8", "surrogatepass")) + self._added

    @cached_property
    def identity(self) -> str:
        """Return the SHA-256, in hex, of everything that decides how texts become tokens."""
        digest = hashlib.sha256(self._tokenizer.backend_tokenizer.to_str().encode("utf-8", "backslashreplace"))
        digest.update(json.dumps([self.data.chat_template, str(self._tokenizer.pad_token)]).encode())
        return digest.hexdigest()

    @cached_property
    def _byte_level(self) -> bool:
        core = self._tokenizer.backend_tokenizer
        return type(core.model).__name__ == "BPE" and "ByteLevel(" in str(core.pre_tokenizer)

    @cached_property
    def _added(self) -> int:
        """The number of tokens that may be added to those of the text: special tokens, and a leading space."""
        return self._tokenizer.num_special_tokens_to_add(pair=False) + 1

    def _chats(self, conversations: list[list[Message]], where: Sequence[str], tools: Sequence[Tools]) -> list[str]:
        try:
            return self._templated(conversations, tools)
        except (MemoryError, TimeoutError):
            raise
        except Exception:  # the model's own code
            for each in zip(conversations, tools, where, strict=True):  # find the one that fails
                self._try_chat(*each)
            raise

    def _try_chat(self, messages: list[Message], tools: Tools, where: str) -> None:
        try:
            self._templated([messages], [tools])
        except (MemoryError, TimeoutError):
            raise
        except Exception as error:  # the model's own code
            raise ConfigError(
                f"the tokenizer's chat template must accept the roles {[m['role'] for m in messages]} of {where}, it "
                f"says: {error}; empty data.system_prompt or set data.chat_template=false"
            ) from error

    def _templated(self, conversations: list[list[Message]], tools: Sequence[Tools]) -> list[str]:
        """Render conversations by the chat template, with the tools that each offers."""
        texts: list[str] = [""] * len(conversations)
        alike: dict[int, list[int]] = {}
        for n, offered in enumerate(tools):
            alike.setdefault(id(offered), []).append(n)
        for chosen in alike.values():
            listed: list[Any] = [dict(tool) for tool in tools[chosen[0]]]
            written: Any = self._tokenizer.apply_chat_template(
                [conversations[n] for n in chosen],
                tokenize=False,
                add_generation_prompt=True,
                tools=listed or None,
                **self.switches,
            )
            for n, text in zip(chosen, written, strict=True):
                texts[n] = text
        return texts


def plain(messages: Sequence[Message]) -> str:
    """Join a conversation for a model without a chat template: each answer follows its question, then a blank line.

    The messages "Q: 1+1\\nA:", " 2" and "Q: 2+3\\nA:" give "Q: 1+1\\nA: 2\\n\\nQ: 2+3\\nA:".
    """
    return "".join(m["content"] + ("\n\n" if m["role"] == "assistant" else "") for m in messages)


def template_switches(data: DataSection, tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """Return the settings of the chat template: the thinking switch, and a clock that is fixed at data.date.

    Templates such as those of Llama 3.2 write today's date. The real date would change after midnight, between hosts in
    different time zones, and in a continued run.
    """
    template = str(tokenizer.chat_template) if data.chat_template else ""
    day = datetime.datetime.fromisoformat(data.date)
    return {**({CLOCK: day.strftime} if CLOCK in template else {}), **_thinking(data, template)}


def _thinking(data: DataSection, template: str) -> dict[str, bool]:
    if data.thinking is None:
        return {}
    code = " ".join(re.findall(r"\{[{%](.*?)[%}]\}", template, re.DOTALL))
    known = [name for name in THINKING if re.search(rf"(?<![\w.'\"<]){name}(?![\w'\">])", code)]
    if not known:
        raise ConfigError(
            f"data.thinking={str(data.thinking).lower()} needs a chat template with a switch for it "
            f"({' or '.join(THINKING)}), this tokenizer's has none; leave it unset"
        )
    return {known[0]: data.thinking}


# --- all prompts of a source -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RenderedPrompts:
    """The prompts that fit, in the order of their records, and the number of prompts that are too long."""

    prompts: Sequence[Prompt]
    dropped: int
    digest: str = ""
    """The SHA-256, in hex, of the texts and columns of these prompts, and of the tokenizer."""

    def column(self, name: str) -> Iterator[tuple[Any, Record]]:
        """Yield a pair for every prompt: its value in the column (None if it lacks the column), and all its columns."""
        prompts = self.prompts
        records = prompts.records() if isinstance(prompts, LazyPrompts) else (prompt.columns for prompt in prompts)
        return ((record.get(name), record) for record in records)


class LazyPrompts(Sequence[Prompt]):
    """Prompts that are rendered when they are indexed.

    ``of`` are all records of the data. ``fitting`` are the ascending indices of those whose prompts fit. ``source``
    names the data in errors.
    """

    def __init__(self, renderer: PromptRenderer, of: Sequence[Record], fitting: Sequence[int], source: str):
        self._renderer = renderer
        self._of = of
        self._fitting = fitting
        self._source = source

    def __len__(self) -> int:
        return len(self._fitting)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(*index.indices(len(self))))
        record = self._fitting[index]
        return self._renderer.render(self._of[record], _where(record, self._source))

    def __iter__(self) -> Iterator[Prompt]:
        numbered = zip(self._fitting, self.records(), strict=True)
        while at_once := list(islice(numbered, AT_ONCE)):
            where = [_where(index, self._source) for index, _ in at_once]
            yield from self._renderer.prompts([record for _, record in at_once], where)

    def records(self) -> Iterator[Record]:
        """Yield the records of the prompts."""
        fitting = iter(self._fitting)
        wanted = next(fitting, None)
        for index, record in enumerate(self._of):
            if index == wanted:
                yield record
                wanted = next(fitting, None)


def render_records(
    renderer: PromptRenderer, records: Sequence[Record], source: str, *, limit: int | None = None
) -> RenderedPrompts:
    """Check the prompts of all records, or render the first ``limit`` that fit; ``source`` names the data in errors.
    Raises DataError for a prompt longer than data.max_prompt_tokens with data.too_long=error, or if no prompt fits."""
    fitting = array("q")
    too_long: dict[int, int] = {}  # as in `_lengths`, by index of the record
    digest = hashlib.sha256(renderer.identity.encode())
    numbered, data = enumerate(records), renderer.data
    with reading(f"checking the prompts of {source}", len(records) if limit is None else 0, "prompts") as advance:
        while at_once := list(islice(numbered, AT_ONCE if limit is None else min(AT_ONCE, limit - len(fitting)))):
            where, read = [_where(index, source) for index, _ in at_once], [record for _, record in at_once]
            texts = renderer.texts(renderer.conversations(read, where), where, renderer.tools(read, where))
            lengths = _lengths(renderer, texts, where, data.max_prompt_tokens)
            for (index, record), text, length in zip(at_once, texts, lengths, strict=True):
                if not 0 <= length <= data.max_prompt_tokens:
                    too_long[index] = length
                else:
                    fitting.append(index)
                    digest.update(json.dumps([text, dict(record)], default=str).encode())
            advance(at_once[-1][0] + 1)
    if too_long and (data.too_long == "error" or not fitting):
        raise DataError(_too_long(too_long, len(fitting), data, source))
    prompts = LazyPrompts(renderer, records, fitting, source)
    return RenderedPrompts(prompts if limit is None else tuple(prompts), len(too_long), digest.hexdigest())


def _lengths(renderer: PromptRenderer, texts: list[str], where: Sequence[str], most: int) -> list[int]:
    """Return for each text its number of tokens, or a bound by its bytes if that tells whether it fits: an upper bound
    of at most ``most``, or a negative number, of which more than ``most`` is the lower bound."""
    bounds = [renderer.most_tokens(text) for text in texts]
    least = [-len(text) // renderer.longest_token if len(text) > LARGE else -1 for text in texts]
    lengths = [low if high is None or high > most else high for low, high in zip(least, bounds, strict=True)]
    open_ones = [index for index, length in enumerate(lengths) if -most <= length < 0]
    if open_ones:
        encoded = renderer.encoded([texts[index] for index in open_ones], [where[index] for index in open_ones])
        for index, token_ids in zip(open_ones, encoded, strict=True):
            lengths[index] = len(token_ids)
    return lengths


def _where(index: int, source: str) -> str:
    return f"record {index} of {source} (from 0)"


def _too_long(too_long: Mapping[int, int], fitting: int, data: DataSection, source: str) -> str:
    first, longest = next(iter(too_long)), max(map(abs, too_long.values()))
    least = "at least " * (min(too_long.values()) < 0)
    remedy = f"raise data.max_prompt_tokens to {least}{longest}"
    if data.too_long == "error":
        remedy += " or set data.too_long=drop"
    return (
        f"prompts must have at most data.max_prompt_tokens={data.max_prompt_tokens} tokens, got {least}"
        f"{abs(too_long[first])} in record {first} of {source} (from 0; {len(too_long)} of {len(too_long) + fitting} "
        f"are too long, the longest {least}{longest}); {remedy}"
    )
