"""The shipped environments by their names in a config; docs/environments.md describes each.

Each environment is a class whose public methods are tools, as for TRL's ``environment_factory``, or a class with a
method ``step``. The modules do not import jax, and import slow libraries only when needed.
"""

from collections.abc import Mapping
from types import MappingProxyType

_HERE = __name__

SHIPPED: Mapping[str, str] = MappingProxyType(
    {
        "agent": f"{_HERE}.agent:Agent",  # any program that asks the policy for turns, by HTTP
        "calculator": f"{_HERE}.calculator:Calculator",  # a tool that adds two whole numbers
        "arithmetic": f"{_HERE}.calculator:Arithmetic",  # a tool that computes an expression
        "guessing": f"{_HERE}.guessing:Guessing",  # a secret number, to be found by guesses: higher, lower
        "python_sandbox": f"{_HERE}.python_sandbox:PythonSandbox",  # a tool that runs Python in a sandbox
        "reasoning_gym": f"{_HERE}.puzzles:Puzzle",  # several tries at a puzzle of reasoning-gym, each with its score
        "search": f"{_HERE}.search:Search",  # a tool that searches a corpus on disk
        "textarena": f"{_HERE}.textarena_games:TextArena",  # games of textarena, which is an extra
    }
)
"""Name -> the place of the class: package.module:Class."""
