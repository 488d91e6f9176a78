"""What scripts/sample.py does: models are opened, prompts are written, answers are shown and scored."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from tpu_grpo.cli.answers import Cancelled, write_answers, write_scores
from tpu_grpo.cli.chat import chat, typed_lines
from tpu_grpo.cli.naming import NamedModel
from tpu_grpo.data import Message, Source, read_records, record_of
from tpu_grpo.records.errors import ConfigError, without_controls
from tpu_grpo.records.stages import Prompt
from tpu_grpo.run.answering import Asked, Speaker
from tpu_grpo.run.saved import choose

Record = Mapping[str, Any]


class Voice:
    """One model in a conversation: what was said so far, and how it goes on."""

    def __init__(self, name: str, speaker: Speaker, columns: Record, *, rewards: bool):
        self.name, self.speaker = name, speaker
        self._columns, self._rewards = columns, rewards
        self._said: list[Message] = []

    def hear(self, text: str, turn: int) -> None:
        """Answer a person, and write the answer; see `tpu_grpo.cli.chat.Voice`."""
        record = record_of(text, self._columns, self.speaker.config.data)
        prompt = self.speaker.prompt(record, self._said)
        answer = self.answer(prompt, turn)
        self._said = [*map(dict, prompt.conversation), {"role": "assistant", "content": answer}]

    def answer(self, prompt: Prompt, turn: int) -> str:
        """Write the answers to a prompt, and their rewards if asked for; returns the first answer."""
        speaker = self.speaker
        with Cancelled() as cancelled:
            progress = speaker.answer(prompt, turn, cancelled)
            completions, texts = write_answers(progress, speaker.texts(), cancelled, _write)
        if self._rewards and completions:
            write_scores(speaker.score(prompt, completions), _write)
        return texts[0]

    def reset(self) -> None:
        """Forget what was said."""
        self._said = []


def answer_prompts(
    models: Sequence[NamedModel], asked: Asked, texts: Sequence[str], columns: Record, *, rewards: bool
) -> None:
    """Answer prompts, each by itself."""

    def records(speaker: Speaker) -> list[Record]:
        return [record_of(text, columns, speaker.config.data) for text in texts]

    _answer(models, asked, records, rewards)


def answer_records(
    models: Sequence[NamedModel], asked: Asked, file: str, rows: Sequence[int], *, rewards: bool
) -> None:
    """Answer records of the first model's data, or of another file that is read as it."""
    data = models[0].config.data
    if not file and data.sources:
        raise ConfigError("--data must name a file, because the run's data is a mixture of several; name one of them")
    found = read_records(Source(file or data.path, data))
    if rows[-1] >= len(found):
        raise ConfigError(f"--rows must name records of {file or data.path}, which has {len(found)}, got {rows[-1]}")
    _answer(models, asked, lambda _: [found[row] for row in rows], rewards)


def talk(models: Sequence[NamedModel], asked: Asked, columns: Record, *, rewards: bool) -> None:
    """Talk, until the person at the terminal ends it or stdin does."""
    with _opened(models, asked, lambda _: None) as speakers:
        voices = [Voice(m.name, s, columns, rewards=rewards) for m, s in zip(models, speakers, strict=True)]
        typed = sys.stdin.isatty()
        if typed:
            print("/reset begins a new conversation, /exit ends it", file=sys.stderr)
        chat(voices, typed_lines() if typed else iter(sys.stdin), _write)


def _answer(
    models: Sequence[NamedModel], asked: Asked, records: Callable[[Speaker], Sequence[Record]], rewards: bool
) -> None:
    def prompts(speaker: Speaker) -> list[Prompt]:
        return [speaker.prompt(record) for record in records(speaker)]

    with _opened(models, asked, prompts) as speakers:
        voices = [Voice(m.name, s, {}, rewards=rewards) for m, s in zip(models, speakers, strict=True)]
        written = [prompts(speaker) for speaker in speakers]
        for turn, heading in enumerate(written[0]):
            if len(written[0]) > 1:
                _write(f"=== {_question(heading)}\n")
            for voice, own in zip(voices, written, strict=True):
                if len(voices) > 1:
                    _write(f"--- {voice.name}\n")
                voice.answer(own[turn], turn)


@contextmanager
def _opened(
    models: Sequence[NamedModel], asked: Asked, prompts: Callable[[Speaker], Sequence[Prompt] | None]
) -> Iterator[list[Speaker]]:
    """Open models, and load them once their prompts are known to be right; None stands for a conversation."""
    with ExitStack() as stack:
        speakers = [Speaker.open(model.config, choose(model.config, model.which), asked) for model in models]
        written = [prompts(speaker) for speaker in speakers]
        for model, speaker, found in zip(models, speakers, written, strict=True):
            stack.callback(speaker.close)
            print(f"loading {model.name}", file=sys.stderr)
            speaker.start(found)
        yield speakers


def _question(prompt: Prompt) -> str:
    """Show what a prompt asks in a line."""
    return " ".join(prompt.asked.split())


def _write(text: str) -> None:
    """Write a text at once; on a terminal characters that would control it are shown as escapes."""
    if sys.stdout.isatty():
        text = without_controls(text)
    print(text, end="", flush=True)
