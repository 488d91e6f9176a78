"""The YAML that configs and overrides are written in: YAML 1.2's plain values."""

import re
from typing import Any

import yaml

_PLAIN_VALUES = {
    "null": r"(~|null|Null|NULL|)",
    "bool": r"(true|True|TRUE|false|False|FALSE)",
    "int": r"[-+]?[0-9]+",
    "float": r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))",
    "merge": r"<<",
}
"""What unquoted YAML is, beside text: the core schema of YAML 1.2 (section 10.3), and merge keys."""


class Loader(yaml.SafeLoader):
    """PyYAML reads YAML 1.1, where off is a switch, 1e-4 a text, 010 eight and 2026-01-01 a date; people mean 1.2.

    A key that is set twice is refused; PyYAML keeps the last.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012  # PyYAML's way to drop the parent's

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """A mapping with distinct keys."""
        keys = [key.value for key, _ in node.value]
        if twice := [key for number, key in enumerate(keys) if key in keys[:number]]:
            problem = f"{twice[0]!r} is set twice; keep one of them"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Quotes texts that either version of YAML would read as something else."""


Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
for _name, _pattern in _PLAIN_VALUES.items():
    for _class in (Loader, Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^{_pattern}$"), None)
