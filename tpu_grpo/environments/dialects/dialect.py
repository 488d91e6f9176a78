"""What a chat template writes around turns, in tokens: before the first, and after each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tpu_grpo.config.sections import ToolFormat
from tpu_grpo.environments.actions import Action, Message
from tpu_grpo.environments.dialects import thinking
from tpu_grpo.environments.dialects.data import Encoder
from tpu_grpo.environments.dialects.formats import CallReader, format_of, reader, schemas_of
from tpu_grpo.environments.dialects.past import CALL_ID, CALLED, QUESTION, SAID, Past, Prober
from tpu_grpo.environments.dialects.template import ChatTemplate
from tpu_grpo.environments.dialects.values import checked
from tpu_grpo.records.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ALSO_ENDS = ("<|eom_id|>",)
"""Llama 3 may end a turn that calls a tool with this one."""


@dataclass(frozen=True)
class Following:
    """What comes after a turn."""

    suffix: tuple[int, ...]
    """The tokens to append for the answers; they end with what opens the next turn."""
    new_prompt: tuple[int, ...] | None = None
    """The past with thinking cut out, which the suffix follows; None if the past stays as it is."""


def open_dialect(
    tokenizer: "PreTrainedTokenizerFast",
    tools: Sequence[Mapping[str, Any]],
    tool_format: ToolFormat = "auto",
    switches: Mapping[str, Any] | None = None,
) -> "Dialect":
    """Return what a tokenizer's chat template writes around turns.

    Args:
        tokenizer: the policy's.
        tools: the schemas of the environment's tools, {type: function, function: {name, ...}}; empty if it has none.
        tool_format: how calls are written, as in the config.
        switches: what the template is told beside the messages, such as {enable_thinking: False}.

    Raises:
        ConfigError: for a template that cannot do it: there is none, it shows no tools, refuses a role, changes more of
            the past than thinking, or writes calls in no known way.
    """
    return Dialect(tokenizer, tools, tool_format, switches or {})


def turn_ends(tokenizer: "PreTrainedTokenizerFast", switches: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """Return the tokens with which a chat template ends the policy's turns, the usual one first.

    They are what a model that was trained in conversations ends its turns with, whatever its own end token is.

    Args:
        tokenizer: the policy's.
        switches: what the template is told beside the messages.

    Raises:
        ConfigError: if there is no template, or it opens or ends no turns.
    """
    return _turn_ends(tokenizer, Prober(ChatTemplate(tokenizer, (), switches or {}), Encoder(tokenizer)))


def _turn_ends(tokenizer: "PreTrainedTokenizerFast", prober: Prober) -> tuple[int, ...]:
    special = {token.content: n for n, token in tokenizer.added_tokens_decoder.items() if token.special}
    return tuple(special[end] for end in (prober.end, *ALSO_ENDS) if end in special)


class Dialect:
    """A Dialect writes the first prompt, reads turns and says what follows them; see `open_dialect`.

    What was sampled is decoded, and never rendered or encoded again: the template only ever writes the prompt's own
    messages, and after a turn of its own the environment's answers.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        tools: Sequence[Mapping[str, Any]],
        tool_format: ToolFormat,
        switches: Mapping[str, Any],
    ):
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, tools, switches)
        self._encoder = Encoder(tokenizer)
        self._pasts: dict[str, tuple[Past, thinking.Cutter | None]] = {}
        self._prober = Prober(self._template, self._encoder)
        ends = _turn_ends(tokenizer, self._prober)
        self.end_id = ends[0]
        """The token with which the template ends turns."""
        self.end_ids = frozenset(ends)
        """The tokens after which answers can be written; the engine has to stop at them."""
        self._answer_role = "tool" if tools else "user"
        self._check_tools()
        self._past(self._answer_role)
        self._check_encoding()
        self.tool_format, self._read_calls = self._reader(tool_format)

    # --- the first prompt ---------------------------------------------------------------------------------------------

    def first(self, messages: Sequence[Message], observation: str | None) -> tuple[str, list[int], list[Message]]:
        """Return the first prompt, as text and ids, and the messages that it is of.

        Args:
            messages: the prompt's, which the template writes with the tools' schemas.
            observation: what ``reset`` gave; it is put after the last user message, and none of it is a special token.

        Raises:
            ConfigError: if the template refuses the messages, or an observation has no message to stand in.
            DataError: for a prompt that holds the pad token.
        """
        told, guarded = list(messages), list(messages)
        if observation is not None:
            place = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=None)
            if place is None:
                roles = ", ".join(str(message["role"]) for message in messages)
                raise ConfigError(
                    f"a prompt must have a user message, because what reset returns is put after it, got the roles "
                    f"{roles}; let reset return None, or give the data such messages"
                )
            asked = messages[place]
            told[place] = {**asked, "content": f"{asked['content']}{observation}"}
            guarded[place] = {**asked, "content": f"{asked['content']}{self._encoder.guarded(observation)}"}
        written = self._template.write(guarded)
        ids = self._encoder.encode(written)
        if (pad := self._tokenizer.pad_token_id) is not None and pad in ids:
            raise DataError(
                f"a prompt must not hold the pad token, got {self._tokenizer.pad_token!r} in {written[-200:]!r}; "
                "padding is told from text by its id. Remove it from the data"
            )
        return self._encoder.released(written), ids, told

    # --- reading a turn -----------------------------------------------------------------------------------------------

    def ends(self, ids: Sequence[int]) -> bool:
        """Say whether a turn ended with the token that the template ends turns with, so that an answer can follow."""
        return len(ids) > 0 and ids[-1] in self.end_ids

    def read(self, ids: Sequence[int]) -> Action:
        """Return what the policy wrote in a turn, whose tokens these are, the one that ended it included."""
        own = self._tokenizer.eos_token_id, self._tokenizer.pad_token_id
        ended = self.ends(ids) or (len(ids) > 0 and ids[-1] in own)
        written = self._decode(ids[:-1] if ended else ids)
        opened = self._prober.opened if thinking.CLOSE not in self._prober.opened else ""
        thought, said = thinking.split(opened + written)
        calls = []
        if self._read_calls is not None:
            said, calls = self._read_calls(said, ended=ended)
        return Action(
            text=self._decode(ids, skip_special_tokens=True),
            content=self._encoder.without_special(said).strip(),
            calls=tuple(checked(call) for call in calls),
            thinking=thought.strip(),
        )

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def count(self, text: str) -> int:
        """Return how many tokens an answer has."""
        return self._encoder.count(text)

    def shortened(self, text: str, tokens: int) -> str:
        """Return the beginning of an answer with a mark after it, together no more than some tokens."""
        return self._encoder.shortened(text, tokens)

    # --- after a turn -------------------------------------------------------------------------------------------------

    def follow(
        self, ids: Sequence[int], prompt_length: int, sampled: Sequence[bool], answers: Sequence[Message]
    ) -> Following:
        """Return what comes after a turn when these messages answer it.

        Args:
            ids: [T], the whole sequence so far; it ends with the token that ended the turn.
            prompt_length: how many of them are the first prompt's, none of which the policy sampled.
            sampled: [T], which of them the policy sampled.
            answers: messages of the role tool, one for each call and in their order, or one of the role user.

        Raises:
            ConfigError: for a role that was not checked at the start, and that the template cannot write there.
        """
        if not self.ends(ids):
            raise ValueError(f"nothing follows a turn that was cut, which ended with the token {ids[-1:]}")
        if any(sampled[:prompt_length]) or len(sampled) != len(ids):
            raise ValueError(
                f"sampled must say so of {len(ids)} tokens, none of the prompt's {prompt_length} among them"
            )
        suffix = tuple(self._suffix(answers))
        _, cutter = self._past(str(answers[-1]["role"]))
        if cutter is None:
            return Following(suffix)
        past = tuple(cutter.cut(ids, sampled))
        return Following(suffix, past if len(past) < len(ids) else None)

    def _suffix(self, answers: Sequence[Message]) -> list[int]:
        """Return the ids that the template writes for answers, from after the token that ended the turn."""
        written = [self._as_data(answer) for answer in answers]
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
        suffix = self._encoder.encode(text[text.index(end, begin) :])
        assert suffix[0] in self.end_ids
        return suffix[1:]

    def _as_data(self, answer: Message) -> Message:
        """Guard what an answer holds: the environment wrote its content, and the policy the name of the tool."""
        held = {key: self._encoder.guarded(str(answer[key])) for key in ("name", "content") if key in answer}
        return {**({"tool_call_id": CALL_ID} if answer["role"] == "tool" else {}), **answer, **held}

    @cached_property
    def _many_calls(self) -> bool:
        """Whether the template writes several calls in a turn; Llama's refuses them."""
        calls = [self._prober.call(CALLED) for _ in range(2)]
        turn: Message = {"role": "assistant", "content": SAID, "tool_calls": calls}
        try:
            self._template.write([{"role": "user", "content": QUESTION}, turn], is_open=False)
        except ConfigError:
            return False
        return True

    # --- the start ----------------------------------------------------------------------------------------------------

    def _check_tools(self) -> None:
        if self._template.tools and not self._template.shows_tools([{"role": "user", "content": QUESTION}]):
            raise ConfigError(
                "an environment with tools needs a chat template that shows them to the policy, this one writes the "
                "same without; take a model whose template does, or an environment with a method step"
            )

    def _past(self, role: str) -> tuple[Past, thinking.Cutter | None]:
        if role not in self._pasts:
            past = self._prober.past(role)
            self._pasts[role] = past, self._cutter(past) if past.drops_thinking else None
        return self._pasts[role]

    def _cutter(self, past: Past) -> thinking.Cutter:
        closing = self._encoder.encode(thinking.CLOSE)
        if len(closing) != 1:
            raise ConfigError(
                f"a chat template that drops thinking from the past needs a tokenizer whose {thinking.CLOSE} is one "
                f"token, this one has {len(closing)}; take a model with such a token, or a template that keeps thinking"
            )
        newlines = thinking.newline_ids(self._tokenizer) if past.drops_newlines else frozenset()
        return thinking.Cutter(tuple(self._encoder.encode(self._prober.opened)), closing[0], newlines)

    def _check_encoding(self) -> None:
        """Check that what stands between markers is encoded alike alone and in a whole text."""
        text = self._prober.begin
        whole, pieces = self._encoder.encode(text), self._encoder.in_pieces(text)
        if whole != pieces or (spelled := self._encoder.spelled_by_accident()) is not None:
            told = "splits a prompt differently there" if whole != pieces else f"makes {spelled!r} of its characters"
            raise ConfigError(
                "a conversation needs a tokenizer that encodes the text between special tokens as it does alone, so "
                f"that an answer cannot spell them, this one {told}; take a byte-level one"
            )

    def _reader(self, tool_format: ToolFormat) -> tuple[ToolFormat, CallReader] | tuple[None, None]:
        """Return the format of calls, and what reads it; nothing without tools."""
        if not (tools := self._template.tools):
            return None, None
        written, name = self._prober.written_call(), str(tools[0]["function"]["name"])
        chosen = format_of(written, name) if tool_format == "auto" else tool_format
        return chosen, reader(chosen, written, name, schemas_of(tools))
