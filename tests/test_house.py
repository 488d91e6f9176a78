"""The counts of benchmarks/house.py, on a house of three rooms that was counted by hand."""

from pathlib import Path

from benchmarks.house import count

FILES = {
    "tpu_grpo/__init__.py": '"""The package."""\n',
    "tpu_grpo/api.py": "from tpu_grpo.run.parts import build\n\n\ndef train():\n    # builds\n    return build()\n",
    "tpu_grpo/run/__init__.py": "",
    "tpu_grpo/run/parts.py": (
        'import tpu_grpo.config.run\n\n\ndef build():\n    """Build.\n\n    All."""\n'
        '    x = """a\n    b"""\n    return x\n'
    ),
    "tpu_grpo/run/loop.py": "def f():\n    from tpu_grpo.run import round\n",
    "tpu_grpo/run/round.py": "import tpu_grpo.run.loop\n",
    "tpu_grpo/config/run.py": "class Run(Section):\n    seed: int = 0\n    name: str\n",
    "tests/test_a.py": "def test_a():\n    pass\n",
    "docs/a.md": "# One two\n\nthree\n",
}


def test_a_small_house_is_counted_as_by_hand(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert count(tmp_path) == {
        "lines of product": "23",
        "of them code": "14",
        "files": "7",
        "files below 50 lines": "7",
        "file names that occur twice": "0",
        "rooms": "3",
        "arrows": "2",
        "floors": "3",
        "circles": "1",
        "imports, share of code": "28.6%",
        "functions": "3",
        "code of a function, median": "2",
        "functions of 3 lines or fewer": "2",
        "classes above 20 methods": "0",
        "settings": "2",
        "lines of tests": "2",
        "functions of tests": "1",
        "words of docs": "4",
    }
