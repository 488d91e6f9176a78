"""The command that plays environments, with the built-in tokenizer: what it shows, and where turns come from."""

import io
import shlex
from pathlib import Path

import pytest
import yaml

from tests.goldens import cases, compare
from tests.launching.driving import REPOSITORY
from tests.talking import SIZES, write_talking_files
from tpu_grpo.cli.environment import main

UNPLAYABLE = Path(__file__).with_name("unplayable.txt")
COUNTER = '''
class Counter:
    """The policy has to bring a counter to a target."""

    def reset(self, target, **columns):
        self.counter, self.target = 0, int(target)
        return f"Bring it to {self.target}."

    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: The number to add.
        """
        self.counter += step
        return self.counter

    def get_reward(self):
        return 1.0 if self.counter == self.target else 0.0
'''
POLICY = """
def policy(messages):
    if messages[-1]["role"] == "tool":
        return "done"
    target = messages[-1]["content"].split()[-1].rstrip(".")
    return f"<|call|>increment({target})<|end_call|>"


def two(messages, more):
    return ""


def clearing(messages):
    return "\\x1b[1mbold"


def three(messages):
    return 3
"""
CONFIG = """
model: {path: "builtin:calculator"}
data: {path: targets.jsonl, max_prompt_tokens: 100}
environment: {name: "counting.py:Counter", max_turns: 3}
"""
TURNS = "<|call|>increment(3)<|end_call|>\n---\n<|call|>increment(2\n---\n<|call|>increment(x=1)<|end_call|>\n"


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "counting.py": COUNTER,
        "mine.py": POLICY,
        "counting.yaml": CONFIG,
        "turns.txt": TURNS,
        "targets.jsonl": '{"prompt": "", "target": 3}\n{"prompt": "", "target": 5}\n',
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def played(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str], str]:
    """Run the command; returns its code, the lines that it printed without rules and borders, and its errors."""
    code = main(["counting.yaml", *words])
    out, err = capsys.readouterr()
    return code, [line.strip("│─┌┐└┘ ") for line in out.splitlines() if line.strip("│─┌┐└┘ ")], err


def value(lines: list[str], name: str) -> str:
    [line] = [line for line in lines if line.startswith(name)]
    return line.partition("│")[2].strip()


def test_a_function_plays_and_the_rewards_are_those_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, err = played(capsys, "--policy", "mine.py:policy", "--record", "1")
    assert (code, err) == (0, "")
    assert lines[:7] == [
        "what the policy sees",
        "<|im_start|>toolincrement(step)<|im_start|>userBring it to 5.<|im_start|>assistant",
        "turn 1, which the policy wrote",
        "<|call|>increment(5)<|end_call|><|im_end|>",
        "what the policy sees",
        "<|im_start|>tool5<|im_start|>assistant",
        "turn 2, which the policy wrote",
    ]
    assert value(lines, "ended") == "answered"
    assert value(lines, "tokens trained on") == "20 of 23 after the prompt"  # 15 and "done" + its end; 3 observed
    assert value(lines, "calls") == "increment"
    assert value(lines, "environment's reward") == value(lines, "total reward") == "1"


def test_a_file_plays_and_every_token_is_shown_with_its_mask(capsys: pytest.CaptureFixture[str]) -> None:
    """The second call is not closed, the third names an argument that there is not; the third turn is the last."""
    code, lines, _ = played(capsys, "--turns", "turns.txt", "--tokens")
    assert code == 0
    call = [262, *b"increment(3)", 263, 257]
    assert lines[lines.index("turn 1, which the policy wrote") + 2] == " ".join(f"{token}/1" for token in call)
    answer = [261, *b"3", 260]
    assert lines[lines.index("turn 2, which the policy wrote") - 1] == " ".join(f"{token}/0" for token in answer)
    assert value(lines, "ended") == "turns"
    assert value(lines, "turns") == "3"
    assert value(lines, "total reward") == "1"


def test_a_person_plays_and_an_empty_line_ends_a_turn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("<|call|>increment(1)<|end_call|>\n\nthree\nlines\nhere"))
    code, lines, _ = played(capsys)
    assert code == 0
    assert "three" in lines
    assert value(lines, "total reward") == "0"


@pytest.mark.full
@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("<|call|>increment(3)<|end_call|>\n\n", {"turns": "1", "environment's reward": "1", "total reward": "1"}),
        ("", {"turns": "0", "environment's reward": "0"}),  # without a turn there is nothing to judge
    ],
    ids=["after a turn", "at once"],
)
def test_the_end_of_the_input_ends_the_conversation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, typed: str, shown: dict[str, str]
) -> None:
    """Ctrl-D gives the same."""
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    code, lines, err = played(capsys)
    assert (code, err) == (0, "")
    names = [line.partition("│")[0].strip() for line in lines]
    found = {name: value(lines, name) for name in ("turns", "environment's reward", "total reward") if name in names}
    assert found == shown
    assert value(lines, "ended") == "stopped"


