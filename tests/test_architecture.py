"""The rules of the design that a reader of one file cannot see: who imports whom.

Rooms may import rooms of lower levels, and nothing of their own level: the stages are joined in run. So nothing of the
core imports what stands on it, also not for its types.
Everything is read from the source with ``ast``; imports inside functions count like those at the top.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from tests.goldens import rows

REPOSITORY = Path(__file__).resolve().parent.parent

LEVELS = (
    {"records"},
    {"config"},
    {"workers", "hosts"},
    {"algorithms"},
    {"models", "observe"},
    {"data", "engine", "rewards", "weights", "learner"},
    {"run"},
    {"environments", "tunix_loop", "launching", "report"},
    {"serving", "planning"},
    {"checking"},
    {"cli"},
    {"api"},
    {""},
    {"scripts", "__main__"},
)
"""``""`` is tpu_grpo/__init__.py, which may name what lies below it, but imports nothing until it is asked to. The
rooms up to run are the core, which finds those above it by the names of ADDITIONS (config/plugins.py)."""
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}

ONLY_IN = {"sgl_jax": ("engine",), "tunix.rl": ("tunix_loop", "learner/forward.py")}
"""Libraries that some rooms or files keep to themselves."""

PICKLES = {
    "tpu_grpo/workers/channel.py": "the main process pickles for workers, which unpickle that; never the other way",
    "tpu_grpo/workers/attributes.py": "one worker pickles an environment's attributes, and another opens them",
}
"""Files that may import pickle, or what pickles by itself, and why: to unpickle is to run what somebody wrote."""
PICKLING = ("pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing.connection")

BROAD_EXCEPTS = dict(rows(Path(__file__).with_name("broad_excepts.txt")))
"""Functions that may catch every exception, and why."""


@dataclass(frozen=True)
class Source:
    """One file of the product."""

    path: Path
    name: str
    """Relative to the repository, with slashes."""

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.name)

    @property
    def room(self) -> str:
        """``engine`` for tpu_grpo/engine/engine.py, ``api`` for tpu_grpo/api.py; "" for the package."""
        first, *rest = Path(self.name).with_suffix("").parts
        return (rest[0] if rest != ["__init__"] else "") if first == "tpu_grpo" else first

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """(line, dotted name) of everything imported, at any depth, also by ``import_module("...")``."""
        nodes = (node for node in ast.walk(self.tree) if isinstance(node, ast.stmt | ast.expr))
        return [(node.lineno, name) for node in nodes for name in self._imported(node)]

    def _imported(self, node: ast.AST) -> list[str]:
        match node:
            case ast.Import(names=names):
                return [alias.name for alias in names]
            case ast.ImportFrom(module=module, names=names, level=level):
                package = Path(self.name).parts[:-level] if level else ()
                base = ".".join([*package, *([module] if module else [])])
                return [f"{base}.{alias.name}" for alias in names]
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                return [name] if called in ("import_module", "__import__") else []
        return []

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def function_at(self, line: int) -> str:
        """The innermost function around a line."""
        around = [f for f in self.functions() if f.lineno <= line <= (f.end_lineno or f.lineno)]
        return max(around, key=lambda f: f.lineno).name if around else "<module>"


def sources(root: Path) -> list[Source]:
    paths = sorted(path for folder in ("tpu_grpo", "scripts") for path in (root / folder).rglob("*.py"))
    return [Source(path, path.relative_to(root).as_posix()) for path in paths]


# --- the rules: each yields "file:line what is wrong" ----------------------------------------------------------------


def broken_order(files: Iterable[Source]) -> Iterator[str]:
    for file in files:
        if file.room not in LEVEL_OF:
            yield f"{file.name}:1 the room {file.room} has no level; give it one in this test"
            continue
        for line, name in file.imports:
            imported = imported_room(name)
            if imported is None or imported == file.room:
                continue
            if LEVEL_OF[imported] >= LEVEL_OF[file.room]:
                yield f"{file.name}:{line} {file.room or 'the package'} imports {imported or 'the package'}"


def imported_room(name: str) -> str | None:
    """The room of a dotted name; "" for the package and for a name it hands out; None for what is not the product's."""
    first, *rest = name.split(".")
    if first == "tpu_grpo":
        return rest[0] if rest and rest[0] in LEVEL_OF else ""
    return first if first == "scripts" else None


