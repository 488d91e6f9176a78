"""Writes answers to the terminal as they come, those of several samples one after another.

with Cancelled() as cancelled:
    completions = write_answers(speaker.answer(prompt, turn, cancelled), speaker.texts(), cancelled, write)
"""

import math
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from tpu_grpo.records.stages import Completion, Scores

Write = Callable[[str], object]
"""Writes a text, without a new line, so that it is seen at once."""


class Answer(Protocol):
    """What there is of an answer; see rollout/generation.py."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens so far."""
        ...

    @property
    def completion(self) -> "Completion | None":
        """The whole completion, once it has ended."""
        ...


class Text(Protocol):
    """Tells the text of tokens as they come; see models/tokenizers.py."""

    def more(self, token_ids: Sequence[int], *, ended: bool) -> str:
        """Return what is new in the text of all tokens so far."""
        ...


class Cancelled:
    """Says whether Ctrl-C was pressed in a ``with`` block; a second one ends the program as it does elsewhere."""

    def __init__(self) -> None:
        self._pressed = False
        self._before: Any = None

    def __call__(self) -> bool:
        """Say whether it was pressed."""
        return self._pressed

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def write_answers(
    progress: Iterable[Sequence[Answer]], texts: Sequence[Text], cancelled: Callable[[], bool], write: Write
) -> tuple[list["Completion"], list[str]]:
    """Write answers as they come, the second once the first has ended, and so on.

    Args:
        progress: gives what there is of all answers, again and again, until they have ended.
        texts: tell the text of each answer.
        cancelled: whether answers were cut off by the reader.
        write: writes a text.

    Returns:
        The completions, fewer than asked for if the reader cut them off, and what was written of each answer.
    """
    written = ["" for _ in texts]
    now, latest = 0, []
    _head(now, len(texts), write)
    for latest in progress:
        while now < len(texts):
            answer = latest[now]
            _tell(texts[now].more(answer.token_ids, ended=answer.completion is not None), now, written, write)
            if answer.completion is None:
                break
            write(f"{_end(answer.completion, cancelled())}\n")
            now += 1
            if now < len(texts):
                _head(now, len(texts), write)
    if now < len(texts):  # cut off before it began
        write(f"{_CUT_OFF}\n")
    done = [] if cancelled() else [answer.completion for answer in latest if answer.completion is not None]
    return done, written


_CUT_OFF = " [interrupted]"


def _head(number: int, of: int, write: Write) -> None:
    if of > 1:
        write(f"[{number + 1}] ")


def _tell(new: str, number: int, written: list[str], write: Write) -> None:
    if new:
        written[number] += new
        write(new)


def _end(completion: "Completion", cancelled: bool) -> str:
    if completion.finish_reason == "stop":
        return ""
    return _CUT_OFF if cancelled else f" [cut after {len(completion.token_ids)} tokens]"


def write_scores(scores: "Scores", write: Write) -> None:
    """Write the rewards of each answer by name, a line per answer; "-" stands for one that does not apply."""
    rows = len(scores.total)
    for row in range(rows):
        named: Mapping[str, float] = {name: float(values[row]) for name, values in scores.by_name.items()}
        shown = [f"{name} {'-' if math.isnan(value) else f'{value:g}'}" for name, value in named.items()]
        _head(row, rows, write)
        total = f"{float(scores.total[row]):g}" if scores.scored[row] else "-"
        write(f"rewards: {', '.join(shown)}; total {total}\n")
