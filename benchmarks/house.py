"""Measures the size of the code base: lines, files, rooms and imports of the product, its tests and its docs.

    python -m benchmarks.house [REPOSITORY ...]      # one column for each repository

Only the standard library is used, and no code of the repository is run, so that any checkout can be measured. A room is
a folder directly below ``tpu_grpo/``, or a module there. An arrow is an import between two rooms, also in functions.
Floors count the rooms on the longest chain of such imports. A circle is a group of files that import each other.
"""

import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

PACKAGE = "tpu_grpo"
NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str, tree: ast.Module) -> set[int]:
    """Return the numbers of the lines with code: no blank lines, comments or docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                docstrings.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstrings


class House:
    """The Python files of a checkout's product, parsed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = sorted((root / PACKAGE).rglob("*.py"))
        self.texts = {path.relative_to(root): path.read_text(encoding="utf-8") for path in paths}
        self.trees = {path: ast.parse(text, str(path)) for path, text in self.texts.items()}
        self.code = {path: code_lines(self.texts[path], tree) for path, tree in self.trees.items()}

    def room(self, path: Path) -> str:
        """Return the room of a file, relative to the checkout; "" for the package's own ``__init__``."""
        _, *rest = path.with_suffix("").parts
        return "" if rest == ["__init__"] else rest[0]

    def imported(self, path: Path) -> Iterator[Path]:
        """Yield the product's files that a file imports."""
        for node in ast.walk(self.trees[path]):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                yield from self._files(name.split("."))

    def _files(self, parts: list[str]) -> Iterator[Path]:
        if parts[0] != PACKAGE:
            return
        for length in (len(parts), len(parts) - 1):
            for path in (Path(*parts[:length]).with_suffix(".py"), Path(*parts[:length], "__init__.py")):
                if path in self.trees:
                    yield path
                    return

    def arrows(self) -> set[tuple[str, str]]:
        """Return every pair of (room, imported room)."""
        pairs = {(self.room(path), self.room(other)) for path in self.trees for other in self.imported(path)}
        return {(room, other) for room, other in pairs if room != other}

    def floors(self) -> int:
        """Return the number of rooms on the longest chain of imports."""
        arrows = self.arrows()

        @cache
        def height(room: str) -> int:
            return 1 + max((height(other) for this, other in arrows if this == room), default=0)

        return max(height(self.room(path)) for path in self.trees)

    def circles(self) -> list[list[Path]]:
        """Return the groups of files that reach each other by imports."""
        below = {path: set(self.imported(path)) - {path} for path in self.trees}
        reached: dict[Path, set[Path]] = {}
        for path in below:
            seen, waiting = set(), [path]
            while waiting:
                waiting.extend(found := below[waiting.pop()] - seen)
                seen |= found
            reached[path] = seen
        groups = {frozenset({b for b in reached[a] if a in reached[b]}) for a in below if a in reached[a]}
        return [sorted(group) for group in groups]

    def imports_share(self) -> float:
        """Return the share of the code's lines that are imports."""
        lines = 0
        for path, tree in self.trees.items():
            nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
            spans = {line for node in nodes for line in range(node.lineno, (node.end_lineno or 0) + 1)}
            lines += len(spans & self.code[path])
        return lines / sum(map(len, self.code.values()))

    def functions(self) -> list[int]:
        """Return the number of lines of code of every function, ``def`` included."""
        return [
            len(self.code[path].intersection(range(node.lineno, (node.end_lineno or 0) + 1)))
            for path, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, FUNCTIONS)
        ]

    def large_classes(self) -> list[str]:
        """Return the classes with more than 20 methods."""
        return [
            node.name
            for tree in self.trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and sum(isinstance(part, FUNCTIONS) for part in node.body) > 20
        ]

    def settings(self) -> int:
        """Return the number of typed attributes of all classes in ``config/`` that are sections of a config."""
        trees = [tree for path, tree in self.trees.items() if self.room(path) == "config"]
        classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

        def is_section(name: str) -> bool:
            bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name)] if name in classes else []
            return "Section" in bases or any(map(is_section, bases))

        sections = [node for name, node in classes.items() if is_section(name)]
        return sum(isinstance(part, ast.AnnAssign) for node in sections for part in node.body)


def count(root: Path) -> dict[str, str]:
    """Measure one checkout; returns figures, as text, by name."""
    house = House(root)
    names = Counter(path.name for path in house.trees if path.name != "__init__.py" and house.room(path) != "cli")
    functions, rooms = house.functions(), {house.room(path) for path in house.trees} - {"", "__main__"}
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in (root / "docs").rglob("*.md"))
    tests = [path.read_text(encoding="utf-8") for path in (root / "tests").rglob("*.py")]
    return {
        "lines of product": f"{sum(len(text.splitlines()) for text in house.texts.values()):,}",
        "of them code": f"{sum(map(len, house.code.values())):,}",
        "files": f"{len(house.trees)}",
        "files below 50 lines": f"{sum(len(text.splitlines()) < 50 for text in house.texts.values())}",
        "file names that occur twice": f"{sum(times > 1 for times in names.values())}",
        "rooms": f"{len(rooms)}",
        "arrows": f"{len(house.arrows())}",
        "floors": f"{house.floors()}",
        "circles": f"{len(house.circles())}",
        "imports, share of code": f"{house.imports_share():.1%}",
        "functions": f"{len(functions):,}",
        "code of a function, median": f"{statistics.median(functions):g}",
        "functions of 3 lines or fewer": f"{sum(length <= 3 for length in functions):,}",
        "classes above 20 methods": f"{len(house.large_classes())}",
        "settings": f"{house.settings()}",
        "lines of tests": f"{sum(len(text.splitlines()) for text in tests):,}",
        "functions of tests": f"{sum(len(re.findall(r'^ *(?:async )?def test_', text, re.M)) for text in tests):,}",
        "words of docs": f"{words:,}",
    }


def main(arguments: Sequence[str]) -> None:
    roots = [Path(argument) for argument in arguments] or [Path(__file__).resolve().parents[1]]
    counted = [count(root) for root in roots]
    for name in counted[0]:
        print(f"{name:32}" + "".join(f"{figures[name]:>12}" for figures in counted))


if __name__ == "__main__":
    main(sys.argv[1:])