def eager_imports_of_the_package(files: Iterable[Source]) -> Iterator[str]:
    """What ``import tpu_grpo`` would import at once, beside the standard library and what hands out its names later."""
    for file in files:
        if file.room == "":
            for line, name in file.imports:
                if name.split(".")[0] not in sys.stdlib_module_names | {"lazy_loader"}:
                    yield f"{file.name}:{line} the package imports {name} at once"


def imports_of_tests(files: Iterable[Source]) -> Iterator[str]:
    for file in files:
        for line, name in file.imports:
            if name.split(".")[0] in ("tests", "pytest", "hypothesis", "benchmarks"):
                yield f"{file.name}:{line} imports {name}"


def library_outside_its_room(files: Iterable[Source]) -> Iterator[str]:
    for file in files:
        for line, name in file.imports:
            for library, places in ONLY_IN.items():
                allowed = {file.room, file.name.removeprefix("tpu_grpo/")} & set(places)
                if f"{name}.".startswith(f"{library}.") and not allowed:
                    yield f"{file.name}:{line} {file.room} imports {name}, which only {' and '.join(places)} may"


def pickle_outside_its_files(files: Iterable[Source]) -> Iterator[str]:
    for file in files:
        for line, name in file.imports:
            if file.name not in PICKLES and any(f"{name}.".startswith(f"{library}.") for library in PICKLING):
                yield f"{file.name}:{line} imports {name}, which only {' and '.join(PICKLES)} may"


def process_index_outside_hosts(files: Iterable[Source]) -> Iterator[str]:
    for file in files:
        if file.room == "hosts":
            continue
        for node in ast.walk(file.tree):
            named = (getattr(node, part, None) for part in ("id", "attr", "arg", "name", "value"))
            if "process_index" in (name for name in named if isinstance(name, str)):
                yield f"{file.name}:{getattr(node, 'lineno', 0)} names process_index"


def broad_excepts(files: Iterable[Source]) -> Iterator[tuple[str, str]]:
    """(file:function, what) of every handler that catches Exception or more."""
    for file in files:
        for node in ast.walk(file.tree):
            match node:
                case ast.ExceptHandler(type=None):
                    yield f"{file.name}:{file.function_at(node.lineno)}", f"{file.name}:{node.lineno} bare except"
                case ast.ExceptHandler(type=ast.expr() as caught):
                    if broad := _broad(caught):
                        where = f"{file.name}:{file.function_at(node.lineno)}"
                        yield where, f"{file.name}:{node.lineno} except {broad}"
                case ast.Call(func=ast.Attribute(attr="suppress") | ast.Name(id="suppress"), args=args):
                    if broad := next(filter(None, map(_broad, args)), None):
                        where = f"{file.name}:{file.function_at(node.lineno)}"
                        yield where, f"{file.name}:{node.lineno} suppress {broad}"


def _broad(caught: ast.expr) -> str | None:
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return next((n.id for n in names if isinstance(n, ast.Name) and n.id in ("Exception", "BaseException")), None)


def unfinished(files: Iterable[Source]) -> Iterator[str]:
    for file in files:
        for number, line in enumerate(file.text.splitlines(), start=1):
            if found := re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line):
                yield f"{file.name}:{number} {found[1]}"


# --- they hold -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def product() -> list[Source]:
    return sources(REPOSITORY)


def test_the_product_is_looked_at(product: list[Source]) -> None:
    assert {file.room for file in product} >= {"", "scripts", "records", "engine", "learner", "run", "hosts"}


