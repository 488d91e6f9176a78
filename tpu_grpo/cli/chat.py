"""A conversation at the terminal, or through a pipe, with one model or with several that hear the same.

Nothing here imports jax: what answers is a `Voice`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from typing import Protocol

from tpu_grpo.cli.answers import Write
from tpu_grpo.records.errors import RequestError

HELP = """/reset   begin a new conversation
/exit    end, as /quit and Ctrl-D do; Ctrl-C ends an answer"""
PROMPT = "> "


class Voice(Protocol):
    """One model in a conversation; it remembers what was said."""

    @property
    def name(self) -> str:
        """The name of the model."""
        ...

    def hear(self, text: str, turn: int) -> None:
        """Answer, and write the answer.

        Raises:
            RequestError: there is no room for it; nothing is remembered.
        """
        ...

    def reset(self) -> None:
        """Forget what was said."""
        ...


def chat(voices: Sequence[Voice], lines: Iterator[str], write: Write) -> None:
    """Answer every line until there is none, or until /exit or /quit.

    The turns are counted on through /reset, so that the same words may get another answer.
    """
    turn = 0
    for line in lines:
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/reset":
                for voice in voices:
                    voice.reset()
                write("(a new conversation)\n")
            case "/help":
                write(f"{HELP}\n")
            case text if text.startswith("/") and " " not in text:
                write(f"{text} is no command; these are:\n{HELP}\n")
            case text:
                answer_all(voices, text, turn, write)
                turn += 1


def answer_all(voices: Sequence[Voice], text: str, turn: int, write: Write) -> None:
    """Let every model answer, one after another, under its name if there are several."""
    for voice in voices:
        if len(voices) > 1:
            write(f"--- {voice.name}\n")
        try:
            voice.hear(text, turn)
        except RequestError as error:
            write(f"({error})\n")


def ask(prompt: str) -> str:
    """Read a line from the terminal itself: the stream in front of it would keep ``input`` from editing lines."""
    with redirect_stdout(sys.__stdout__):
        return input(prompt)


def typed_lines(read: Callable[[str], str] = ask) -> Iterator[str]:
    """Yield what a person types, until Ctrl-D; Ctrl-C gives up a line."""
    import readline  # noqa: F401  # arrows edit lines and bring earlier ones back

    while True:
        try:
            yield read(PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D ends the chat)", file=sys.stderr)
