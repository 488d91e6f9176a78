"""Rewards are found and fitted to the data, and errors say what does not fit."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tests.rewards.conftest import MakeFile
from tpu_grpo.config import RewardSpec
from tpu_grpo.records.errors import RewardError
from tpu_grpo.rewards import SHIPPED, load_reward, open_rewards, repeats_itself, reward_functions
from tpu_grpo.rewards.reward_call import Call, Caller, RewardBatch

COLUMNS = ("question", "answer")
TABLE = {"prompts": ["p"], "completions": ["c"], "question": ["q"], "answer": ["a"]}
RETURNS_ITS_ARGUMENTS = "def f({}):\n    return sorted(locals().items())\n"


def load(name: str, columns: tuple[str, ...] = COLUMNS, **options: Any) -> Call:
    return load_reward(RewardSpec(name=name, options=options), columns)


def call(loaded: Call) -> Any:
    """What the function returns for TABLE."""
    columns = {name: TABLE[name] for name in loaded.arguments}
    return Caller(loaded, reward_functions.find_reward(loaded.source)).raw_outputs(RewardBatch(columns, step=7, size=1))


# --- what a function is called with ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signature", "options", "expected"),
    [
        ("prompts, completions, answer", {}, {"prompts": ["p"], "completions": ["c"], "answer": ["a"]}),
        ("completions", {}, {"completions": ["c"]}),
        ("completions, limit=3", {}, {"completions": ["c"], "limit": 3}),
        ("completions, limit=3", {"limit": 5}, {"completions": ["c"], "limit": 5}),
        ("completions, *, limit", {"limit": 5}, {"completions": ["c"], "limit": 5}),
        ("completions, answer", {"answer": "fixed"}, {"completions": ["c"], "answer": "fixed"}),
        ("completions, answer=None", {}, {"completions": ["c"], "answer": ["a"]}),
    ],
)
def test_a_function_gets_what_it_declares(reward_file: MakeFile, signature: str, options: dict, expected: dict):
    path = reward_file(RETURNS_ITS_ARGUMENTS.format(signature))
    assert call(load(f"{path}:f", **options)) == sorted(expected.items())


def test_a_function_with_kwargs_gets_everything(reward_file: MakeFile):
    path = reward_file("def f(prompts, **rest):\n    return rest\n")
    found = call(load(f"{path}:f", limit=5))
    assert callable(found.pop("log_metric"))
    assert found.pop("trainer_state").global_step == 7
    assert found == {"completions": ["c"], "question": ["q"], "answer": ["a"], "limit": 5}


def test_a_data_column_never_hides_the_texts(reward_file: MakeFile):
    path = reward_file(RETURNS_ITS_ARGUMENTS.format("completions"))
    assert load(f"{path}:f", columns=("completions", "answer")).arguments == ("completions",)


def test_a_function_cannot_change_what_the_next_one_sees(reward_file: MakeFile):
    path = reward_file("def f(completions):\n    completions.clear()\n")
    call(load(f"{path}:f"))
    assert TABLE["completions"] == ["c"]


NEEDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "environment": ((), {}),
    "format": ((), {}),
    "regex": (("answer",), {"pattern": r"(\d+)"}),
    "integer_answer": ((), {}),
    "think_answer": ((), {}),
    "xml_count": ((), {}),
    "length": ((), {"max_tokens": 2, "margin": 3}),
    "overlong": ((), {"max_tokens": 4, "buffer": 3}),
    "cosine_length": (("answer",), {"max_tokens": 10}),
    "repetition": ((), {}),
    "language": ((), {"language": "en", "min_letters": 3}),
    "instructions": (("instruction_id_list", "kwargs"), {}),
    "json_schema": ((), {"schema": {"type": "object"}}),
    "countdown": (("target", "nums"), {}),
    "reasoning_gym": (("metadata", "answer"), {}),
    "python_tests": (("tests",), {}),
    "judge": ((), {"url": "http://127.0.0.1:1", "model": "m"}),
}
"""Columns and options that shipped rewards need; the rest needs the answer only."""


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_rewards_load_on_what_they_need(name: str):
    columns, options = NEEDS.get(name, (("answer",), {}))
    loaded = load(name, columns, **options)
    assert loaded.name == name
    assert set(columns) <= set(loaded.arguments)
    if columns:
        with pytest.raises(RewardError, match=f"requires the parameter '{columns[0]}'"):
            load(name, (), **options)


def test_the_guide_lists_every_shipped_reward():
    pages = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    assert [name for name in SHIPPED if f"| `{name}` |" not in pages] == []


def test_an_entry_point_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch):
    points = [
        EntryPoint("brief", "tests.rewards.faulty:good", "tpu_grpo.rewards"),
        EntryPoint("gone", "nowhere:f", "x"),
    ]
    monkeypatch.setattr(reward_functions, "entry_points", lambda group: points if group == "tpu_grpo.rewards" else [])
    assert load("brief", ()).name == "brief"
    with pytest.raises(RewardError, match="reward gone, an entry point at nowhere:f, failed to load: ModuleNotFound"):
        load("gone", ())
    with pytest.raises(RewardError, match=r"did you mean brief\? \(shipped: .*; installed: brief, gone; your own:"):
        load("breif", ())


# --- files and modules -----------------------------------------------------------------------------------------------


def test_a_file_may_import_its_neighbours_and_leaves_the_search_path_alone(reward_file: MakeFile):
    reward_file("VALUE = 0.25\n", "neighbour_of_rewards.py")
    path = reward_file("from neighbour_of_rewards import VALUE\ndef f(completions):\n    return [VALUE]\n")
    before = list(sys.path)
    assert call(load(f"{path}:f")) == [0.25]
    assert sys.path == before
    assert "my_rewards" not in sys.modules
    sys.modules.pop("neighbour_of_rewards")


def test_two_functions_of_a_file_share_its_state_and_an_edited_file_is_read_again(reward_file: MakeFile):
    source = (
        "seen = []\ndef f(completions):\n    seen.append(1)\n    return seen\ndef g(completions):\n    return seen\n"
    )
    path = reward_file(source)
    f, g = load(f"{path}:f"), load(f"{path}:g")
    assert call(f) is call(g)
    reward_file(source.replace("append(1)", "append(2)"))
    assert call(load(f"{path}:f")) == [2]


def test_files_may_hold_dataclasses(reward_file: MakeFile):
    path = reward_file(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass C:\n    x: int\ndef f(completions):\n    return [C(1).x]\n"
    )
    assert call(load(f"{path}:f")) == [1]


def test_a_module_is_found_by_its_dotted_name(reward_file: MakeFile):
    reward_file("def f(completions):\n    return [0.5]\n", "rewards_module_for_test.py")
    loaded = load("rewards_module_for_test:f")
    assert (loaded.name, call(loaded)) == ("f", [0.5])
    sys.modules.pop("rewards_module_for_test")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm8", r"'gsm8' is not a shipped reward; did you mean gsm8k\? \(shipped: .*gsm8k.*; your own: path"),
        ("zzz", r"'zzz' is not a shipped reward; \(shipped: .*; your own: path\.py:function or package\.module:func"),
        ("missing.py:f", r"reward file missing\.py must be readable from .*FileNotFoundError; correct the path"),
        ("no.such.module:f", r"reward module no\.such\.module failed to import: ModuleNotFoundError: .*path\.py:func"),
        ("my_rewards.py:", r"must read path\.py:function, got 'my_rewards\.py:'"),
        (":f", r"must read path\.py:function, got ':f'"),
        ("my_rewards.py:a b", r"must read path\.py:function"),
    ],
)
def test_names_that_lead_nowhere(reward_file: MakeFile, name: str, message: str):
    with pytest.raises(RewardError, match=message):
        load(name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_package_here", "my_rewards.py failed to import: ModuleNotFoundError: No module named"),
        ("def f(:", "my_rewards.py failed to import: SyntaxError"),
        ("1 / 0", "failed to import: ZeroDivisionError: division by zero"),
        ("raise SystemExit(0)", "failed to import: SystemExit: 0"),
    ],
)
def test_files_that_fail_to_import(reward_file: MakeFile, source: str, message: str):
    before = set(sys.modules)
    path = reward_file(source)
    with pytest.raises(RewardError, match=message) as caught:
        load(f"{path}:f")
    assert f"failed to import: {type(caught.value.__cause__).__name__}: " in str(caught.value)
    assert not [m for m in set(sys.modules) - before if m.startswith("tpu_grpo_reward")]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "from math import sqrt\nfrom json import loads\ndef a(completions): ...\ndef b(completions): ...\nx = 1\n",
            r"my_rewards\.py has no function 'f'; functions there: a, b$",
        ),
        ("x = 1", r"has no function 'f'; functions there: none"),
        ("f = 1", r"my_rewards\.py:f must be a function of a batch, got a int; name a function"),
        ("class f: ...", r"reward my_rewards\.py:f must have a method __call__ that scores, got a class without"),
        (
            "class f:\n    def __init__(self, url): ...\n    def __call__(self, completions): ...",
            "requires the parameter 'url'",
        ),
        ("def f(prompts, /, completions): ...", r"must take its arguments by name, got positional-only \['prompts'\]"),
        ("f = dict.fromkeys", "must (have a signature to check|take its arguments by name)"),
        (
            "def f(completions, solution): ...",
            r"requires the parameter 'solution', which is neither a column of the data nor an option; available: "
            "prompts, completions, question, answer. Add the column",
        ),
        ("def f(completions, solution, **rest): ...", "requires the parameter 'solution'"),
    ],
)
def test_functions_that_do_not_fit(reward_file: MakeFile, source: str, message: str):
    path = reward_file(source)
    with pytest.raises(RewardError, match=message):
        load(f"{path}:f")


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "columns", "options", "message"),
    [
        (
            "gsm8k",
            COLUMNS,
            {"flexibel": True},
            r"gsm8k does not take the options \['flexibel'\]; it takes: completions, ",
        ),
        ("gsm8k", COLUMNS, {"flexible": "no"}, "gsm8k, options .*flexible must be true or false, got 'no'"),
        ("gsm8k", COLUMNS, {"completions": "x"}, r"options must not be called \['completions'\]"),
        (
            "gsm8k",
            ("question",),
            {},
            "gsm8k requires the parameter 'answer'.*available: prompts, completions, question",
        ),
        ("format", COLUMNS, {"pattern": "("}, r"pattern must be a regular expression, got '\(' \(missing \)"),
        ("math", COLUMNS, {"seconds": 0}, "math, options .*seconds must be >= 1, got 0"),
        ("python_tests", ("tests",), {"memory_mb": "1"}, "memory_mb must be a number, got '1'"),
        ("format", COLUMNS, {"pattern": 5}, "pattern must be a string, got a int"),
        (
            "regex",
            ("answer", "pattern"),
            {},
            "pattern must be a string, got a list; where the data has a column",
        ),
        ("gsm8k", COLUMNS, {"after_thinking": "yes"}, "gsm8k: after_thinking must be true, false or null, got 'yes'"),
        ("length", COLUMNS, {"after_thinking": True}, r"length does not take the options \['after_thinking'\]"),
    ],
)
def test_options_are_judged_before_the_run(name: str, columns: tuple[str, ...], options: dict, message: str):
    with pytest.raises(RewardError, match=message):
        load(name, columns, **options)


# --- the set ---------------------------------------------------------------------------------------------------------


def test_two_rewards_cannot_share_a_name(reward_file: MakeFile):
    path = reward_file("def gsm8k(completions):\n    return [0.0]\n")
    with pytest.raises(RewardError, match=r"own in the metrics, got \['gsm8k'\] twice; give one of them a label"):
        open_rewards([RewardSpec(name="gsm8k"), RewardSpec(name=f"{path}:gsm8k")], COLUMNS)


@pytest.mark.parametrize(
    ("name", "deterministic", "repeats"),
    [
        ("gsm8k", None, True),
        ("judge", None, False),
        ("judge", True, True),
        ("gsm8k", False, False),
        ("my_rewards.py:short", None, True),
        ("my_rewards.py:asks_a_model", False, False),
    ],
)
def test_which_rewards_hosts_compare(name: str, deterministic: bool | None, repeats: bool) -> None:
    assert repeats_itself(RewardSpec(name=name, deterministic=deterministic)) is repeats