@pytest.mark.full
@pytest.mark.parametrize(
    "rule",
    [
        broken_order,
        eager_imports_of_the_package,
        imports_of_tests,
        library_outside_its_room,
        pickle_outside_its_files,
        process_index_outside_hosts,
        unfinished,
    ],
    ids=lambda rule: rule.__name__,
)
def test_a_rule_holds(product: list[Source], rule) -> None:
    assert list(rule(product)) == []


def test_broad_excepts_are_those_with_a_reason(product: list[Source]) -> None:
    found = dict(broad_excepts(product))
    assert {where: what for where, what in found.items() if where not in BROAD_EXCEPTS} == {}
    assert set(BROAD_EXCEPTS) - set(found) == set(), "no longer there: remove the entry"


def test_files_that_may_pickle_do(product: list[Source]) -> None:
    found = {file.name for file in product for _, name in file.imports if name.split(".")[0] in PICKLING}
    assert set(PICKLES) - found == set(), "no longer there: remove the entry"


# --- and would be seen to be broken ----------------------------------------------------------------------------------


def planted(root: Path, name: str, text: str) -> list[Source]:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return sources(root)


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("records/stages.py", "import tpu_grpo.config", "1 records imports config"),
        ("config/a.py", "from tpu_grpo import hosts", "1 config imports hosts"),
        ("hosts/a.py", "from tpu_grpo.observe.console import x", "1 hosts imports observe"),
        ("engine/a.py", "def f():\n    from tpu_grpo.learner.rows import x", "2 engine imports learner"),
        ("rewards/a.py", "from ..data import x", "1 rewards imports data"),
        ("run/a.py", "from .. import planning", "1 run imports planning"),
        ("weights/a.py", "import_module('tpu_grpo.run')", "1 weights imports run"),
        ("cli/a.py", "import scripts.run", "1 cli imports scripts"),
        ("__init__.py", "import scripts.run", "1 the package imports scripts"),
        ("run/a.py", "from tpu_grpo import train", "1 run imports the package"),
        ("run/a.py", "import tpu_grpo", "1 run imports the package"),
        ("learner/a.py", "from tpu_grpo.tunix_loop import adapter", "1 learner imports tunix_loop"),
        ("engine/a.py", "if TYPE_CHECKING:\n    from tpu_grpo.environments import x", "2 engine imports environments"),
        ("tunix_loop/a.py", "from tpu_grpo.environments import x", "1 tunix_loop imports environments"),
        ("cellar/a.py", "", "1 the room cellar has no level; give it one in this test"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, name: str, text: str, found: str) -> None:
    assert list(broken_order(planted(tmp_path, f"tpu_grpo/{name}", text))) == [f"tpu_grpo/{name}:{found}"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tpu_grpo/engine/a.py", "from tpu_grpo.engine.b import x\nfrom . import b\nimport types\nimport jax"),
        ("tpu_grpo/planning/plan.py", "from tpu_grpo.run.parts import x\nfrom tpu_grpo.learner.rows import y"),
        ("tpu_grpo/config/a.py", "import types\nfrom tpu_grpo.records.errors import x"),
        ("scripts/run.py", "from tpu_grpo.cli.train import main\nfrom tpu_grpo import train"),
        ("tpu_grpo/__init__.py", "if TYPE_CHECKING:\n    from tpu_grpo.records.stages import Rollout"),
    ],
)
def test_a_right_import_is_not(tmp_path: Path, name: str, text: str) -> None:
    assert list(broken_order(planted(tmp_path, name, text))) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import tpu_grpo.records.stages", ["1 the package imports tpu_grpo.records.stages at once"]),
        ("if True:\n    from jax import jit", ["2 the package imports jax.jit at once"]),
        ("import importlib\nimport lazy_loader", []),
    ],
)
def test_what_the_package_imports_at_once_is_found(tmp_path: Path, text: str, found: list[str]) -> None:
    planted(tmp_path, "tpu_grpo/run/a.py", "import jax")
    files = planted(tmp_path, "tpu_grpo/__init__.py", text)
    assert list(eager_imports_of_the_package(files)) == [f"tpu_grpo/__init__.py:{each}" for each in found]


