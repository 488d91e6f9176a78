"""A conversation's lines, without a model: commands, turns, several voices, and answers as they come."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tpu_grpo.cli.chat import Voice, chat, noticing_ctrl_c, typed_lines, write_answers, write_scores
from tpu_grpo.records.errors import RequestError
from tpu_grpo.records.stages import Completion, FinishReason, Scores

REPOSITORY = Path(__file__).parents[2]


class Echo(Voice):
    """Remembers what it heard, and has room for two turns."""

    def __init__(self, name: str, write: list[str]) -> None:
        self.name, self.written, self.heard = name, write, list[str]()

    def hear(self, text: str, turn: int) -> None:
        if len(self.heard) == 2:
            raise RequestError("no room; /reset")
        self.heard.append(text)
        self.written.append(f"{turn}:{'+'.join(self.heard)}\n")

    def reset(self) -> None:
        self.heard = []


def said(*lines: str, voices: int = 1) -> str:
    written: list[str] = []
    chat([Echo(f"model {v}", written) for v in range(voices)], iter(lines), written.append)
    return "".join(written)


def test_turns_are_remembered_until_a_reset_and_counted_on() -> None:
    assert said("a\n", "\n", "b", "/reset", " c ") == "0:a\n1:a+b\n(a new conversation)\n2:c\n"


def test_a_line_that_has_no_room_is_told_and_the_chat_goes_on() -> None:
    assert said("a", "b", "c", "/reset", "d") == "0:a\n1:a+b\n(no room; /reset)\n(a new conversation)\n3:d\n"


@pytest.mark.parametrize("end", ["/exit", "/quit", "/exit\n"])
def test_commands_end_the_chat(end: str) -> None:
    assert said("a", end, "b") == "0:a\n"


def test_other_commands_are_explained_and_not_sent() -> None:
    assert "/nothing is no command; these are:\n/reset " in said("/nothing")
    assert "/exit    end" in said("/help")
    assert said("/etc/hosts is a file") == "0:/etc/hosts is a file\n"


def test_several_models_answer_every_line_under_their_names() -> None:
    assert said("a", voices=2) == "--- model 0\n0:a\n--- model 1\n0:a\n"


def test_ctrl_c_gives_a_line_up_and_ctrl_d_ends(capsys: pytest.CaptureFixture[str]) -> None:
    typed = iter(["a", KeyboardInterrupt(), "b", EOFError()])

    def read(prompt: str) -> str:
        assert prompt == "> "
        if isinstance(value := next(typed), BaseException):
            raise value
        return value

    assert list(typed_lines(read)) == ["a", "b"]
    assert "/exit or Ctrl-D ends the chat" in capsys.readouterr().err


def test_lines_are_edited_at_a_terminal_through_the_commands_own_output() -> None:
    """The arrows work: "ac", back by one, "b" is "abc"; and the line before comes back."""
    code = """
from tpu_grpo.cli.chat import typed_lines
from tpu_grpo.workers.streams import lasting_output

with lasting_output():
    for line in typed_lines():
        print("got", line, flush=True)
"""
    leader, follower = os.openpty()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=follower, stdout=follower, stderr=follower, env=environment
    ) as process:
        os.close(follower)
        seen = until(leader, "> ")
        os.write(leader, b"ac\x1b[Db\n")
        seen += until(leader, "got abc\r\n> ")  # what is typed ahead is not edited, and Ctrl-D then ends nothing
        os.write(leader, b"\x1b[A\n")
        seen += until(leader, "got abc\r\n> ")
        os.write(leader, b"\x04")
        seen += until_closed(leader)  # a process that ends may wait until what it wrote was read
        assert process.wait(timeout=30) == 0, seen
    os.close(leader)


def until(terminal: int, expected: str) -> str:
    """Read from a terminal until it has shown a text."""
    seen = ""
    while expected not in seen:
        ready, _, _ = select.select([terminal], [], [], 30)
        assert ready, f"waited for {expected!r}, saw {seen!r}"
        seen += os.read(terminal, 1000).decode()
    return seen


def until_closed(terminal: int) -> str:
    """Read from a terminal until nobody writes to it any more."""
    seen = b""
    with suppress(OSError):  # Linux says that a terminal was closed by EIO
        while select.select([terminal], [], [], 30)[0] and (more := os.read(terminal, 1000)):
            seen += more
    return seen.decode()


def test_the_first_ctrl_c_ends_an_answer_and_the_second_the_program() -> None:
    before = signal.getsignal(signal.SIGINT)
    with noticing_ctrl_c() as cancelled:
        assert not cancelled()
        os.kill(os.getpid(), signal.SIGINT)
        assert cancelled()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


# --- answers ---------------------------------------------------------------------------------------------------------


Told = tuple[str, Completion | None]


def ended(text: str, reason: FinishReason = "stop") -> Told:
    ids = np.arange(len(text), dtype=np.int32)
    return text, Completion(ids, np.zeros(len(text), np.float32), reason, 0)


def test_answers_come_one_after_another_as_soon_as_it_is_their_turn() -> None:
    written: list[str] = []

    def progress() -> Iterator[list[Told]]:
        yield [("a", None), ended("cde")]
        assert "".join(written) == "[1] a"  # the second waits, though it has ended
        yield [ended("ab"), ended("cde")]

    completions, texts = write_answers(progress(), 2, lambda: False, written.append)
    assert "".join(written) == "[1] ab\n[2] cde\n"
    assert [len(c.token_ids) for c in completions] == [2, 3]
    assert texts == ["ab", "cde"]


def test_an_answer_that_was_cut_says_so() -> None:
    written: list[str] = []
    write_answers(iter([[ended("ab", "length")]]), 1, lambda: False, written.append)
    assert "".join(written) == "ab [cut after 2 tokens]\n"


def test_an_answer_that_the_reader_cut_off_is_kept_and_not_scored() -> None:
    written: list[str] = []
    progress = iter([[("a", None), ("", None)], [ended("ab", "length"), ("", None)]])
    completions, texts = write_answers(progress, 2, lambda: True, written.append)
    assert "".join(written) == "[1] ab [interrupted]\n[2]  [interrupted]\n"
    assert (completions, texts) == ([], ["ab", ""])


def test_rewards_are_shown_by_name_under_each_answer() -> None:
    by_name = {"right": np.array([1.0, 0.0]), "short": np.array([0.25, np.nan])}
    written: list[str] = []
    write_scores(Scores(np.array([1.5, 0.0]), by_name, 0.0), written.append)
    assert "".join(written) == ("[1] rewards: right 1, short 0.25; total 1.5\n[2] rewards: right 0, short -; total 0\n")
