"""Finds the tokens that a chat template writes before the first turn of a conversation and after each turn."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tpu_grpo.config.sections import ToolFormat
from tpu_grpo.environments.actions import Action, Message
from tpu_grpo.environments.tool_calls import CallReader, checked_call, format_of, reader, schemas_of
from tpu_grpo.environments.turn_tokens import CLOSE, OPEN, Cutter, Encoder, newline_ids, split_thinking
from tpu_grpo.models.tokenizers import check_length, decode
from tpu_grpo.records.errors import ConfigError, DataError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ChatTemplate:
    """Renders conversations with a tokenizer's chat template. Raises ConfigError if the tokenizer has no template."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        tools: Sequence[Mapping[str, Any]],
        switches: Mapping[str, Any],
        encoder: Encoder,
    ):
        self._tokenizer = tokenizer
        self.tools: list[Any] = _guarded([dict(tool) for tool in tools], encoder)
        """The schemas of the tools; `Encoder.guarded` was applied to their texts."""
        self._switches = dict(switches)
        if not tokenizer.chat_template:
            raise ConfigError(
                "environment.name needs a tokenizer with a chat template, this one has none; use the instruction-tuned "
                "model's tokenizer"
            )
        self.source = tokenizer.get_chat_template(tools=self.tools or None)

    def shows_tools(self, messages: Sequence[Message]) -> bool:
        """Whether the rendering of a conversation changes when tools are offered."""
        try:
            return self.write(messages) != self.write(messages, with_tools=False)
        except ConfigError:  # a template may refuse to write without tools
            return True

    def write(self, messages: Sequence[Message], *, is_open: bool = True, with_tools: bool = True) -> str:
        """Return the rendered text of a conversation. Raises ConfigError if the template refuses the conversation.

        Args:
            messages: the conversation.
            is_open: whether the text ends with the opening of the policy's turn, or with a last assistant message that
                is left open to be continued.
            with_tools: whether the template gets the tools.
        """
        from jinja2 import TemplateError  # the language of chat templates; transformers imports it lazily too

        goes_on = is_open and messages[-1]["role"] == "assistant"
        try:
            written: Any = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=(self.tools or None) if with_tools else None,
                tokenize=False,
                add_generation_prompt=is_open and not goes_on,
                continue_final_message=goes_on,
                **self._switches,
            )
        except (TemplateError, ValueError, TypeError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ConfigError(
                f"the tokenizer's chat template must accept the roles {roles}, which a conversation has, it says: "
                f"{error}; take a model whose template does"
            ) from error
        return str(written)


QUESTION, SAID, THOUGHT, CALLED, ANSWERED = "q7zq", "c7zc", "t7zt", "v7zv", "a7za"
"""Marks: texts in test conversations, whose places in the rendered text show what the template writes around them."""
CALL_ID = "call00000"
"""Some templates require an id of nine letters and digits for each call; its value does not matter here."""


@dataclass(frozen=True)
class DroppedHistory:
    """What a template drops from earlier turns when tool or user messages follow."""

    drops_thinking: bool
    drops_newlines: bool
    """Whether the newlines after the thinking are dropped, too."""


class Prober:
    """Finds out what a template does by rendering conversations that contain marks (QUESTION, SAID and so on)."""

    def __init__(self, template: ChatTemplate, encoder: Encoder):
        self._template = template
        question: Message = {"role": "user", "content": QUESTION}
        self.begin = template.write([question])
        closed = template.write([question], is_open=False)
        if not self.begin.startswith(closed) or self.begin == closed:
            raise ConfigError(
                "the tokenizer's chat template must open the policy's turn after a message (add_generation_prompt), "
                "this one does not; take a model whose template does"
            )
        prompt = self.begin[len(closed) :]
        self.opened = prompt[prompt.index(OPEN) :] if OPEN in prompt else ""
        """The thinking part of the generation prompt: "<think>\\n", an empty block, or nothing."""
        text = template.write([question, said(1)], is_open=False)
        end = encoder.special.search(text, text.find(SAID))
        if SAID not in text or end is None:
            raise ConfigError(
                "the tokenizer's chat template must end the policy's turns with a special token, so that the engine "
                f"stops there, this one writes {text[text.find(SAID) :]!r:.80}; take a model whose template does"
            )
        self.end = end[0]

    @property
    def head(self) -> str:
        """The text before the first turn: the rendered question and the generation prompt, without ``opened``."""
        return self._without_opened(self.begin)

    def _without_opened(self, text: str) -> str:
        return text[: len(text) - len(self.opened)]

    def past(self, role: str) -> DroppedHistory:
        """Find out what the template changes in earlier turns when answers of the role "tool" or "user" follow. Raises
        ConfigError if the template refuses or omits the answers, or changes more in earlier turns than thinking."""
        self._compare(role, self._growing(role, thinks=False))
        if CLOSE not in self._template.source:
            return DroppedHistory(drops_thinking=False, drops_newlines=False)
        texts = self._growing(role, thinks=True)
        self._compare(role, texts)
        written = texts[1][len(self._without_opened(texts[0])) :]
        if re.match(rf"{OPEN}\s*{THOUGHT}1\s*{CLOSE}\s*{SAID}", written):
            return DroppedHistory(drops_thinking=False, drops_newlines=False)
        if THOUGHT not in texts[2] and written.startswith((SAID, f"\n\n{SAID}")):
            return DroppedHistory(drops_thinking=True, drops_newlines=written.startswith(SAID))
        raise _changed(role, f"writes a turn's thinking as {written[:80]!r}")

    def _growing(self, role: str, *, thinks: bool) -> list[str]:
        """Return three renderings: of the question alone, of the question with a turn and its answer, and of the
        question with two turns and their answers."""
        messages: list[Message] = [{"role": "user", "content": QUESTION}]
        texts = [self.begin]
        for number in (1, 2):
            turn = said(number, thinks=thinks)
            if role == "tool":
                turn = {**turn, "tool_calls": [self.call(f"{CALLED}{number}")]}
            name = {"name": self.name, "tool_call_id": CALL_ID} if role == "tool" else {}
            messages += [turn, {"role": role, **name, "content": f"{ANSWERED}{number}"}]
            texts.append(self._template.write(messages))
        return texts

    def _compare(self, role: str, texts: Sequence[str]) -> None:
        for number, (before, after) in enumerate(pairwise(texts), start=1):
            if not after.startswith(self._without_opened(before)):
                place = next(n for n, (a, b) in enumerate(zip(before, f"{after}\0", strict=False)) if a != b)
                raise _changed(role, f"writes {after[place : place + 60]!r} for {before[place : place + 60]!r}")
            rest = after[len(self._without_opened(before)) :]
            if self.end not in rest or f"{ANSWERED}{number}" not in rest[rest.index(self.end) :]:
                raise ConfigError(
                    f"the tokenizer's chat template must write the answers of the role {role} after the token "
                    f"{self.end} that ends a turn, this one writes {rest[:120]!r}; take a model whose template does"
                )

    @property
    def name(self) -> str:
        """The name of the first tool."""
        return str(self._template.tools[0]["function"]["name"])

    def call(self, mark: str, name: str | None = None) -> dict[str, Any]:
        """Return a call of the tool ``name``, or of the first tool if ``name`` is None; its argument is a mark."""
        function = {"name": name or self.name, "arguments": {"mark": mark}}
        return {"type": "function", "id": CALL_ID, "function": function}

    def written_call(self) -> str:
        """Return the template's rendering of a turn that consists of a call of the first tool."""
        turn: Mapping[str, Any] = {"role": "assistant", "content": "", "tool_calls": [self.call(CALLED)]}
        answer: Message = {"role": "tool", "name": self.name, "tool_call_id": CALL_ID, "content": ANSWERED}
        text = self._template.write([{"role": "user", "content": QUESTION}, turn, answer])
        return text[len(self.head) : text.index(self.end, len(self.head))]


def said(number: int, *, thinks: bool = False) -> Message:
    """Return a turn of the policy that consists of marks; with ``thinks``, a <think> block precedes its answer."""
    thinking = f"{OPEN}\n{THOUGHT}{number}\n{CLOSE}\n\n" if thinks else ""
    return {"role": "assistant", "content": f"{thinking}{SAID}{number}"}


def _changed(role: str, how: str) -> ConfigError:
    return ConfigError(
        f"the tokenizer's chat template must leave what was said as it is when a message of the role {role} follows, "
        f"or drop thinking and nothing else; this one {how}. Take a model whose template does"
    )


def _guarded(value: Any, encoder: Encoder) -> Any:
    """Apply `Encoder.guarded` to all texts and keys of a JSON value: a message with its calls, or a tool's schema."""
    if isinstance(value, Mapping):
        return {encoder.guarded(key): _guarded(each, encoder) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_guarded(each, encoder) for each in value]
    return encoder.guarded(value) if isinstance(value, str) else value


_MOST_TOOLSETS = 256
"""The size of the cache that holds a chat format for each set of tools that agents send."""
ALSO_ENDS = ("<|eom_id|>",)
"""Llama 3 may end a turn that calls a tool with this token."""


@dataclass(frozen=True)
class Following:
    """The tokens that follow a turn."""

    suffix: tuple[int, ...]
    """The tokens to append for the answers; they end with the opening of the next turn."""
    new_prompt: tuple[int, ...] | None = None
    """The tokens so far without thinking, to which the suffix is appended; None if nothing was dropped."""


def turn_ends(tokenizer: "PreTrainedTokenizerFast", switches: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """Return the ids of the tokens that can end the policy's turns; the one that the chat template writes comes first.

    A model that was trained on conversations ends its turns with these tokens, whatever the tokenizer's end token is.
    ``switches`` are further arguments of the template. Raises ConfigError if there is no template, or if the template
    does not open or end turns.
    """
    encoder = Encoder(tokenizer)
    return _turn_ends(tokenizer, Prober(ChatTemplate(tokenizer, (), switches or {}, encoder), encoder))


def _turn_ends(tokenizer: "PreTrainedTokenizerFast", prober: Prober) -> tuple[int, ...]:
    special = {token.content: n for n, token in tokenizer.added_tokens_decoder.items() if token.special}
    return tuple(special[end] for end in (prober.end, *ALSO_ENDS) if end in special)


def check_ids(tokenizer: "PreTrainedTokenizerFast", ids: Sequence[int]) -> None:
    """Raise DataError for token ids of a client that are not in the vocabulary, or are the pad token."""
    size = len(tokenizer)
    if (wrong := next((n for n in ids if not 0 <= n < size), None)) is not None:
        raise DataError(f"token ids must be from 0 to {size - 1}, got {wrong}; encode with the policy's tokenizer")
    refuse_padding(tokenizer, ids, tokenizer.decode(list(ids[-50:])))


def refuse_padding(tokenizer: "PreTrainedTokenizerFast", ids: Sequence[int], text: str) -> None:
    """Raise DataError for a prompt that holds the pad token; ``text`` is the prompt's text or its end."""
    if (pad := tokenizer.pad_token_id) != tokenizer.eos_token_id and pad in ids:
        raise DataError(
            f"a prompt must not hold the pad token, got {tokenizer.pad_token!r} in {text[-200:]!r}; padding is told "
            "from text by its id. Remove it from the data"
        )


class ChatFormat:
    """Renders prompts and the environment's answers with the chat template, and parses the policy's turns.

    Sampled tokens are decoded, and never rendered or encoded again: the template only renders the prompt's own
    messages and, after a turn, the environment's answers.

    Args:
        tokenizer: the policy's tokenizer.
        tools: the schemas of the environment's tools, {type: function, function: {name, ...}}; empty without tools.
        tool_format: the format of tool calls, as in the config's ``environment.tool_format``.
        switches: further arguments of the template, such as {enable_thinking: False}.
        encoder: the tokenizer's encoder, if there is one already.

    Raises:
        ConfigError: if there is no template, or the template shows no tools, refuses a role, changes more in earlier
            turns than thinking, or writes calls in an unknown format.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        tools: Sequence[Mapping[str, Any]],
        tool_format: ToolFormat = "auto",
        switches: Mapping[str, Any] | None = None,
        encoder: Encoder | None = None,
    ):
        self.tokenizer = tokenizer
        self.encoder = encoder or Encoder(tokenizer)
        self._tools = list(tools)
        self._template = ChatTemplate(tokenizer, tools, switches or {}, self.encoder)
        self._with_tools: Callable[[str], ChatFormat] = lru_cache(_MOST_TOOLSETS)(
            lambda tools: ChatFormat(tokenizer, json.loads(tools), tool_format, switches, self.encoder)
        )
        self._cutters: dict[str, Cutter | None] = {}
        self._prober = Prober(self._template, self.encoder)
        ends = _turn_ends(tokenizer, self._prober)
        self.end_id = ends[0]
        """The token with which the template ends turns."""
        self.end_ids = frozenset(ends)
        """The tokens after which answers can be written; the engine has to stop at them."""
        if tools and not self._template.shows_tools([{"role": "user", "content": QUESTION}]):
            raise ConfigError(
                "an environment with tools needs a chat template that shows them to the policy, this one writes the "
                "same without; take a model whose template does, or an environment with a method step"
            )
        self._cutter_of_thinking("tool" if tools else "user")  # raises now if the template cannot write this role
        self._check_encoding()
        self.tool_format, self._read_calls = self._reader(tool_format)

    def with_tools(self, tools: str, most: int = 2**31) -> "ChatFormat":
        """Return the `ChatFormat` of the same tokenizer for other tools, which are given as a JSON list, for prompts
        of up to ``most`` tokens; raises the constructor's errors, and RequestError for far more tools than that."""
        if len(tools) > (limit := max(2**17, 64 * most)):  # generous: a template may write little of them
            raise RequestError(f"tools must have at most {limit} characters of JSON, got {len(tools)}; send fewer")
        return self if tools == json.dumps(self._tools) else self._with_tools(tools)

    # --- the first prompt ---------------------------------------------------------------------------------------------

    def first(self, messages: Sequence[Message], observation: str | None) -> tuple[str, list[int], list[Message]]:
        """Return the first prompt, as text and ids, and its messages.

        Args:
            messages: the prompt's messages, which the template writes with the tools' schemas.
            observation: what ``reset`` returned; it is appended to the last user message, without special tokens.

        Raises:
            ConfigError: if the template refuses the messages, or an observation has no user message to be appended to.
            DataError: for a prompt that holds the pad token.
        """
        plain, guarded = list(messages), list(messages)
        if observation is not None:
            place = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=None)
            if place is None:
                roles = ", ".join(str(message["role"]) for message in messages)
                raise ConfigError(
                    f"a prompt must have a user message, because what reset returns is put after it, got the roles "
                    f"{roles}; let reset return None, or give the data such messages"
                )
            asked = messages[place]
            plain[place] = {**asked, "content": f"{asked['content']}{observation}"}
            guarded[place] = {**asked, "content": f"{asked['content']}{self.encoder.guarded(observation)}"}
        written = self._template.write(guarded)
        ids = self.encoder.encode(written)
        refuse_padding(self.tokenizer, ids, written)
        return self.encoder.released(written), ids, plain

    def prompt(self, messages: Sequence[Message], most: int = 2**31) -> list[int]:
        """Return the ids of a prompt whose messages come from an agent; words that spell special tokens are encoded as
        plain text. Raises the errors of ``first``, and RequestError for far more than ``most`` tokens."""
        said = [str(message["content"] or "").rpartition(CLOSE)[2] for message in messages]  # templates write this part
        check_length(self.tokenizer, "\n".join(said), most)
        written = self._template.write([_guarded(message, self.encoder) for message in messages])
        check_length(self.tokenizer, written, most)
        ids = self.encoder.encode(written)
        refuse_padding(self.tokenizer, ids, written)
        return ids

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise DataError for token ids of a client that are not in the vocabulary, or are the pad token."""
        check_ids(self.tokenizer, ids)

    # --- reading a turn -----------------------------------------------------------------------------------------------

    def ends(self, ids: Sequence[int]) -> bool:
        """Whether a turn ended with one of the template's end tokens, so that an answer can follow."""
        return len(ids) > 0 and ids[-1] in self.end_ids

    def read(self, ids: Sequence[int]) -> Action:
        """Parse a turn from its tokens, which include the end token unless the turn was cut."""
        own = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        ended = self.ends(ids) or (len(ids) > 0 and ids[-1] in own)
        written = self.decode(ids[:-1] if ended else ids)
        opened = self._prober.opened if CLOSE not in self._prober.opened else ""
        thought, said = split_thinking(opened + written)
        calls = []
        if self._read_calls is not None:
            said, calls = self._read_calls(said, ended=ended)
        return Action(
            text=self.decode(ids, skip_special_tokens=True),
            content=self.encoder.special.sub("", said).strip(),
            calls=tuple(checked_call(call) for call in calls),
            thinking=thought.strip(),
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        return decode(self.tokenizer, ids, skip_special_tokens=skip_special_tokens)

    # --- after a turn -------------------------------------------------------------------------------------------------

    def follow(
        self, ids: Sequence[int], prompt_length: int, sampled: Sequence[bool], answers: Sequence[Message]
    ) -> Following:
        """Return the tokens that follow a turn and contain the answers to it.

        Args:
            ids: [T], the whole sequence so far; it ends with the token that ended the turn.
            prompt_length: the number of tokens of the first prompt, none of which the policy sampled.
            sampled: [T], whether the policy sampled each token.
            answers: messages of the role tool, one per call in the order of the calls, or one of the role user.

        Raises:
            ConfigError: if the template cannot write the answers' role, and the constructor did not check that role.
        """
        if not self.ends(ids):
            raise ValueError(f"nothing follows a turn that was cut, which ended with the token {ids[-1:]}")
        if any(sampled[:prompt_length]) or len(sampled) != len(ids):
            raise ValueError(
                f"sampled must say so of {len(ids)} tokens, none of the prompt's {prompt_length} among them"
            )
        suffix = tuple(self._suffix(answers))
        cutter = self._cutter_of_thinking(str(answers[-1]["role"]))
        if cutter is None:
            return Following(suffix)
        past = tuple(cutter.cut(ids, sampled))
        return Following(suffix, past if len(past) < len(ids) else None)

    def _suffix(self, answers: Sequence[Message]) -> list[int]:
        """Return the ids that the template writes for answers, beginning after the token that ended the turn."""
        written = [
            {**({"tool_call_id": CALL_ID} if answer["role"] == "tool" else {}), **_guarded(answer, self.encoder)}
            for answer in answers
        ]
        names = [str(answer.get("name") or "") for answer in written if answer["role"] == "tool"]
        if len(names) > 1 and not self._many_calls:
            names = names[-1:]
        calls = [self._prober.call(CALLED, name) for name in names]
        turn: Message = {"role": "assistant", "content": SAID, **({"tool_calls": calls} if calls else {})}
        text = self._template.write([{"role": "user", "content": QUESTION}, turn, *written])
        begin = len(self._prober.head)
        for _ in calls:
            begin = text.index(CALLED, begin) + len(CALLED)
        end = self._prober.end
        suffix = self.encoder.encode(text[text.index(end, begin) :])
        assert suffix[0] in self.end_ids
        return suffix[1:]

    @cached_property
    def _many_calls(self) -> bool:
        """Whether the template accepts several calls in a turn; Llama's template refuses them."""
        calls = [self._prober.call(CALLED) for _ in range(2)]
        turn: Message = {"role": "assistant", "content": SAID, "tool_calls": calls}
        try:
            self._template.write([{"role": "user", "content": QUESTION}, turn], is_open=False)
        except ConfigError:
            return False
        return True

    # --- what the constructor finds out -------------------------------------------------------------------------------

    def _cutter_of_thinking(self, role: str) -> Cutter | None:
        """Return the `Cutter` that drops thinking from the turns before answers of a role; None if the template keeps
        thinking. Raises the errors of `Prober.past`."""
        if role not in self._cutters:
            past = self._prober.past(role)
            self._cutters[role] = self._cutter(past) if past.drops_thinking else None
        return self._cutters[role]

    def _cutter(self, past: DroppedHistory) -> Cutter:
        closing = self.encoder.encode(CLOSE)
        if len(closing) != 1:
            raise ConfigError(
                f"a chat template that drops thinking from the past needs a tokenizer whose {CLOSE} is one "
                f"token, this one has {len(closing)}; take a model with such a token, or a template that keeps thinking"
            )
        newlines = newline_ids(self.tokenizer) if past.drops_newlines else frozenset()
        return Cutter(tuple(self.encoder.encode(self._prober.opened)), closing[0], newlines)

    def _check_encoding(self) -> None:
        """Check that text between special tokens gets the same ids as when it is encoded alone, and that plain text
        never becomes special tokens."""
        text = self._prober.begin
        whole, pieces = self.encoder.encode(text), self.encoder.in_pieces(text)
        if whole != pieces or (spelled := self.encoder.spelled_by_accident()) is not None:
            told = "splits a prompt differently there" if whole != pieces else f"makes {spelled!r} of its characters"
            raise ConfigError(
                "a conversation needs a tokenizer that encodes the text between special tokens as it does alone, so "
                f"that an answer cannot spell them, this one {told}; take a byte-level one"
            )

    def _reader(self, tool_format: ToolFormat) -> tuple[ToolFormat, CallReader] | tuple[None, None]:
        """Return the format of calls and the reader for it; (None, None) without tools."""
        if not self._tools:
            return None, None
        written, name = self._prober.written_call(), self._prober.name
        chosen = format_of(written, name) if tool_format == "auto" else tool_format
        return chosen, reader(chosen, written, name, schemas_of(self._tools))