CLEARING = """
class Clearing:
    def reset(self, **columns):
        return "\\x1b[2J a\\rb\\tc"

    def step(self, action):
        raise ValueError("\\x1b[2J [/x]")
"""


@pytest.mark.full
def test_an_environment_does_not_control_the_terminal(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    Path("clearing.py").write_text(CLEARING)
    words = ["environment.name=clearing.py:Clearing", "--policy", "mine.py:clearing"]
    code, lines, err = played(capsys, *words, "environment.on_error=skip")
    assert "\x1b" not in "".join(lines) + err + caplog.text
    assert code == 0
    assert "<|im_start|>user\\x1b[2J a\\rb    c<|im_start|>assistant" in lines
    assert "\\x1b[1mbold<|im_end|>" in lines
    assert value(lines, "ended").startswith("failed: raised ValueError: \\x1b[2J [/x] in step")
    code, _, err = played(capsys, *words)
    assert code == 2
    assert "raised ValueError: \\x1b[2J [/x] in step" in err


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "shown"),
    [(["environment.on_error=skip"], "none"), (["environment.on_error=value", "environment.error_value=-0.5"], "-0.5")],
)
def test_what_a_failure_is_worth_is_shown(capsys: pytest.CaptureFixture[str], settings: list[str], shown: str) -> None:
    """A run leaves it out, or counts environment.error_value."""
    Path("clearing.py").write_text(CLEARING)
    code, lines, _ = played(capsys, "environment.name=clearing.py:Clearing", "--policy", "mine.py:clearing", *settings)
    assert code == 0
    assert [value(lines, name) for name in ("environment's reward", "reward environment", "total reward")] == [
        "none",
        shown,
        shown,
    ]


@pytest.mark.full
def test_the_records_of_a_mixture_are_counted_source_after_source(capsys: pytest.CaptureFixture[str]) -> None:
    Path("more.jsonl").write_text('{"prompt": "", "target": 7}\n')
    sources = "sources: [{path: targets.jsonl, name: some}, {path: more.jsonl, name: more}]"
    Path("counting.yaml").write_text(CONFIG.replace("path: targets.jsonl", sources))
    code, lines, _ = played(capsys, "--policy", "mine.py:policy", "--record", "2")
    assert code == 0
    assert "<|im_start|>toolincrement(step)<|im_start|>userBring it to 7.<|im_start|>assistant" in lines
    code, _, err = played(capsys, "--record", "3")
    assert code == 2
    assert "must be one of 0 to 2 (0 to 1 of some, 2 to 2 of more), got 3; name one of these" in err


@pytest.mark.full
def test_a_model_plays_as_in_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A random model, whose environment ends the conversation after its turns; the same seed gives the same tokens."""
    write_talking_files(tmp_path)
    tree = {"model": {"path": "model"}, **SIZES}
    Path("counting.yaml").write_text(yaml.safe_dump(tree))
    found = [played(capsys, "--model", "--tokens", "run.seed=5") for _ in range(2)]
    for code, lines, err in found:
        assert (code, err) == (0, "loading model\n")
        turns = int(value(lines, "turns"))
        assert 1 <= turns <= 8
        assert f"turn {turns}, which the policy wrote" in lines
    assert found[0] == found[1]


@pytest.mark.parametrize(("words", "told"), cases(UNPLAYABLE))
def test_what_cannot_be_played_is_told(capsys: pytest.CaptureFixture[str], words: str, told: str) -> None:
    Path("one.txt").write_text("<|call|>increment(1)<|end_call|>")
    code, _, err = played(capsys, *shlex.split(words))
    assert (code, err.count("\n")) == (2, 1)
    compare(UNPLAYABLE, words, told, err.strip().replace(str(Path.cwd()), "HERE"))


def test_the_guides_class_is_this_one() -> None:
    """The page builds a class line by line; what it shows is what is played here, but for its shorter lines."""
    page = (REPOSITORY / "docs" / "write_an_environment.md").read_text()
    shown = page.partition("```python\n# counting.py\n")[2].partition("```")[0]
    found: dict[str, type] = {}
    exec(shown, found)
    counter = found["Counter"]()
    assert counter.reset(target="3", prompt="") == "The counter is at 0. Bring it to 3."
    assert [counter.increment(1), counter.get_reward(), counter.increment(2), counter.get_reward()] == [1, 0, 3, 1]
