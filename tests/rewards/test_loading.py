"""Rewards are found and fitted to the data, and errors say what does not fit."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.goldens import cases, compare
from tests.rewards.conftest import MakeFile
from tpu_grpo.config import RewardSpec
from tpu_grpo.records.errors import RewardError
from tpu_grpo.rewards import SHIPPED, load_reward, open_rewards, repeats_itself, reward_functions
from tpu_grpo.rewards.reward_call import Call, Caller, RewardBatch

FUNCTIONS = Path(__file__).with_name("functions.txt")
OPTIONS = Path(__file__).with_name("options.txt")
"""A reward, the columns of the data, and its options."""
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


@pytest.mark.parametrize(("source", "told"), cases(FUNCTIONS))
def test_functions_that_do_not_fit(reward_file: MakeFile, source: str, told: str):
    path = reward_file(source.replace("↵", "\n"))
    with pytest.raises(RewardError) as caught:
        load(f"{path}:f")
    compare(FUNCTIONS, source, told, str(caught.value))


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "told"), cases(OPTIONS))
def test_names_and_options_are_judged_before_the_run(given: str, told: str):
    name, columns, options = given.split(" | ")
    with pytest.raises(RewardError) as caught:
        load(name, tuple(columns.split(",")), **yaml.safe_load(options))
    compare(OPTIONS, given, told, str(caught.value).replace(str(Path.cwd()), "HERE"))


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
