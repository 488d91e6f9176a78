"""Environments are found and fitted to the data and the options, and errors say what does not fit."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.goldens import cases, compare, labelled
from tpu_grpo.environments import environment_classes
from tpu_grpo.environments.actions import LoadedEnvironment
from tpu_grpo.environments.environment_classes import load_environment
from tpu_grpo.records.errors import EpisodeError

LABELLED = Path(__file__).with_name("labelled.txt")

TOOL = '''
    def add(self, by: int) -> int:
        """Add.

        Args:
            by: How much.
        """
        return by
'''
RESET = "    def reset(self, **columns): pass\n"
CLASSES = Path(__file__).with_name("classes.txt")


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Load the class E of a file."""
    monkeypatch.chdir(tmp_path)

    def load(source: str, **options: Any) -> LoadedEnvironment:
        (tmp_path / "mine.py").write_text(source)
        return load_environment("mine.py:E", options)

    return load


def test_a_class_of_tools(load):
    loaded = load(f"class E:\n    def __init__(self, size=3): pass\n{RESET}{TOOL}", size=4)
    assert loaded == LoadedEnvironment(
        name="E",
        source="mine.py:E",
        takes="calls",
        tools=(
            {
                "type": "function",
                "function": {
                    "name": "add",
                    "description": "Add.",
                    "parameters": {
                        "type": "object",
                        "properties": {"by": {"type": "integer", "description": "How much."}},
                        "required": ["by"],
                    },
                    "return": {"type": "integer"},
                },
            },
        ),
        options={"size": 4},
    )


def test_what_is_no_tool(load):
    others = "".join(f"    def {name}(self): pass\n" for name in ("get_reward", "get_turn_rewards", "close", "_own"))
    loaded = load(f"class E:\n    field = 3\n    @staticmethod\n    def static(): pass\n{RESET}{TOOL}{others}")
    assert [tool["function"]["name"] for tool in loaded.tools] == ["add"]
    assert loaded.gives_reward
    assert loaded.gives_turn_rewards


def test_what_gives_a_reward(load):
    for method in ("get_reward", "get_turn_rewards"):
        loaded = load(f"class E:\n{RESET}{TOOL}    def {method}(self): pass\n")
        assert (loaded.gives_reward, loaded.gives_turn_rewards) == (True, method == "get_turn_rewards")
    loaded = load(f"class E:\n{RESET}{TOOL}")
    assert not loaded.gives_reward
    assert not loaded.gives_turn_rewards


ASYNC_RESET, ASYNC_TOOL = RESET.replace("def ", "async def "), TOOL.replace("def ", "async def ")
REWARD, ASYNC_REWARD = "    def get_reward(self): pass\n", "    async def get_reward(self): pass\n"
STEP, ASYNC_STEP = "    def step(self, action): pass\n", "    async def step(self, action): pass\n"


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        (RESET + TOOL + REWARD, (False, False)),
        (RESET + TOOL + ASYNC_REWARD, (False, True)),
        (ASYNC_RESET + TOOL, (False, True)),
        (RESET + ASYNC_TOOL, (False, True)),
        (ASYNC_RESET + ASYNC_TOOL + TOOL.replace("add", "subtract"), (False, True)),
        (ASYNC_RESET + ASYNC_TOOL + REWARD, (True, True)),
        (ASYNC_RESET + ASYNC_REWARD, (True, True)),
        (RESET + STEP, (False, False)),
        (RESET + ASYNC_STEP, (False, True)),
        (ASYNC_RESET + ASYNC_STEP, (True, True)),
    ],
)
def test_a_class_shares_a_loop_if_nothing_in_it_could_block_one(load, methods: str, expected: tuple[bool, bool]):
    loaded = load(f"class E:\n{methods}")
    assert (loaded.is_async, loaded.awaits) == expected


def test_a_class_of_steps(load):
    loaded = load("class E:\n    def reset(self): pass\n    def step(self, action): pass\n    def close(self): pass\n")
    assert (loaded.takes, loaded.tools, loaded.gives_reward, loaded.gives_turn_rewards) == ("texts", (), True, True)


def test_an_adapter_that_is_named(load):
    source = "class E:\n    def reset(self): pass\n    def step(self, action): pass\n    def legal_moves(self): pass\n"
    with pytest.raises(EpisodeError, match="legal_moves is a tool"):
        load(source)
    assert load(source, adapter="gym").takes == "texts"
    for wrong in ("jim", ["gym"]):
        match = re.escape(f"must be one of agent, tunix, openenv, gym, tools, got {wrong!r}")
        with pytest.raises(EpisodeError, match=match):
            load(source, adapter=wrong)


def test_a_tool_may_be_called_step(load):
    source = f"class E:\n{RESET}{TOOL.replace('def add', 'def step')}"
    assert load(source).takes == "texts"
    assert [tool["function"]["name"] for tool in load(source, adapter="tools").tools] == ["step"]


@pytest.mark.parametrize(("source", "told"), cases(CLASSES))
def test_what_does_not_fit_is_named(load, source: str, told: str):
    with pytest.raises(EpisodeError) as caught:
        load(source.replace("↵", "\n").replace("TOOL", TOOL).replace("RESET", RESET))
    compare(CLASSES, source, told, str(caught.value).replace("\n", "↵").replace(str(Path.cwd()), "HERE"))


TYPES = """
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Dict, List, Literal, Optional, TypedDict, Union
class Color(enum.Enum):
    RED = "red"
@dataclass
class Point:
    x: int
class Written(TypedDict):
    x: int
"""


NUMBER = {"type": "number"}


def taking(parameter: str) -> str:
    """An environment whose tool has a parameter a."""
    tool = f'    def look(self, {parameter}) -> "Point":\n        """Look.\n\n        Args:\n            a: Where."""'
    return f"{TYPES}class E:\n{RESET}{tool}\n"


@pytest.mark.parametrize(("parameter", "said"), labelled(LABELLED, "refused_hints"))
def test_what_no_call_could_give_is_refused(load, parameter: str, said: str):
    with pytest.raises(EpisodeError, match=re.escape(said)):
        load(taking(parameter))


@pytest.mark.parametrize(("hint", "schema"), labelled(LABELLED, "hints"))
def test_what_a_call_can_give(load, hint: str, schema: dict[str, Any]):
    """What the tool returns has a type that JSON does not know, which does not matter."""
    [tool] = load(taking(f"a: {hint}")).tools
    assert tool["function"]["parameters"]["properties"] == {"a": {**schema, "description": "Where."}}


def test_options_that_a_constructor_does_not_take(load):
    with pytest.raises(EpisodeError, match=r"does not take the options \['size'\]; its constructor takes: none"):
        load(f"class E:\n{RESET}{TOOL}", size=3)


def test_shipped_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment_classes, "SHIPPED", {"counting": "tests.environments.games:Counter"})
    loaded = load_environment("counting", {})
    assert loaded.source == "tests.environments.games:Counter"
    with pytest.raises(EpisodeError, match="'countin' is not a shipped environment; did you mean counting"):
        load_environment("countin", {})


# --- the data --------------------------------------------------------------------------------------------------------


def test_columns_that_reset_requires(load):
    assert load_environment("tests.environments.games:Counter", {}, "count").requires == ("target",)
    assert load(f"class E:\n    def reset(self, a, seed, *, b, c=1, **rest): pass\n{TOOL}").requires == ("a", "b")
    with pytest.raises(EpisodeError, match="environment E: reset must take its arguments by name, got .*'a'.*drop"):
        load(f"class E:\n    def reset(self, a, /): pass\n{TOOL}")
