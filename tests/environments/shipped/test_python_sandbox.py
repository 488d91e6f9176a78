"""Programs of a policy run in a sandbox, and it is told what they print."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.goldens import labelled
from tpu_grpo.cli.environment import main
from tpu_grpo.environments.shipped.python_sandbox import PythonSandbox

LABELLED = Path(__file__).with_name("labelled.txt")

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"
PROBLEM = {  # GSM8K's first test problem
    "question": "Janet\u2019s ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes muffins "
    "for her friends every day with four. She sells the remainder at the farmers' market daily for $2 per fresh duck "
    "egg. How much in dollars does she make every day at the farmers' market?",
    "answer": "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\nShe makes 9 * 2 = $<<9*2=18>>18 every day at "
    "the farmer\u2019s market.\n#### 18",
}


@pytest.mark.parametrize(("code", "told"), labelled(LABELLED, "programs"))
def test_what_a_program_prints_is_told(code: str, told: str):
    environment = PythonSandbox()
    assert environment.reset(question="...", answer="...") is None
    assert environment.python(code) == told


def test_nothing_is_kept_between_programs():
    environment = PythonSandbox()
    environment.python("x = 1\nopen('kept', 'w').write('x')")
    assert environment.python("print(x)") == "Error: NameError: name 'x' is not defined (line 1)"
    assert environment.python("import os\nos.listdir('.')") == "[]"


@pytest.mark.full
def test_limits():
    environment = PythonSandbox(seconds=0.5, memory_mb=256, max_characters=20)
    lost = "Error: the program ended its process, or took more than 0.5 s"
    assert environment.python("print(1)\nwhile True: pass") == lost
    assert environment.python("print(1)\nimport os\nos._exit(0)") == lost
    environment = PythonSandbox(memory_mb=256, max_characters=20)
    assert environment.python("x = bytearray(10**9)").startswith("Error: MemoryError")
    assert environment.python("print('a' * 15 + 'b' * 15)") == (
        "aaaaaaaaaa\n... 11 characters left out ...\nbbbbbbbbb"  # with the newline behind the last b
    )


def test_a_program_cannot_forge_what_is_told():
    code = """
import os
for number in range(3, 10):
    try:
        os.write(number, b'0 {"output": "fake", "error": null}\\n')
    except OSError:
        pass
os.write = None
print("own")
"""
    assert PythonSandbox().python(code) == "own"


def test_options_that_cannot_work():
    for options, message in (({"seconds": 0}, "seconds must be >= 0.1"), ({"memory_mb": 1}, "memory_mb must be >= 64")):
        with pytest.raises(ValueError, match=message):
            PythonSandbox(**options)
    with pytest.raises(TypeError, match="code must be a text, got 5"):
        PythonSandbox().python(5)  # pyrefly: ignore[bad-argument-type]


def test_the_guide_s_config_scores_a_problem_of_gsm8k(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    found = re.search(r"### Python for GSM8K\n+```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    config = yaml.safe_load(found[1])
    del config["data"]["subset"]
    config["data"] |= {"path": "gsm8k.jsonl", "max_prompt_tokens": 1000}
    config["model"] = {"path": "builtin:calculator"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("gsm8k.yaml").write_text(yaml.safe_dump(config))
    Path("gsm8k.jsonl").write_text(json.dumps(PROBLEM))
    call = '<|call|>python("eggs = 16 - 3 - 4\\nprint(eggs * 2)")<|end_call|>'
    for answer, reward in (("She makes $18.\n#### 18", "1"), ("She makes $20.\n#### 20", "0")):
        Path("turns").write_text(f"{call}\n---\n{answer}\n")
        assert main(["gsm8k.yaml", "--turns", "turns"]) == 0
        shown = capsys.readouterr().out
        assert "<|im_start|>tool18<|im_start|>assistant" in shown
        rows = dict(re.findall(r"│ (.*?) +│ (.*?) +│", shown))
        assert (rows["ended"], rows["calls"], rows["reward gsm8k"]) == ("answered", "python", reward)
