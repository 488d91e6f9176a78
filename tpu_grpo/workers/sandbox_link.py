"""What a program and its tests, each in a process of its own, tell each other: calls, and answers with plain values.

A message is a line of JSON, and no code runs when it is read. Numbers, texts, collections and types of ``_ARGUMENTS``
cross as copies, so that Python compares them. Any other object stays where it is: the other process has a ``Proxy``,
which asks for its calls, attributes and items. This file imports nothing of tpu_grpo.
"""

from __future__ import annotations

import builtins
import importlib
import io
import json
import operator
import os
import sys
from contextlib import redirect_stdout
from threading import RLock
from types import ModuleType

TYPE_CHECKING = False  # typing's own is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

_LONGEST = 2**26
"""The most bytes of a message, 64 MiB."""
_ASKED = (
    *("abs", "neg", "pos", "invert", "index", "len", "iter", "next", "reversed", "bool", "str", "repr", "hash", "int"),
    *("float", "complex", "round", "format", "getitem", "setitem", "delitem", "setattr", "delattr"),
)
_SUMS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: vars(operator).get(f"__{name}__") or getattr(builtins, name)
    for name in (*_ASKED, *_SUMS, *_COMPARED, "contains", "call", "getattr")
} | {
    "instancecheck": lambda kind, value: isinstance(value, kind),
    "subclasscheck": lambda kind, value: issubclass(value, kind),
    "enter": lambda context: context.__enter__(),
    "exit": lambda context, *error: context.__exit__(*error),
    "copy": lambda value: _found("copy.copy")(value),
    "deepcopy": lambda value, memo: _found("copy.deepcopy")(value),
    "plain": lambda value: next((kind(value) for kind in _COLLECTIONS if isinstance(value, kind)), None),
}
"""What can be asked of an object of the other process."""
_SIMPLE: tuple[Any, ...] = (int, float, str, bytes, tuple)
_COLLECTIONS: tuple[Any, ...] = (list, dict, set, frozenset, bytearray)
_ITEMS = {"builtins.tuple", "builtins.bytes", "collections.deque", *(f"builtins.{c.__name__}" for c in _COLLECTIONS)}
"""Types that are built from their items; those of ``_ARGUMENTS`` from what ``__reduce_ex__`` names."""
_ARGUMENTS = {"builtins.complex", "builtins.range", "datetime.date", "datetime.datetime", "datetime.time"}
_ARGUMENTS |= {"datetime.timedelta", "decimal.Decimal", "fractions.Fraction"}
_INNER = ("_", "gi_", "cr_", "ag_", "tb_", "f_", "mro")
"""The beginnings of attributes that lead from an object to frames, globals and classes."""


class LostError(BaseException):
    """The other process ended, or wrote what is no message."""


class Proxy:
    """An object of the other process.

    An object of the program never decides how it compares with a test's plain value, or what their sum is: the value
    that it extends does, such as the tuple of a named tuple, and without one it is unequal. An object that a test made
    by calling a class, a name in upper case, decides all but equality.
    """

    __slots__ = ("_link_", "_number_", "_plain_", "_rank_")

    def __init__(self, link: Link, number: int, plain: Any) -> None:
        for name, value in zip(self.__slots__, (link, number, plain, 0), strict=True):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return self._link_.ask("getattr", (self, name))

    def __call__(self, *args: Any, **named: Any) -> Any:  # noqa: D102
        return ranked(self._link_.ask("call", (self, *args), named), self._rank_ - 1)

    def __contains__(self, item: Any) -> bool:
        if self._link_.judges and not self._rank_ and type(item) is not Proxy:
            return any(own == item for own in self._link_.ask("iter", (self,)))
        return self._link_.ask("contains", (self, item))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:  # suppresses no error: a test may have failed
        self._link_.ask("exit", (self, kind, error, None))


