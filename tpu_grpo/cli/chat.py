"""The output of ``scripts/sample.py``: answers as they are sampled, their rewards, and conversations with models.

A conversation reads from the terminal or a pipe; all models get the same messages. Nothing here imports jax; a
`Speaker` (tpu_grpo/run/answering.py) samples the answers.
"""

import math
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from types import FrameType
from typing import TYPE_CHECKING, Any

from tpu_grpo.records.errors import RequestError

if TYPE_CHECKING:
    from tpu_grpo.records.stages import Completion, Prompt, Scores
    from tpu_grpo.run.answering import Speaker

Write = Callable[[str], object]
"""Writes a text without adding a newline, and flushes it."""
HELP = """/reset   begin a new conversation
/exit    end, as /quit and Ctrl-D do; Ctrl-C ends an answer"""
PROMPT = "> "
_CUT_OFF = " [interrupted]"


class Voice:
    """One model in a conversation, with the messages so far."""

    def __init__(self, name: str, speaker: "Speaker", columns: Mapping[str, Any], write: Write, *, rewards: bool):
        self.name = name
        self._speaker, self._columns, self._write, self._rewards = speaker, columns, write, rewards
        self._said: list[dict[str, Any]] = []

    def hear(self, text: str, turn: int) -> None:
        """Answer a message, write the answer, and remember both.

        Raises:
            RequestError: the context has no room for the answer; nothing is remembered.
        """
        prompt = self._speaker.prompt(self._speaker.record(text, self._columns), self._said)
        answer = self.answer(prompt, turn)
        self._said = [*map(dict, prompt.conversation), {"role": "assistant", "content": answer}]

    def answer(self, prompt: "Prompt", turn: int) -> str:
        """Write the answers to a prompt, and their rewards if requested; returns the first answer."""
        speaker = self._speaker
        with noticing_ctrl_c() as cancelled:
            progress = speaker.answer(prompt, turn, cancelled)
            completions, texts = write_answers(progress, speaker.samples, cancelled, self._write)
        if self._rewards and completions:
            write_scores(speaker.score(prompt, completions), self._write)
        return texts[0]

    def reset(self) -> None:
        """Forget the conversation."""
        self._said = []


def chat(voices: Sequence[Voice], lines: Iterator[str], write: Write) -> None:
    """Answer every line of the input until it ends, or until /exit or /quit.

    The models answer one after another, each under its name if there are several. Turn numbers continue after /reset,
    so that the same message can get another answer.
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
                for voice in named_in_turn(voices, write):
                    try:
                        voice.hear(text, turn)
                    except RequestError as error:
                        write(f"({error})\n")
                turn += 1


def named_in_turn(voices: Sequence[Voice], write: Write) -> Iterator[Voice]:
    """Yield the models one after another; if there are several, first write the name of each model."""
    for voice in voices:
        if len(voices) > 1:
            write(f"--- {voice.name}\n")
        yield voice


def ask(prompt: str) -> str:
    """Read a line while sys.stdout is the original stream, without which ``input`` does not support editing."""
    with redirect_stdout(sys.__stdout__):
        return input(prompt)


def typed_lines(read: Callable[[str], str] = ask) -> Iterator[str]:
    """Yield lines typed at the terminal, until Ctrl-D; Ctrl-C discards a line."""
    import readline  # noqa: F401  # makes ``input`` support editing and history

    while True:
        try:
            yield read(PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D ends the chat)", file=sys.stderr)


@contextmanager
def noticing_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed; a second Ctrl-C raises KeyboardInterrupt as usual."""
    pressed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def write_answers(
    progress: "Iterable[Sequence[tuple[str, Completion | None]]]",
    count: int,
    cancelled: Callable[[], bool],
    write: Write,
) -> tuple[list["Completion"], list[str]]:
    """Write ``count`` answers as they grow, one after another.

    Each item of ``progress`` has a pair for every answer: its text so far, and its completion or None until it ends.
    ``cancelled`` says whether the user has interrupted the answers. Returns the completions (none if interrupted), and
    the written text of each answer.
    """

    def head(number: int) -> None:
        if count > 1 and number < count:
            write(f"[{number + 1}] ")

    written, now, latest = [""] * count, 0, None
    for answers in progress:
        if latest is None:
            head(now)
        latest = answers
        while now < count:
            text, completion = latest[now]
            if new := text[len(written[now]) :]:
                written[now] = text
                write(new)
            if completion is None:
                break
            cut = _CUT_OFF if cancelled() else f" [cut after {len(completion.token_ids)} tokens]"
            write(f"{'' if completion.finish_reason == 'stop' else cut}\n")
            now += 1
            head(now)
    if now < count:  # interrupted before its end
        write(f"{_CUT_OFF}\n")
    done = [] if cancelled() else [completion for _, completion in latest or () if completion is not None]
    return done, written


def write_scores(scores: "Scores", write: Write) -> None:
    """Write one line per answer with its rewards by name; "-" marks a reward that does not apply."""
    rows = len(scores.total)
    for row in range(rows):
        values = [(name, float(values[row])) for name, values in scores.by_name.items()]
        shown = [f"{name} {'-' if math.isnan(value) else f'{value:g}'}" for name, value in values]
        total = f"{float(scores.total[row]):g}" if scores.scored[row] else "-"
        number = f"[{row + 1}] " if rows > 1 else ""
        write(f"{number}rewards: {', '.join(shown)}; total {total}\n")
