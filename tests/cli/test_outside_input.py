"""Files that used to end a command in a traceback, or never: each is a line now, and code 2."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.several.runs import settings, write_files
from tpu_grpo.cli.train import main
from tpu_grpo.data import rendering

Change = Callable[[Path], object]
LOOP = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + "{% endfor %}" * 3
ALIASES = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i + 1}: &a{i + 1} [{','.join([f'*a{i}'] * 9)}]\n" for i in range(9)
)


def text(name: str, content: str) -> Change:
    return lambda directory: (directory / name).write_text(content)


def instead(name: str, make: Callable[[Path], object]) -> Change:
    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        make(directory / name)

    return change


def many_layers(directory: Path) -> None:
    path = directory / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 10**9}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (text("data.jsonl", '{"question": "\\ud800", "answer": "1"}\n'), "half of a surrogate pair"),
        (text("data.jsonl", '{"question": ' + "[" * 50_000), "more than 100 levels"),
        (text("data.jsonl", '{"question": "1", "answer": ' + "9" * 10_000 + "}"), "Exceeds the limit"),
        (lambda directory: os.truncate(directory / "data.jsonl", 2**31), "must have less than 67108864 characters"),
        (instead("data.jsonl", os.mkfifo), "must be a regular file"),
        (instead("data.jsonl", lambda path: path.symlink_to("/dev/zero")), "must be a regular file"),
        (text("model/config.json", "[" * 50_000), "more than 100 levels"),
        (text("model/tokenizer.json", "[" * 50_000), "more than 100 levels"),
        (many_layers, "num_hidden_layers must be at most 10000"),
        (text("model/chat_template.jinja", "{{ 'x' * 99999999999 }}"), "got MemoryError"),
        (text("model/chat_template.jinja", LOOP), "got TimeoutError"),
        (text("run/sources.json", "[" * 50_000), "must hold a JSON object"),
        (text("run/summary.json", '{"steps": "x"}'), "must hold steps, a value of int, got 'x'"),
        (instead("run/run.lock", Path.mkdir), "got a link, directory or pipe"),
        (text("c.yaml", ALIASES), "it must have at most 200000 values"),
        (text("c.yaml", "[" * 50_000), "it is nested too deep"),
    ],
)
def test_it_is_refused_in_a_line(
    change: Change,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(rendering, "TEMPLATE_SECONDS", 0.5)
    write_files(tmp_path)
    tree = yaml.safe_dump(settings(Path("run")))
    (tmp_path / "run").mkdir()
    for name, content in (("c.yaml", tree), ("run/config.yaml", tree), ("run/metrics.jsonl", '{"step": 1}\n')):
        (tmp_path / name).write_text(content)
    change(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["c.yaml", "--dry-run"]) == 2
    assert said in capsys.readouterr().err
