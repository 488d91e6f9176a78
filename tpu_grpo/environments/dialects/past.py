"""What a chat template does with turns once there is an answer to them, found out from conversations of its own.

Three renderings of a conversation with marks in it are compared, the first with the question alone, the others with one
and two turns and answers more. Each must begin with the one before, apart from the policy's thinking:

    "<|im_start|>user\\nQ<|im_end|>\\n<|im_start|>assistant\\n"
    "<|im_start|>user\\nQ<|im_end|>\\n<|im_start|>assistant\\nC1<|im_end|>\\n<|im_start|>user\\nA1<|im_end|>\\n<|im_start|>assi..."
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tpu_grpo.environments.actions import Message
from tpu_grpo.environments.dialects.data import Encoder
from tpu_grpo.environments.dialects.template import ChatTemplate
from tpu_grpo.environments.dialects.thinking import CLOSE, OPEN
from tpu_grpo.records.errors import ConfigError

QUESTION, SAID, THOUGHT, CALLED, ANSWERED = "q7zq", "c7zc", "t7zt", "v7zv", "a7za"
"""The marks; turns and answers have a number after theirs."""
CALL_ID = "call00000"
"""Some templates ask for one, of nine letters and digits, and write it nowhere that matters here."""


@dataclass(frozen=True)
class Past:
    """What a template does with turns when a message of a role follows them."""

    drops_thinking: bool
    drops_newlines: bool
    """Whether the newlines after the thinking go with it."""


class Prober:
    """A Prober writes conversations with marks by a template, and looks at what became of them."""

    def __init__(self, template: ChatTemplate, encoder: Encoder):
        self._template = template
        self._encoder = encoder
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
        """What the generation prompt writes of thinking: "<think>\\n", or an empty block."""
        self.end = self._end()

    def _end(self) -> str:
        """Return the special token that ends a turn."""
        text = self._template.write([{"role": "user", "content": QUESTION}, said(1)], is_open=False)
        end = self._encoder.find_special(text, text.find(SAID))
        if SAID not in text or end is None:
            raise ConfigError(
                "the tokenizer's chat template must end the policy's turns with a special token, so that the engine "
                f"stops there, this one writes {text[text.find(SAID) :]!r:.80}; take a model whose template does"
            )
        return end[0]

    @property
    def head(self) -> str:
        """The question, and what opens a turn, thinking left out."""
        return self._without_opened(self.begin)

    def _without_opened(self, text: str) -> str:
        return text[: len(text) - len(self.opened)]

    def past(self, role: str) -> Past:
        """Find out what becomes of turns when answers of a role follow, "tool" or "user".

        Raises:
            ConfigError: if the template refuses them, leaves them out, or changes more of the past than thinking.
        """
        self._compare(role, self._growing(role, thinks=False))
        if CLOSE not in self._template.source:
            return Past(drops_thinking=False, drops_newlines=False)
        texts = self._growing(role, thinks=True)
        self._compare(role, texts)
        written = texts[1][len(self._without_opened(texts[0])) :]
        if re.match(rf"{OPEN}\s*{THOUGHT}1\s*{CLOSE}\s*{SAID}", written):
            return Past(drops_thinking=False, drops_newlines=False)
        if THOUGHT not in texts[2] and written.startswith((SAID, f"\n\n{SAID}")):
            return Past(drops_thinking=True, drops_newlines=written.startswith(SAID))
        raise _changed(role, f"writes a turn's thinking as {written[:80]!r}")

    def _growing(self, role: str, *, thinks: bool) -> list[str]:
        """Return the renderings of the question, and with one and two turns and answers more."""
        messages: list[Message] = [{"role": "user", "content": QUESTION}]
        texts = [self.begin]
        for number in (1, 2):
            turn = said(number, thinks=thinks)
            if role == "tool":
                turn = {**turn, "tool_calls": [self.call(f"{CALLED}{number}")]}
            name = {"name": self._name, "tool_call_id": CALL_ID} if role == "tool" else {}
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
    def _name(self) -> str:
        return str(self._template.tools[0]["function"]["name"])

    def call(self, mark: str, name: str | None = None) -> dict[str, Any]:
        """Return a call of a tool with a mark for its argument; of the first tool unless one is named."""
        function = {"name": name or self._name, "arguments": {"mark": mark}}
        return {"type": "function", "id": CALL_ID, "function": function}

    def written_call(self) -> str:
        """Return what the template writes of a turn that is nothing but a call of the first tool."""
        turn: Mapping[str, Any] = {"role": "assistant", "content": "", "tool_calls": [self.call(CALLED)]}
        answer: Message = {"role": "tool", "name": self._name, "tool_call_id": CALL_ID, "content": ANSWERED}
        text = self._template.write([{"role": "user", "content": QUESTION}, turn, answer])
        return text[len(self.head) : text.index(self.end, len(self.head))]


def said(number: int, *, thinks: bool = False) -> Message:
    """Return a turn with marks."""
    return {"role": "assistant", "content": f"{thinking(number) if thinks else ''}{SAID}{number}"}


def thinking(number: int) -> str:
    """Return thinking with a mark, as models write it before what they say."""
    return f"{OPEN}\n{THOUGHT}{number}\n{CLOSE}\n\n"


def _changed(role: str, how: str) -> ConfigError:
    return ConfigError(
        f"the tokenizer's chat template must leave what was said as it is when a message of the role {role} follows, "
        f"or drop thinking and nothing else; this one {how}. Take a model whose template does"
    )
