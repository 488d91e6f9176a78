"""Configs and overrides are written in this YAML: it has the plain values of YAML 1.2, and no tags beyond them."""

import re
from typing import Any

import yaml

from tpu_grpo.config.section import BareSwitch

_TAG = "tag:yaml.org,2002:"
_PLAIN_VALUES = {
    "null": r"(~|null|Null|NULL|)",
    "bool": r"(true|True|TRUE|false|False|FALSE)",
    "int": r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)",
    "float": r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))",
    "merge": r"<<",
}
"""Unquoted YAML is one of these or else a text: the core schema of YAML 1.2 (section 10.3), and merge keys."""
_BARE_SWITCHES = ("yes", "no", "on", "off")
MOST_NODES = 200_000
"""The most values of a document, those that aliases repeat included."""


def read_yaml(text: str) -> Any:
    """Read a document of this dialect.

    Raises:
        yaml.YAMLError, ValueError: for what is none, is nested too deep, or repeats itself too often by aliases.
    """
    try:
        return yaml.load(text, Loader)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


class Loader(yaml.SafeLoader):
    """PyYAML reads YAML 1.1, where off is a switch, 1e-4 a text, 010 eight and 2026-01-01 a date; people mean 1.2.

    A key that is set twice is refused, where PyYAML keeps the last; so is a value that contains itself.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012  # PyYAML's way to drop the parent's
    yaml_constructors = {  # noqa: RUF012  # and its table of tags; dates and bytes are of no use to a setting
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (f"{_TAG}null", f"{_TAG}float", f"{_TAG}seq", f"{_TAG}map", None)
    }

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Compose a mapping whose keys differ both as texts and as values: 1, "1", 01 and 1.0 are one key."""
        node: Any = super().compose_mapping_node(anchor)
        texts, values = set(), set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            value = self.construct_object(key) if key.tag in self.yaml_constructors else key.value
            if key.value in texts or value in values:
                problem = f"{key.value!r} is set twice; keep one of them"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
            texts.add(key.value)
            values.add(value)
        return node

    def get_single_node(self) -> Any:
        """Compose the document, whose aliases must not multiply: nine levels of nine aliases are 300 bytes."""
        node: Any = super().get_single_node()
        sizes: dict[int, int] = {}
        if node is not None and _size(node, sizes) > MOST_NODES:
            raise ValueError(f"it must have at most {MOST_NODES} values, with those that its aliases repeat")
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Construct a value with all that it contains, so that PyYAML refuses one that contains itself."""
        return super().construct_object(node, deep=True)


def _size(node: Any, sizes: dict[int, int]) -> int:
    """Count a node and all in it, as often as it is repeated; ``sizes`` remembers them, and 1 for a node in itself."""
    if id(node) not in sizes:
        sizes[id(node)] = 1
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        found = 0 if isinstance(node, yaml.ScalarNode) else sum(_size(part, sizes) for part in parts)
        sizes[id(node)] = 1 + min(found, 2 * MOST_NODES)
    return sizes[id(node)]


class Dumper(yaml.SafeDumper):
    """This dumper quotes texts that either version of YAML would read as something else."""


def _text(loader: Loader, node: yaml.ScalarNode) -> str:
    bare = node.style is None and node.value.lower() in _BARE_SWITCHES
    return BareSwitch(node.value) if bare else node.value


def _bool(loader: Loader, node: yaml.ScalarNode) -> bool:
    if re.fullmatch(_PLAIN_VALUES["bool"], node.value) is None:
        raise ValueError(f"a switch must be true or false, got {node.value!r}")
    return node.value.lower() == "true"


def _int(loader: Loader, node: yaml.ScalarNode) -> int:
    return int(node.value, {"0o": 8, "0x": 16}.get(node.value[:2], 10))


Loader.add_constructor(f"{_TAG}str", _text)
Loader.add_constructor(f"{_TAG}bool", _bool)
Loader.add_constructor(f"{_TAG}int", _int)
for _name, _pattern in _PLAIN_VALUES.items():
    for _class in (Loader, Dumper):
        _class.add_implicit_resolver(f"{_TAG}{_name}", re.compile(f"^{_pattern}$"), None)
