"""What tests ask of a program in another process: tests of every form that hold in one interpreter hold here, too."""

from pathlib import Path

import pytest

from tpu_grpo.workers.sandbox import Limits, run_tests

FORMS: dict[str, tuple[str, list[str]]] = {
    "plain": (
        "def f(x): return x * 2\n",
        [
            "assert f(2) == 4",
            "assert f('a') == 'aa'",
            "assert not f(0)",
            "assert f([1]) == [1, 1]",
            "assert f((1,)) == (1, 1)",
            "assert f(0.1) == 0.2",
            "assert f(2**70) == 2**71",
            "assert isinstance(f(2), int) and type(f(2)) is int",
        ],
    ),
    "isclose": (
        """
import math
import numpy as np
def f(x): return x / 3
""",
        [
            """
import math
assert math.isclose(f(1), 1/3)
""",
            "assert math.isclose(f(1), 1/3)",
            "assert abs(f(1) - 1/3) < 1e-9",
            "assert np.allclose([f(1)], [1/3])",
        ],
    ),
    "humaneval": (
        "def add(a, b): return a + b\n",
        [
            """
METADATA = {}
def check(candidate):
    assert candidate(1, 2) == 3
    for i in range(3):
        assert candidate(i, b=1) == i + 1
check(add)
""",
        ],
    ),
    "shared": (
        "def add(a, b): return a + b\n",
        [
            """
def check(c):
    assert c(1, 2) == 3
""",
            "check(add)",
            "x = add(1, 1)",
            "assert x == 2",
        ],
    ),
    "raises": (
        """
class MyError(ValueError):
    def __init__(self, n):
        super().__init__(f'bad {n}')
        self.n = n
import json
def f(x):
    if x < 0: raise ValueError('neg')
    if x == 1: raise MyError(1)
    if x == 2: return json.loads('{')
    return {}['k']
""",
        [
            """
try:
    f(-1)
    assert False
except ValueError as e:
    assert str(e) == 'neg'
""",
            """
try:
    f(1)
    assert False
except MyError as e:
    assert e.n == 1 and str(e) == 'bad 1'
""",
            """
try:
    f(0)
    assert False
except KeyError as e:
    assert e.args == ('k',)
""",
            """
import json
try:
    f(2)
    assert False
except json.JSONDecodeError:
    pass
""",
            """
import unittest
with unittest.TestCase().assertRaises(MyError):
    f(1)
""",
            """
try:
    f(1)
    assert False
except ValueError: pass
""",
        ],
    ),
    "stack": (
        """
class Stack:
    kind = 's'
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __contains__(self, x): return x in self.items
    def __iter__(self): return iter(self.items)
    def __getitem__(self, i): return self.items[i]
    def __setitem__(self, i, v): self.items[i] = v
    def __repr__(self): return f'Stack({self.items})'
    @staticmethod
    def make(n):
        s = Stack()
        [s.push(i) for i in range(n)]
        return s
    @property
    def top(self): return self.items[-1]
""",
        [
            "s = Stack(); s.push(1); assert s.pop() == 1",
            """
s = Stack()
s.push(5)
assert 5 in s and 6 not in s and len(s) == 1 and list(s) == [5] and s[0] == 5 and s.top == 5
""",
            """
s = Stack.make(3)
assert repr(s) == str(s) == f'{s}' == 'Stack([0, 1, 2])' and s.items == [0, 1, 2] and Stack.kind == 's'
""",
            """
s = Stack()
assert not s
s.push(3)
s[0] = 4
assert s and s.pop() == 4
s.name = 'x'
assert s.name == 'x' and hasattr(s, 'name') and not hasattr(s, 'other')
""",
            "assert isinstance(Stack(), Stack) and not isinstance(5, Stack)",
            """
try:
    Stack().pop()
    assert False
except IndexError: pass
""",
            "assert vars(Stack.make(1)) == {'items': [0]}",
            "assert Stack.__name__ == 'Stack' and callable(Stack)",
            """
a = Stack()
assert a == a and a != Stack() and a is a
""",
        ],
    ),
    "vector": (
        """
from dataclasses import dataclass
@dataclass(order=True, frozen=True)
class V:
    x: int
    y: int
    def __add__(self, o): return V(self.x + o.x, self.y + o.y)
    def __mul__(self, k): return V(self.x * k, self.y * k)
    __rmul__ = __mul__
    def __abs__(self): return self.x + self.y
    def __neg__(self): return V(-self.x, -self.y)
def up(v): return v.x + 1
""",
        [
            "assert V(1, 2) + V(3, 4) == V(4, 6)",
            "assert (V(1, 2) * 3).y == 6 and (2 * V(1, 1)).x == 2",
            "assert abs(V(1, 2)) == 3 and -V(1, 1) == V(-1, -1)",
            "assert sorted([V(2, 1), V(1, 9)]) == [V(1, 9), V(2, 1)]",
            "assert len({V(1, 1), V(1, 1)}) == 1",
            "assert {V(1, 1): 5}[V(1, 1)] == 5",
            "assert up(V(4, 0)) == 5",
            "assert V(1, 2) in [V(3, 3), V(1, 2)]",
            """
v = V(3, 1)
assert max(v, V(1, 1)) is v
""",
        ],
    ),
    "generators": (
        """
def g(n):
    for i in range(n): yield i
def inf():
    i = 0
    while True:
        yield i
        i += 1
""",
        [
            "assert list(g(3)) == [0, 1, 2]",
            """
from itertools import islice
assert list(islice(inf(), 3)) == [0, 1, 2]
""",
            """
it = g(1)
assert next(it) == 0
try:
    next(it)
    assert False
except StopIteration: pass
""",
            "assert sum(g(4)) == 6 and sorted(g(3)) == [0, 1, 2] and set(g(2)) == {0, 1}",
            """
from collections.abc import Iterator
assert isinstance(g(1), Iterator)
""",
            "assert next(g(0), None) is None",
            """
a, b = g(2)
assert (a, b) == (0, 1)
""",
        ],
    ),
    "callables": (
        """
def apply(f, *xs, key=None): return [f(x) for x in xs]
def compose(f, g): return lambda x: f(g(x))
def ranked(xs, key): return sorted(xs, key=key)
def counter():
    n = 0
    def inc():
        nonlocal n
        n += 1
        return n
    return inc
def deco(f):
    def w(*a, **k): return f(*a, **k) + 1
    return w
def total(it): return sum(it)
def guarded(f):
    try: return f()
    except ZeroDivisionError: return 'zero'
def kind(t): return t('5')
""",
        [
            "assert apply(lambda x: x + 1, 1, 2) == [2, 3]",
            "assert compose(lambda x: x * 2, lambda x: x + 1)(3) == 8",
            "assert ranked(['bb', 'a'], key=len) == ['a', 'bb']",
            """
c = counter()
assert [c(), c()] == [1, 2]
""",
            """
@deco
def mine(x): return x * 2
assert mine(4) == 9
""",
            "assert total(i for i in range(4)) == 6",
            "assert guarded(lambda: 1 / 0) == 'zero'",
            "assert kind(int) == 5 and kind(str) == '5'",
            """
calls = []
apply(calls.append, 1, 2)
assert calls == [1, 2]
""",
        ],
    ),
    "in place": (
        """
def sort(xs): xs.sort()
def put(d, k=None): d['k'] = k
def grow(s): s.add(9)
def grid(g): g[0][1] = 7
def kw(*, xs): xs.append(1)
""",
        [
            """
xs = [3, 1, 2]
sort(xs)
assert xs == [1, 2, 3]
""",
            """
d = {}
put(d, k=[1])
assert d == {'k': [1]}
""",
            """
s = {1}
grow(s)
assert s == {1, 9}
""",
            """
g = [[0, 0], [0, 0]]
grid(g)
assert g == [[0, 7], [0, 0]]
""",
            """
xs = []
kw(xs=xs)
assert xs == [1]
""",
            """
import numpy as np
a = np.array([3, 1])
sort(a)
assert a.tolist() == [1, 3]
""",
            """
from collections import deque
q = deque([1])
kw(xs=q)
assert q == deque([1, 1])
""",
        ],
    ),
    "stdlib values": (
        """
from collections import *
from fractions import Fraction
from decimal import Decimal
import datetime, enum, re
NT = namedtuple('NT', 'a b')
class C(enum.IntEnum):
    RED = 1
class D(enum.Enum):
    UP = 'u'
def f(k):
    return {
        'counter': Counter('aab'), 'od': OrderedDict(a=1), 'dd': defaultdict(list, {1: [2]}), 'dq': deque([1]),
        'fr': Fraction(1, 2), 'de': Decimal('1.5'), 'da': datetime.date(2024, 1, 2), 'td': datetime.timedelta(1),
        'dt': datetime.datetime(2024, 1, 2, 3), 'nt': NT(1, 2), 'c': C.RED, 'd': D.UP, 'cx': 1j, 'b': b'ab',
        'ba': bytearray(b'a'), 'fs': frozenset([1]), 'r': range(3), 'none': None, 'nan': float('nan'),
        'inf': -float('inf'), 'big': 10**5000, 'nested': {(1, 2): [{3}, (None, True)]}, 'u': '\\u65e5\\ud800',
        'el': [], 'keys': {'a': 1}.keys(),
    }[k]
""",
        [
            """
from collections import Counter
assert f('counter') == {'a': 2, 'b': 1} == f('counter') == Counter('aab') and f('counter').most_common(1) == [('a', 2)]
""",
            "assert f('od') == {'a': 1} and f('dd') == {1: [2]} and f('dd')[1] == [2]",
            """
from collections import deque
assert f('dq') == deque([1])
""",
            """
from fractions import Fraction
assert f('fr') == Fraction(1, 2) and f('fr') == 0.5
""",
            """
from decimal import Decimal
assert f('de') == Decimal('1.5')
""",
            """
import datetime
assert f('da') == datetime.date(2024, 1, 2) and f('dt').hour == 3 and f('td').days == 1
""",
            "assert f('nt') == (1, 2) and f('nt').a == 1 and f('nt')[1] == 2",
            "assert f('c') == 1 and f('c') is C.RED and f('c').name == 'RED' and f('c') + 1 == 2",
            "assert f('d') == D.UP and f('d') is D.UP and f('d').value == 'u' and D('u') == D.UP",
            """
assert f('cx') == 1j and f('b') == b'ab' and f('ba') == b'a' and f('fs') == {1} and f('r') == range(3)
""",
            """
assert f('none') is None and f('nan') != f('nan') and f('inf') == -float('inf') and f('big') == 10**5000
""",
            "assert f('nested') == {(1, 2): [{3}, (None, True)]}",
            "assert f('u') == '\\u65e5\\ud800'",
            "assert f('el') == []",
            "assert list(f('keys')) == ['a']",
        ],
    ),
    "numpy": (
        """
import numpy as np
a = np.array([[1, 2], [3, 4]])
def f(k): return {'i': np.int64(3), 'f': np.float64(.5), 'a': a, 'b': np.bool_(True), 'd': np.eye(2)[0]}[k]
def double(a): return a * 2
""",
        [
            """
import numpy as np
assert f('i') == 3 and f('f') == .5 and f('b')
assert f('a').shape == (2, 2) and (f('a') == np.array([[1, 2], [3, 4]])).all()
""",
            "assert np.allclose(double(np.array([1., 2.])), [2, 4]) and f('d').dtype == float",
        ],
    ),
    "names like builtins": (
        "def sum(a, b): return a + b\n",
        [
            "assert sum(10, 15) == 25",
        ],
    ),
    "prints": (
        "def greet(n): print('hi', n)\n",
        [
            """
import io, contextlib
out = io.StringIO()
with contextlib.redirect_stdout(out):
    greet('x')
assert out.getvalue() == 'hi x\\n'
""",
        ],
    ),
    "globals": (
        """
count = 0
def inc():
    global count
    count += 1
""",
        [
            """
inc(); inc()
assert count == 2
""",
            """
inc()
assert count == 3
""",
        ],
    ),
    "imports of tests": (
        "def f(x): return math.sqrt(x)\n",
        [
            """
import math
assert f(4) == 2
""",
        ],
    ),
    "files": (
        """
def save(p, t):
    with open(p, 'w') as h: h.write(t)
import os
""",
        [
            """
save('a.txt', 'x')
assert open('a.txt').read() == 'x'
""",
            """
os.remove('a.txt')
assert not os.path.exists('a.txt')
""",
        ],
    ),
    "objects of tests": (
        """
def depth(n): return 0 if n is None else 1 + max(depth(n.left), depth(n.right))
def flip(n):
    n.left, n.right = n.right, n.left
    return n
def read(h): return h.read()
def write(h): h.write('a')
""",
        [
            """
class N:
    def __init__(self, l=None, r=None): self.left, self.right = l, r
t = N(N(), N(N()))
assert depth(t) == 3
""",
            """
u = flip(t)
assert u is t and t.left.left is not None and t.right.left is None
""",
            """
import io
assert read(io.StringIO('abc')) == 'abc'
""",
            """
h = io.StringIO()
write(h)
assert h.getvalue() == 'a'
""",
        ],
    ),
    "solution": (
        """
from typing import List
class Solution:
    def twoSum(self, nums: List[int], target: int) -> List[int]:
        seen = {}
        for i, n in enumerate(nums):
            if target - n in seen: return [seen[target - n], i]
            seen[n] = i
""",
        [
            """
def check(candidate):
    assert candidate(nums = [2,7,11,15],target = 9) == [0, 1]
check(Solution().twoSum)
""",
        ],
    ),
    "context": (
        """
class R:
    def __enter__(self):
        self.o = True
        return self
    def __exit__(self, *a): self.o = False
""",
        [
            """
with R() as r:
    assert r.o
assert not r.o
""",
        ],
    ),
    "unittest": (
        "def f(x): return x + 1\n",
        [
            """
import unittest
class T(unittest.TestCase):
    def test(self):
        self.assertEqual(f(1), 2)
        with self.assertRaises(TypeError):
            f('a')
r = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))
assert r.wasSuccessful() and r.testsRun == 1
""",
        ],
    ),
    "subclass of dict": (
        """
from collections import OrderedDict
class LRU(OrderedDict):
    def __init__(self, n):
        super().__init__()
        self.n = n
    def put(self, k, v):
        self[k] = v
        self.move_to_end(k)
        if len(self) > self.n: self.popitem(last=False)
    def get(self, k): return super().get(k, -1)
""",
        [
            """
c = LRU(2)
c.put(1, 1); c.put(2, 2); c.put(3, 3)
assert c.get(1) == -1 and c.get(3) == 3 and len(c) == 2 and c == {2: 2, 3: 3} and 2 in c
""",
        ],
    ),
    "copies": (
        """
class Box:
    def __init__(self, items): self.items = items
""",
        [
            """
import copy
a = Box([1])
b = copy.deepcopy(a)
b.items = [2]
assert a.items == [1] and copy.copy(a).items == [1]
""",
        ],
    ),
    "threads": (
        """
class Counter:
    n = 0
    def inc(self): self.n += 1
""",
        [
            """
from threading import Thread
c = Counter()
ts = [Thread(target=c.inc) for _ in range(8)]
for t in ts: t.start()
for t in ts: t.join()
assert c.n == 8
""",
        ],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_tests_holds_as_in_one_interpreter(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program, tests = FORMS[form]
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {"__name__": "program"}
    for code in (program, *tests):
        exec(compile(code, "<test>", "exec", dont_inherit=True), space)
    passed = run_tests(program, tests, Limits())
    assert [test for test, held in zip(tests, passed, strict=True) if not held] == []


def test_a_test_that_is_no_python_fails_alone() -> None:
    tests = ["assert f(1) == 1", "assert f(", "assert f(2) == 3", "while True: pass"]
    assert run_tests("def f(x): return x", tests, Limits(1.0)) == [True, False, False, False]


@pytest.mark.parametrize("size", [0, 150, 300_000])
def test_answers_of_many_items_and_many_levels(size: int) -> None:
    code = "def nest(n):\n    made = []\n    for _ in range(min(n, 150)): made = [made]\n    return made"
    tests = [f"assert nest({size}) == eval('[' * {min(size, 150) + 1} + ']' * {min(size, 150) + 1})"]
    assert run_tests(
        f"{code}\ndef count(n): return list(range(n))", [*tests, f"assert len(count({size})) == {size}"], Limits()
    ) == [True, True]
