"""What all environments that ship have in common."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import get_json_schema

from tpu_grpo.environments.environment_classes import load_environment
from tpu_grpo.environments.shipped import SHIPPED
from tpu_grpo.models.tasks import TASKS
from tpu_grpo.models.tokenizers import build_tool_tokenizer

OWN = [name for name in SHIPPED if name != "textarena"]
"""Those that need no extra."""


def found(name: str) -> Any:
    module, _, cls = SHIPPED[name].partition(":")
    return getattr(importlib.import_module(module), cls)


def tools_of(cls: Any) -> list[Any]:
    public = [m for n, m in inspect.getmembers(cls, inspect.isfunction) if not n.startswith("_")]
    return [method for method in public if method.__name__ not in ("reset", "step", "close", "get_reward")]


@pytest.mark.parametrize("name", OWN)
def test_each_has_tools_with_schemas_or_a_step(name: str):
    cls = found(name)
    assert callable(cls.reset)
    tools = tools_of(cls)
    assert bool(tools) != hasattr(cls, "step")
    for tool in tools:
        schema = get_json_schema(getattr(cls.__new__(cls), tool.__name__))["function"]
        assert schema["description"]
        assert schema["parameters"]["properties"]


def test_the_builtin_models_teacher_knows_the_calculator():
    tokenizer, asked = build_tool_tokenizer(), [{"role": "user", "content": "?"}]
    prompts = [
        tokenizer.apply_chat_template(asked, tools=[dict(tool) for tool in tools], add_generation_prompt=True)
        for tools in (load_environment("calculator", {}).tools, TASKS["calculator"].tools)
    ]
    assert prompts[0] == prompts[1]


def test_importing_them_imports_neither_jax_nor_what_is_slow():
    modules = sorted({source.partition(":")[0] for source in map(SHIPPED.__getitem__, OWN)})
    slow = ("jax", "reasoning_gym", "transformers", "numpy")
    code = f"import sys, {', '.join(modules)}\nprint([name for name in {slow} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_the_guide_lists_each():
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    assert [name for name in SHIPPED if f"| `{name}` |" not in page] == []
