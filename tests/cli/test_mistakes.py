"""A hundred mistakes of people who start: each gets one line, with what is wrong, what was given, and what to do."""

import json
import shlex
import shutil
from importlib import import_module
from pathlib import Path

import pytest

from tests.goldens import cases, compare
from tests.models.test_transformers5 import SAVED

MISTAKES = Path(__file__).with_name("mistakes.txt")
"""A command, and below it what it says; ``dry`` is a dry run of what stands in RIGHT, changed."""
RIGHT = [
    *("model.path=model", "data.path=train.jsonl", "data.max_prompt_tokens=64", "rollout.max_new_tokens=8"),
    *("data.prompts_per_step=2", "algorithm.group_size=2", "rewards=[{name: exact_answer}]", "--dry-run"),
]
REWARDS = """
def good(prompts, completions, **columns): return [0.0] * len(completions)
def column(prompts, completions, difficulty): return [0.0] * len(completions)
def nothing(): return []
value = 3
"""
ROWS = """
def squares(count, start=0): return ({"question": f"{n}*{n}="} for n in range(start, start + count))
def nothing(): return []
def number(): return 7
def texts(): return ["a"]
def uneven(): return [{"a": 1}, {"b": 1}]
def breaks(): raise KeyError("x")
"""
FILES = {
    "train.jsonl": "".join(json.dumps({"question": f"{a}+1=", "answer": str(a + 1)}) + "\n" for a in range(8)),
    "torn.jsonl": '{"question": "1+1=", "answer": "2"}\n{"question": "1+\n',
    "empty.jsonl": "",
    "list.jsonl": "[1, 2]\n",
    "odd.jsonl": '{"x": "1", "y": "2"}\n' * 8,
    "train.txt": "hello",
    "tabs.yaml": "run:\n\tseed: 1\n",
    "list.yaml": "- a\n- b\n",
    "twice.yaml": "run: {seed: 1}\nrun: {seed: 2}\n",
    "flat.yaml": "run: 5\n",
    "latin.yaml": "run: {name: \xe9}\n",
    "latin.jsonl": '{"q": "\xe9"}\n',
    "rewards.py": REWARDS,
    "rows.py": ROWS,
    "thesis/thesis.tex": "",
    "began/config.yaml": "run: {name: r, dir: elsewhere}\n",
    "small.yaml": "model: {path: model}\nrollout: {max_new_tokens: 64}\ndata: {max_prompt_tokens: 64}\n",
    "syntax.py": "def f(:\n",
    "missing_import.py": "import no_such_library\ndef f(completions, **k): return [0.0] * len(completions)\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mistakes")
    shutil.copytree(SAVED / "qwen3", directory / "model")
    for name in ("folder.jsonl", "thesis", "began"):
        (directory / name).mkdir()
    for name, text in FILES.items():
        (directory / name).write_text(text, encoding="latin-1")
    return directory


def test_they_are_a_hundred() -> None:
    assert len(cases(MISTAKES)) >= 100


@pytest.mark.parametrize(("typed", "told"), cases(MISTAKES))
def test_a_mistake_is_told_in_one_line(
    typed: str, told: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    command, *words = shlex.split(typed)
    module, before = {"dry": ("train", RIGHT), "run": ("train", [])}.get(command, (command, []))
    files = sorted(folder.rglob("*"))
    try:
        code = import_module(f"tpu_grpo.cli.{module}").main([*before, *words])
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    compare(MISTAKES, typed, told, err.strip().replace(str(folder), "HERE"))
    assert [path for path in sorted(folder.rglob("*")) if path not in files and "__pycache__" not in str(path)] == []
