"""The YAML dialect of configs and overrides: unquoted values are read as in YAML 1.2, and other tags are refused."""

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
"""Patterns of unquoted values; any other is text. The core schema of YAML 1.2 (section 10.3), and merge keys."""
_BARE_SWITCHES = ("yes", "no", "on", "off")
MOST_NODES = 200_000
"""The most values in a document, including those that aliases repeat."""


def read_yaml(text: str) -> Any:
    """Read a document of this dialect.

    Raises:
        yaml.YAMLError, ValueError: for invalid YAML, too deep nesting, or too many values by aliases.
    """
    try:
        return yaml.load(text, Loader)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


class Loader(yaml.SafeLoader):
    """Reads YAML 1.2. PyYAML reads 1.1, where off is a boolean, 1e-4 is text, 010 is eight and 2026-01-01 is a date.

    Unlike in PyYAML, a key that is set twice is refused; so is a value that contains itself.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012  # this is how PyYAML drops inherited ones
    yaml_constructors = {  # noqa: RUF012  # tags; settings need no dates or bytes
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (f"{_TAG}null", f"{_TAG}float", f"{_TAG}seq", f"{_TAG}map", None)
    }

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Compose a mapping; refuse keys that are equal as texts or as values: 1, "1", 01 and 1.0 are one key."""
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
        """Compose the document; refuse more than MOST_NODES values, which nested aliases in 300 bytes can exceed."""
        node: Any = super().get_single_node()
        sizes: dict[int, int] = {}
        if node is not None and _size(node, sizes) > MOST_NODES:
            raise ValueError(f"it must have at most {MOST_NODES} values, with those that its aliases repeat")
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Construct a value together with its content, so that PyYAML refuses a value that contains itself."""
        return super().construct_object(node, deep=True)


def _size(node: Any, sizes: dict[int, int]) -> int:
    """Count a node and its content, with repetitions; ``sizes`` caches counts, and a node inside itself counts 1."""
    if id(node) not in sizes:
        sizes[id(node)] = 1
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        found = 0 if isinstance(node, yaml.ScalarNode) else sum(_size(part, sizes) for part in parts)
        sizes[id(node)] = 1 + min(found, 2 * MOST_NODES)
    return sizes[id(node)]


class Dumper(yaml.SafeDumper):
    """Quotes texts that YAML 1.1 or 1.2 would read as something else."""


def _text(loader: Loader, node: yaml.ScalarNode) -> str:
    try:
        node.value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"a text must be Unicode, got {node.value!r}, which has half of a surrogate pair") from None
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