def _asks(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._link_.ask(name, (self, *args))


def _judges(name: str, swapped: bool = False) -> Callable[..., Any]:
    def judge(self: Proxy, other: Any) -> Any:
        link, pair = self._link_, (other, self) if swapped else (self, other)
        if link.judges and type(other) is not Proxy and (not self._rank_ or name in ("eq", "ne")):
            plain = link.ask("plain", (self,)) if self._plain_ is None else self._plain_
            known = self._plain_ is not None or type(plain) in _COLLECTIONS
            return FUNCTIONS[name](*(plain if each is self else each for each in pair)) if known else NotImplemented
        return ranked(link.ask(name, pair), self._rank_)

    return judge


for _name in (*_ASKED, "instancecheck", "subclasscheck", "enter", "copy", "deepcopy"):
    setattr(Proxy, f"__{_name}__", _asks(_name))
for _name in (*_SUMS, *_COMPARED):
    setattr(Proxy, f"__{_name}__", _judges(_name))
for _name in _SUMS:
    setattr(Proxy, f"__r{_name}__", _judges(_name, swapped=True))


def ranked(value: Any, rank: int) -> Any:
    """Set a proxy's rank: 2 for a class that tests name, 1 for an object that a test made by calling it, else 0."""
    if type(value) is Proxy and rank > value._rank_:
        object.__setattr__(value, "_rank_", rank)
    return value


class Link:
    """One end; the other may ask for ``functions``. The tests' end ``judges``: it trusts the other with nothing."""

    def __init__(self, reading: int, writing: int, functions: Mapping[str, Callable[..., Any]], judges: bool) -> None:
        self.judges, self.lost, self._functions, self._lock = judges, False, functions, RLock()
        self._reader, self._writer = os.fdopen(reading, "rb"), os.fdopen(writing, "wb")
        self._lent: dict[int, Any] = {}
        self._proxies: dict[int, Proxy] = {}
        self._errors: dict[tuple[str, str], Any] = {}

    def serve(self) -> None:
        """Do what the other end asks for, until it is gone."""
        while True:
            self._answer(self._receive())

    def ask(self, name: str, args: tuple[Any, ...], named: Mapping[str, Any] | None = None) -> Any:
        """Let the other end do something, and return its result or raise its error."""
        given = {**{str(n): value for n, value in enumerate(args)}, **(named or {})}
        with self._lock:
            try:
                self._send(["ask", name, {key: self._encode(value) for key, value in given.items()}])
                while (message := self._receive())[0] == "ask":
                    self._answer(message)
                kind, content, changed, printed = message
                for key, new in changed.items():
                    _replace(given[key], self._decode(new))
                value = self._decode(content) if kind == "give" else self._error(*content)
            except Exception as problem:  # whatever the program writes ends no more than its own tests
                self.lost = True
                raise LostError from problem
        sys.stdout.write(printed)
        if kind == "give":
            return value
        raise value

    def _answer(self, message: Any) -> None:
        _, name, sent = message
        kind, changed = "give", {}
        with redirect_stdout(io.StringIO()) as printed:
            try:
                if self.judges:
                    self._check(name, sent["0"], sent.get("1"))
                given = {key: self._decode(value) for key, value in sent.items()}
                named = {key: value for key, value in given.items() if not key.isdigit()}
                args = [value for key, value in given.items() if key.isdigit()]
                content = self._encode(self._functions[name](*args, **named))
                mutable = {key: value for key, value in given.items() if type(value).__hash__ is None}
                changed = {key: self._encode(value) for key, value in mutable.items() if sent[key][0] != "yours"}
                changed = {key: new for key, new in changed.items() if new != sent[key]}
            except BaseException as error:  # foreign code can raise anything, which is raised at the other end
                ends = isinstance(error, StopIteration) and name != "next"  # would end a test's loop, as if it was done
                raised = RuntimeError("StopIteration") if ends else error
                kind, content = "raise", [self._encode(each) for each in (type(raised), raised.args, raised)]
        self._send([kind, content, changed, printed.getvalue()])

    def _check(self, name: str, asked: Any, attribute: Any) -> None:
        """Refuse what could lead a program from an object that it was given to the tests."""
        if asked[0] != "yours":
            raise TypeError("only an object that was given can be asked")
        of_class = name != "getattr" and isinstance(self._decode(asked), type | ModuleType)
        if name.endswith("attr") and (of_class or not isinstance(attribute, str) or attribute.startswith(_INNER)):
            raise AttributeError(attribute)

    def _send(self, message: Any) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")
        self._writer.flush()

    def _receive(self) -> Any:
        while (line := self._reader.readline(_LONGEST)) and line[:2] != b'["':
            pass  # a program may write to descriptors that it does not know
        if self.lost or not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)

    def _encode(self, value: Any) -> Any:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if value is None or kind in (bool, float, str) or (kind is int and value.bit_length() < 64):
            return value
        if kind is int:
            return ["int", hex(value)]
        if kind is Proxy:
            return ["yours", value._number_]
        if name in _ITEMS:
            return [name, *map(self._encode, value.items() if kind is dict else value)]
        if name in _ARGUMENTS:
            args = value.__reduce_ex__(2)[1]
            return [name, *map(self._encode, args[args[:1] == (kind,) :])]
        if kind is ModuleType:
            return ["module", value.__name__]
        if name == "numpy.ndarray":
            return ["array", value.dtype.str, self._encode(value.tolist())]
        if kind.__module__ == "numpy" and hasattr(value, "item"):
            return self._encode(value.item())
        if isinstance(value, type) and (issubclass(value, BaseException) or value.__module__ == "builtins"):
            return ["class", value.__module__, value.__name__, self._encode(value.__base__)]
        self._lent[id(value)] = value
        simple = next((base for base in _SIMPLE if isinstance(value, base)), None)
        return ["mine", id(value), self._encode(simple.__getnewargs__(value)[0]) if simple else None]

    def _decode(self, message: Any) -> Any:
        if not isinstance(message, list):
            return message
        match message:
            case [name, *items] if name in _ITEMS:
                return _found(name)(map(self._decode, items))
            case [name, *arguments] if name in _ARGUMENTS:
                return _found(name)(*map(self._decode, arguments))
            case ["int", text]:
                return int(text, 16)
            case ["yours", number]:
                return self._lent[number]
            case ["mine", number, simple]:
                return self._proxies.setdefault(number, Proxy(self, number, self._decode(simple)))
            case ["module", name]:
                return importlib.import_module(name)
            case ["array", kind, items] if kind[1] in "biufcSU":
                return _found("numpy.array")(self._decode(items), kind)
            case ["class", module, name, base]:
                found = getattr(sys.modules.get(module), name, None)
                if isinstance(found, type) and (module == "builtins" or _raisable(found)):
                    return found
                if (module, name) not in self._errors:  # a class of the other process's own
                    body = {"_told": None, "__getattr__": lambda self, name: getattr(self._told, name)}
                    self._errors[module, name] = type(name, (self._decode(base),), body)
                return self._errors[module, name]
        raise ValueError("not a value")

    def _error(self, kind: Any, args: Any, told: Any) -> BaseException:
        found, given = self._decode(kind), self._decode(args)
        error: Any = found.__new__(found, *given) if issubclass(found, BaseException) else RuntimeError()
        error.args, error._told = given, self._decode(told)
        return error


def _raisable(kind: type) -> bool:
    """Whether a class is an error that the other end may raise here; by unittest's SkipTest a program would pass."""
    return issubclass(kind, BaseException) and not kind.__module__.startswith("unittest")


def _found(name: str) -> Any:
    module, _, name = name.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _replace(old: Any, new: Any) -> None:
    """Give a list, dictionary, set or array the content that it got at the other end."""
    if type(old) is not type(new) or type(old).__hash__ is not None:
        raise ValueError("not what was given")
    if not hasattr(old, "clear"):  # an array
        old[:] = new
        return
    old.clear()
    (old.update if hasattr(old, "update") else old.extend)(new)