def test_imports_of_tests_are_found(tmp_path: Path) -> None:
    files = planted(tmp_path, "tpu_grpo/a.py", "import pytest\nfrom tests.observe import samples\nimport testing")
    assert list(imports_of_tests(files)) == [
        "tpu_grpo/a.py:1 imports pytest",
        "tpu_grpo/a.py:2 imports tests.observe.samples",
    ]


def test_libraries_outside_their_rooms_are_found(tmp_path: Path) -> None:
    text = "import sgl_jax\nfrom tunix import rl\nfrom tunix.rl.x import y\nfrom tunix.models import z\nimport sgl_jaxx"
    for name in ("learner/a.py", "learner/forward.py", "tunix_loop/a.py"):
        planted(tmp_path, f"tpu_grpo/{name}", text)
    may = "which only tunix_loop and learner/forward.py may"
    assert list(library_outside_its_room(planted(tmp_path, "tpu_grpo/engine/a.py", text))) == [
        f"tpu_grpo/engine/a.py:2 engine imports tunix.rl, {may}",
        f"tpu_grpo/engine/a.py:3 engine imports tunix.rl.x.y, {may}",
        "tpu_grpo/learner/a.py:1 learner imports sgl_jax, which only engine may",
        f"tpu_grpo/learner/a.py:2 learner imports tunix.rl, {may}",
        f"tpu_grpo/learner/a.py:3 learner imports tunix.rl.x.y, {may}",
        "tpu_grpo/learner/forward.py:1 learner imports sgl_jax, which only engine may",
        "tpu_grpo/tunix_loop/a.py:1 tunix_loop imports sgl_jax, which only engine may",
    ]


def test_pickle_outside_its_files_is_found(tmp_path: Path) -> None:
    text = "import pickle\nfrom multiprocessing.connection import Connection\nimport pickles\n"
    planted(tmp_path, "tpu_grpo/workers/channel.py", text)
    found = [line.split(",")[0] for line in pickle_outside_its_files(planted(tmp_path, "tpu_grpo/rewards/a.py", text))]
    assert found == [
        "tpu_grpo/rewards/a.py:1 imports pickle",
        "tpu_grpo/rewards/a.py:2 imports multiprocessing.connection.Connection",
    ]


def test_process_index_outside_hosts_is_found(tmp_path: Path) -> None:
    text = '"""About process_index."""\nfrom jax import process_index\nx = jax.process_index()\nf(process_index=1)\n'
    planted(tmp_path, "tpu_grpo/hosts/a.py", text)
    found = list(process_index_outside_hosts(planted(tmp_path, "tpu_grpo/observe/a.py", text)))
    assert sorted(found) == [f"tpu_grpo/observe/a.py:{line} names process_index" for line in (2, 3, 4)]


def test_broad_excepts_are_found(tmp_path: Path) -> None:
    text = """\
def f():
    try: pass
    except Exception: pass
    def g():
        try: pass
        except (KeyError, BaseException): pass
try: pass
except: pass
with suppress(OSError, Exception): pass
try: pass
except (KeyError, ValueError): pass
"""
    assert sorted(broad_excepts(planted(tmp_path, "tpu_grpo/a.py", text))) == [
        ("tpu_grpo/a.py:<module>", "tpu_grpo/a.py:8 bare except"),
        ("tpu_grpo/a.py:<module>", "tpu_grpo/a.py:9 suppress Exception"),
        ("tpu_grpo/a.py:f", "tpu_grpo/a.py:3 except Exception"),
        ("tpu_grpo/a.py:g", "tpu_grpo/a.py:6 except BaseException"),
    ]


def test_unfinished_work_is_found(tmp_path: Path) -> None:
    marks = "TO" + "DO"
    files = planted(tmp_path, "scripts/a.py", f"x = 1  # {marks}: more\ny = '{marks.lower()}'\n")
    assert list(unfinished(files)) == [f"scripts/a.py:1 {marks}"]
