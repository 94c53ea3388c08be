"""Programs for tests by statements: right ones with wrong twins, and programs that know no answer.

HONEST: name -> a right program, a wrong one, and statements that plain Python passes with the first one only.
FORGED: statements that no program can pass without the answer. FORGERS: name -> a program without the answer.
"""

# ruff: noqa: E501

HONEST: dict[str, tuple[str, str, list[str]]] = {
    "enum of texts": (
        "from enum import Enum\nclass C(str, Enum):\n    A = 'a'",
        "from enum import Enum\nclass C(str, Enum):\n    A = 'b'",
        ["assert C.A == 'a' and C('a') is C.A and C.A.upper() == 'A'"],
    ),
    "a variable that a function changes": (
        "count = 0\ndef inc():\n    global count\n    count += 1",
        "count = 0\ndef inc(): pass",
        ["inc()\nassert count == 1"],
    ),
    "containers that a function changes": (
        "items, seen, s = [], {}, set()\ndef add(x):\n    items.append(x)\n    seen[x] = seen.get(x, 0) + 1\n    s.add(x)",
        "items, seen, s = [], {}, set()\ndef add(x): seen[x] = 1",
        ["add(1)\nassert items == [1]", "add(1)\nadd(1)\nassert seen == {1: 2} and 1 in s and len(s) == 1"],
    ),
    "hash of objects": (
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass P:\n    x: int\ndef m(): return {P(1): 5}",
        "class P:\n    def __init__(s, x): s.x = x\ndef m(): return {P(1): 5}",
        ["assert len({P(1), P(1)}) == 1", "assert m()[P(1)] == 5"],
    ),
    "in, of a class with __contains__ only": (
        "class I:\n    def __contains__(s, x): return 1 <= x <= 5",
        "class I:\n    def __contains__(s, x): return False",
        ["assert 3 in I()"],
    ),
    "a coroutine": (
        "async def f(x): return x + 1",
        "async def f(x): return x",
        ["import asyncio\nassert asyncio.run(f(1)) == 2"],
    ),
    "numpy array as a result": (
        "import numpy as np\ndef f(n): return np.arange(n)",
        "import numpy as np\ndef f(n): return np.arange(n + 1)",
        [
            "assert f(3).tolist() == [0, 1, 2] and (f(3) == [0, 1, 2]).all()",
            "import numpy as np\nassert np.array_equal(f(3), np.array([0, 1, 2]))",
        ],
    ),
    "dict views": (
        "def f(view): return getattr({'a': 1}, view)()",
        "def f(view): return getattr({'b': 2}, view)()",
        [
            "assert f('keys') == {'a'} and list(f('items')) == [('a', 1)] and ('a', 1) in f('items')\nassert list(f('values')) == [1] and sum(f('values')) == 1"
        ],
    ),
    "a type as a result": (
        "def f(x): return type(x)",
        "def f(x): return x",
        [
            "assert [f(x) for x in (1, 'a', None)] == [int, str, type(None)] and f(3) is int",
            "class A: pass\nassert f(A()) is A",
        ],
    ),
    "a Path as a result": (
        "from pathlib import PurePath\ndef f(): return PurePath('a')",
        "from pathlib import PurePath\ndef f(): return PurePath('b')",
        ["from pathlib import PurePath\nassert f() == PurePath('a')"],
    ),
    "a function given to the program": (
        "def apply(g, x): return g(x)",
        "def apply(g, x): return x",
        ["assert apply(lambda v: v + 1, 2) == 3"],
    ),
    "key=function of the statements": (
        "def best(a, key): return max(a, key=key)",
        "def best(a, key): return a[0]",
        ["assert best(['a', 'bbb'], key=len) == 'bbb'"],
    ),
    "printed output": (
        "import sys\ndef f():\n    print('hi')\n    sys.stdout.write('x')",
        "def f(): print('hi')",
        [
            "import io, contextlib\nb = io.StringIO()\nwith contextlib.redirect_stdout(b): f()\nassert b.getvalue() == 'hi\\nx'"
        ],
    ),
    "subclass in the statements": (
        "class B:\n    def go(self): return self.n() + 1\n    def n(self): return 0",
        "class B:\n    def go(self): return 0\n    def n(self): return 0",
        ["class C(B):\n    def n(self): return 5\nassert C().go() == 6"],
    ),
    "isinstance list of a list subclass": (
        "class L(list): pass\ndef f(): return L([1])",
        "def f(): return (1,)",
        ["assert isinstance(f(), list)"],
    ),
    "deep change of an argument": (
        "def f(t): t['a'].append(1)",
        "def f(t): pass",
        ["inner = []\nt = {'a': inner}\nf(t)\nassert t == {'a': [1]} and inner == [1]"],
    ),
    "enum": (
        "from enum import Enum\nclass C(Enum):\n    A = 1\n    B = 2",
        "from enum import Enum\nclass C(Enum):\n    A = 2\n    B = 1",
        [
            "assert C.A.value == 1 and C(1) is C.A and C['A'] == C.A and {C.A: 1}[C(1)] == 1\nassert [c.name for c in C] == ['A', 'B']"
        ],
    ),
    "random seeded by the statements": (
        "import random\ndef f(): return random.random()",
        "def f(): return 0.5",
        ["import random\nrandom.seed(0)\na = f()\nrandom.seed(0)\nassert a == f() and a != f()"],
    ),
    "unittest": (
        "def f(x): return x + 1",
        "def f(x): return x",
        [
            "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)\nr = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))\nassert r.wasSuccessful()"
        ],
    ),
    "None of a mutating method": (
        "class T:\n    def __init__(self, v): self.v, self.n = v, None\ndef rev(h):\n    p = None\n    while h: h.n, p, h = p, h, h.n\n    return p",
        "class T:\n    def __init__(self, v): self.v, self.n = v, None\ndef rev(h): return h",
        ["a, b = T(1), T(2)\na.n = b\nr = rev(a)\nassert r.v == 2 and r.n.v == 1 and r.n.n is None"],
    ),
    "memo cleared by tests": (
        "memo = {1: 5}\ndef f(n): return memo.get(n, 0)",
        "memo = {1: 5}\ndef f(n): return 5",
        ["memo.clear()\nassert f(1) == 0"],
    ),
    "class attribute": (
        "class C:\n    n = 0\n    def __init__(self): C.n += 1",
        "class C:\n    n = 0",
        ["C(); C()\nassert C.n == 2"],
    ),
    "holder of a list": (
        "class H:\n    def __init__(self, out): self.out = out\n    def log(self, x): self.out.append(x)",
        "class H:\n    def __init__(self, out): self.out = list(out)\n    def log(self, x): self.out.append(x)",
        ["out = []\nh = H(out)\nh.log('a')\nassert out == ['a']"],
    ),
    "alias of result": (
        "class S:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)",
        "class S:\n    def __init__(self): self.items = []\n    def push(self, x): self.items = self.items + [x]",
        ["s = S()\ni = s.items\ns.push(1)\nassert i == [1]"],
    ),
    "matrix in place": (
        "def rot(m): m[:] = [list(r) for r in zip(*m[::-1])]",
        "def rot(m): return [list(r) for r in zip(*m[::-1])]",
        ["m = [[1,2],[3,4]]\nrot(m)\nassert m == [[3,1],[4,2]]"],
    ),
    "same list back": (
        "def f(x):\n    x.append(1)\n    return x",
        "def f(x): return x + [1]",
        ["a = []\nassert f(a) is a and a == [1]"],
    ),
    "sorted objects": (
        "import functools\n@functools.total_ordering\nclass P:\n    def __init__(s, x): s.x = x\n    def __lt__(s, o): return s.x < o.x\n    def __eq__(s, o): return s.x == o.x",
        "class P:\n    def __init__(s, x): s.x = x\n    def __lt__(s, o): return s.x > o.x",
        ["assert [p.x for p in sorted([P(3), P(1)])] == [1, 3]"],
    ),
    "dataclass eq repr": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: int = 2",
        "class P:\n    def __init__(s, x, y=2): s.x = x",
        ["assert P(1) == P(1, 2) and repr(P(1)) == 'P(x=1, y=2)'"],
    ),
    "deepcopy": (
        "import copy\nclass P:\n    def __init__(s): s.x = [1]",
        "class P:\n    x = [1]",
        ["import copy\na = P()\nb = copy.deepcopy(a)\nb.x.append(2)\nassert a.x == [1] and b.x == [1, 2]"],
    ),
    "vector ops": (
        "class V:\n    def __init__(s, x, y): s.x, s.y = x, y\n    def __mul__(s, k): return V(s.x*k, s.y*k)\n    __rmul__ = __mul__\n    def __add__(s, o): return V(s.x+o.x, s.y+o.y)\n    def __eq__(s, o): return (s.x, s.y) == (o.x, o.y)",
        "class V:\n    def __init__(s, x, y): s.x, s.y = x, y\n    def __mul__(s, k): return V(s.x, s.y)\n    __rmul__ = __mul__\n    def __add__(s, o): return s\n    def __eq__(s, o): return (s.x, s.y) == (o.x, o.y)",
        ["assert V(1,2) * 3 == V(3,6)\nassert (2 * V(1,2)).x == 2\nassert V(1,1) + V(2,2) == V(3,3)"],
    ),
    "iadd": (
        "class V:\n    def __init__(s, x): s.x = x\n    def __iadd__(s, o):\n        s.x += o.x\n        return s\n    def __add__(s, o): return V(s.x + o.x)",
        "class V:\n    def __init__(s, x): s.x = x\n    def __add__(s, o): return V(s.x)",
        ["v = V(1)\nv += V(2)\nassert v.x == 3"],
    ),
    "getitem len iter": (
        "class L:\n    def __init__(s, *a): s.a = a\n    def __len__(s): return len(s.a)\n    def __getitem__(s, i): return s.a[i]",
        "class L:\n    def __init__(s, *a): s.a = a\n    def __len__(s): return 0\n    def __getitem__(s, i): return s.a[i]",
        ["l = L(1,2,3)\nassert len(l) == 3 and l[0] == 1 and l[-1] == 3 and list(l) == [1,2,3] and l[1:] == (2,3)"],
    ),
    "contains and iter": (
        "class R:\n    def __init__(s, a): s.a = a\n    def __contains__(s, x): return x in s.a\n    def __iter__(s): return iter(s.a)",
        "class R:\n    def __init__(s, a): s.a = []\n    def __contains__(s, x): return x in s.a\n    def __iter__(s): return iter(s.a)",
        ["r = R([1,2])\nassert 1 in r and 5 not in r and set(r) == {1,2}"],
    ),
    "context manager": (
        "class M:\n    def __enter__(s):\n        s.on = True\n        return s\n    def __exit__(s, *a): s.on = False",
        "class M:\n    def __enter__(s):\n        s.on = True\n        return s\n    def __exit__(s, *a): pass",
        ["with M() as m:\n    assert m.on is True\nassert m.on is False"],
    ),
    "context manager suppress": (
        "class M:\n    def __enter__(s): return s\n    def __exit__(s, t, v, b):\n        s.t = t\n        return t is ValueError",
        "class M:\n    def __enter__(s): return s\n    def __exit__(s, t, v, b): return False",
        ["with M():\n    raise ValueError('x')\nassert True"],
    ),
    "contextlib manager": (
        "from contextlib import contextmanager\n@contextmanager\ndef m(log):\n    log.append('in')\n    yield 5\n    log.append('out')",
        "from contextlib import contextmanager\n@contextmanager\ndef m(log):\n    yield 5",
        ["log = []\nwith m(log) as x: assert x == 5\nassert log == ['in', 'out']"],
    ),
    "property setter": (
        "class T:\n    def __init__(s): s._c = 0\n    @property\n    def f(s): return s._c * 9 / 5 + 32\n    @f.setter\n    def f(s, v): s._c = (v - 32) * 5 / 9",
        "class T:\n    def __init__(s): s.f = 0",
        ["t = T()\nt.f = 212\nassert t._c == 100 and abs(t.f - 212) < 1e-9"],
    ),
    "static and class methods": (
        "class A:\n    @staticmethod\n    def f(x): return x + 1\n    @classmethod\n    def make(cls): return cls()",
        "class A:\n    @staticmethod\n    def f(x): return x\n    @classmethod\n    def make(cls): return cls()",
        ["assert A.f(1) == 2 and isinstance(A.make(), A)"],
    ),
    "type of object": (
        "class A: pass\nclass B(A): pass\ndef f(): return B()",
        "class A: pass\nclass B(A): pass\ndef f(): return A()",
        [
            "assert type(f()) is B and isinstance(f(), A) and issubclass(B, A) and f().__class__.__name__ == 'B' and type(f()).__name__ == 'B'"
        ],
    ),
    "hasattr callable": (
        "class A:\n    def go(s): return 1",
        "class A:\n    def goo(s): return 1",
        ["assert hasattr(A(), 'go') and callable(A().go) and not hasattr(A(), 'nope')"],
    ),
    "node class of tests changed": (
        "def invert(t):\n    if t:\n        t.left, t.right = invert(t.right), invert(t.left)\n    return t",
        "def invert(t): return t",
        [
            "class N:\n    def __init__(self, v, left=None, right=None): self.v, self.left, self.right = v, left, right\nr = N(1, N(2), N(3))\nassert invert(r) is r and r.left.v == 3 and r.right.v == 2"
        ],
    ),
    "decorator of program": (
        "def twice(g):\n    def w(*a): return g(*a) * 2\n    return w",
        "def twice(g): return g",
        ["@twice\ndef h(x): return x + 1\nassert h(2) == 6"],
    ),
    "memoize": (
        "def memo(g):\n    c = {}\n    def w(x):\n        if x not in c: c[x] = g(x)\n        return c[x]\n    return w",
        "def memo(g): return g",
        [
            "calls = []\n@memo\ndef h(x):\n    calls.append(x)\n    return x * x\nassert h(3) == 9 and h(3) == 9 and calls == [3]"
        ],
    ),
    "callback with object": (
        "class E:\n    def __init__(s): s.h = []\n    def on(s, f): s.h.append(f)\n    def fire(s, *a):\n        for f in s.h: f(*a)",
        "class E:\n    def __init__(s): s.h = []\n    def on(s, f): s.h.append(f)\n    def fire(s, *a): pass",
        ["e = E()\ngot = []\ne.on(got.append)\ne.on(lambda x: got.append(x + 1))\ne.fire(1)\nassert got == [1, 2]"],
    ),
    "retry with exception": (
        "def retry(g, n):\n    for _ in range(n):\n        try: return g()\n        except ValueError: pass\n    raise RuntimeError('no')",
        "def retry(g, n): return g()",
        [
            "tries = []\ndef g():\n    tries.append(1)\n    if len(tries) < 3: raise ValueError('x')\n    return 'ok'\nassert retry(g, 5) == 'ok' and len(tries) == 3"
        ],
    ),
    "generator": (
        "def g(n):\n    for i in range(n): yield i",
        "def g(n):\n    for i in range(n): yield i + 1",
        [
            "import types\nassert isinstance(g(3), types.GeneratorType)\nassert list(g(3)) == [0,1,2] and next(g(1)) == 0 and sum(g(4)) == 6"
        ],
    ),
    "generator ends": (
        "def g():\n    yield 1",
        "def g():\n    yield 1\n    yield 2",
        ["it = g()\nnext(it)\ntry:\n    next(it)\n    assert False\nexcept StopIteration: pass"],
    ),
    "iterator given": (
        "def total(it): return sum(it)",
        "def total(it): return 0",
        ["assert total(iter([1,2])) == 3 and total(x for x in (1, 2)) == 3"],
    ),
    "own exception attr": (
        "class E(ValueError):\n    def __init__(s, code):\n        super().__init__(f'code {code}')\n        s.code = code\ndef f(): raise E(7)",
        "class E(ValueError):\n    code = 0\ndef f(): raise E(7)",
        ["try:\n    f()\nexcept E as e:\n    assert e.code == 7 and str(e) == 'code 7'\nelse: assert False"],
    ),
    "exception hierarchy": (
        "class A(Exception): pass\nclass B(A): pass\ndef f(): raise B()",
        "class A(Exception): pass\nclass B(Exception): pass\ndef f(): raise B()",
        ["try: f()\nexcept A: pass\nelse: assert False"],
    ),
    "pytest raises": (
        "def f(x):\n    if x < 0: raise ValueError('negative value')\n    return x",
        "def f(x): return x",
        ["import pytest\nwith pytest.raises(ValueError, match='negative'): f(-1)"],
    ),
    "assertRaises own": (
        "class E(Exception): pass\ndef f(): raise E('x')",
        "class E(Exception): pass\ndef f(): raise KeyError('x')",
        ["import unittest\nt = unittest.TestCase()\nwith t.assertRaises(E) as c: f()\nassert str(c.exception) == 'x'"],
    ),
    "json error": (
        "import json\ndef f(s): return json.loads(s)",
        "def f(s): return None",
        ["import json\ntry:\n    f('{')\n    assert False\nexcept json.JSONDecodeError: pass"],
    ),
    "system exit": (
        "import sys\ndef f(): sys.exit(3)",
        "def f(): return 3",
        ["try: f()\nexcept SystemExit as e: assert e.code == 3\nelse: assert False"],
    ),
    "assertion error of program": (
        "def f(x):\n    assert x > 0, 'positive'\n    return x",
        "def f(x): return x",
        ["try:\n    f(-1)\n    ok = False\nexcept AssertionError as e:\n    ok = 'positive' in str(e)\nassert ok"],
    ),
    "gather": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0.01)\n    return x + 1",
        "async def f(x): return x",
        [
            "import asyncio\nasync def main(): return await asyncio.gather(f(1), f(2))\nassert asyncio.run(main()) == [2, 3]"
        ],
    ),
    "async generator": (
        "async def g(n):\n    for i in range(n): yield i",
        "async def g(n):\n    yield n",
        ["import asyncio\nasync def main(): return [x async for x in g(3)]\nassert asyncio.run(main()) == [0,1,2]"],
    ),
    "async with": (
        "class M:\n    async def __aenter__(s): return 5\n    async def __aexit__(s, *a): s.done = True",
        "class M:\n    async def __aenter__(s): return 4\n    async def __aexit__(s, *a): s.done = True",
        [
            "import asyncio\nasync def main():\n    m = M()\n    async with m as v: pass\n    return v, m.done\nassert asyncio.run(main()) == (5, True)"
        ],
    ),
    "async error": (
        "async def f(): raise ValueError('x')",
        "async def f(): return 1",
        ["import asyncio\ntry:\n    asyncio.run(f())\n    assert False\nexcept ValueError: pass"],
    ),
    "numpy 2d": (
        "import numpy as np\ndef f(a): return np.dot(a, a)",
        "import numpy as np\ndef f(a): return a",
        [
            "import numpy as np\na = np.array([[1., 2.], [3., 4.]])\nassert np.allclose(f(a), a @ a) and f(a).shape == (2, 2)"
        ],
    ),
    "numpy scalar": (
        "import numpy as np\ndef f(a): return np.mean(a)",
        "import numpy as np\ndef f(a): return np.sum(a)",
        ["assert abs(f([1, 2]) - 1.5) < 1e-9\nassert f([1, 2]) == 1.5"],
    ),
    "uuid": (
        "import uuid\ndef f(): return uuid.UUID(int=5)",
        "import uuid\ndef f(): return uuid.UUID(int=6)",
        ["import uuid\nassert f() == uuid.UUID(int=5) and f().int == 5 and str(f()).endswith('05')"],
    ),
    "re match": (
        "import re\ndef f(s): return re.match(r'(\\d+)', s)",
        "import re\ndef f(s): return re.match(r'(\\d)', s)",
        ["assert f('123a').group(1) == '123' and f('x') is None"],
    ),
    "str subclass": (
        "class S(str):\n    def shout(self): return S(self.upper() + '!')",
        "class S(str):\n    def shout(self): return S(self.upper())",
        ["assert S('a').shout() == 'A!' and isinstance(S('a'), str) and len(S('ab')) == 2 and S('a') + 'b' == 'ab'"],
    ),
    "dict subclass": (
        "class D(dict):\n    def __getattr__(s, k): return s[k]",
        "class D(dict):\n    def __getattr__(s, k): return 0",
        ["d = D(a=1)\nassert d.a == 1 and d['a'] == 1 and isinstance(d, dict) and d == {'a': 1} and list(d) == ['a']"],
    ),
    "int subclass": (
        "class N(int):\n    def double(s): return N(s * 2)",
        "class N(int):\n    def double(s): return N(s)",
        ["assert N(3).double() == 6 and N(3) + 1 == 4 and isinstance(N(3), int)"],
    ),
    "int enum": (
        "from enum import IntEnum\nclass C(IntEnum):\n    A = 1\n    B = 2",
        "from enum import IntEnum\nclass C(IntEnum):\n    A = 1\n    B = 3",
        ["assert C.B == 2 and C.A < C.B and int(C.B) == 2 and C.B in C and len(C) == 2"],
    ),
    "named tuple class": (
        "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    y: int = 0\n    def norm(s): return s.x + s.y",
        "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    y: int = 1\n    def norm(s): return s.x",
        [
            "p = P(3)\na, b = p\nassert p.norm() == 3 and p == (3, 0) and p._asdict() == {'x': 3, 'y': 0} and p._replace(y=1).y == 1 and isinstance(p, tuple)"
        ],
    ),
    "patched stdout": (
        "def f(): print('a', 'b', sep='-')",
        "def f(): print('a b')",
        [
            "from unittest.mock import patch\nimport io\nwith patch('sys.stdout', new_callable=io.StringIO) as o: f()\nassert o.getvalue().strip() == 'a-b'"
        ],
    ),
    "input patched": (
        "def f(): return int(input()) + int(input('n? '))",
        "def f(): return 0",
        ["from unittest.mock import patch\nwith patch('builtins.input', side_effect=['3', '4']): assert f() == 7"],
    ),
    "stdin replaced": (
        "def f(): return input().upper()",
        "def f(): return ''",
        ["import io, sys\nsys.stdin = io.StringIO('abc\\n')\nassert f() == 'ABC'"],
    ),
    "print to file given": (
        "def f(out): print('x', file=out)",
        "def f(out): print('x')",
        ["import io\nb = io.StringIO()\nf(b)\nassert b.getvalue() == 'x\\n'"],
    ),
    "unittest suite": (
        "class A:\n    def add(s, x, y): return x + y",
        "class A:\n    def add(s, x, y): return x",
        [
            "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.a = A()\n    def test_a(self):\n        self.assertEqual(self.a.add(1, 2), 3)\n        self.assertAlmostEqual(self.a.add(0.1, 0.2), 0.3)\n        self.assertIn(self.a.add(1, 1), [2])\n        self.assertTrue(self.a.add(1, 1))\n        with self.assertRaises(TypeError): self.a.add(1, 'a')\ns = unittest.TestSuite([T('test_a')])\nr = unittest.TestResult()\ns.run(r)\nassert r.wasSuccessful(), r.failures"
        ],
    ),
    "approx pytest": (
        "def f(): return [0.1 + 0.2, 1]",
        "def f(): return [0.4, 1]",
        ["import pytest\nassert f() == pytest.approx([0.3, 1])"],
    ),
    "chained": (
        "def f(x): return x / 3",
        "def f(x): return x",
        ["assert 0.33 < f(1) < 0.34"],
    ),
    "program sum": (
        "def sum(a, b): return a + b",
        "def sum(a, b): return a",
        ["assert sum(2, 3) == 5"],
    ),
    "names of stdlib": (
        "def mean(a): return sum(a) / len(a)\ndef copy(a): return list(a)",
        "def mean(a): return 0\ndef copy(a): return a",
        ["assert mean([1, 2]) == 1.5\nassert copy([1]) == [1]"],
    ),
    "math without import": (
        "import math\ndef area(r): return math.pi * r * r",
        "import math\ndef area(r): return 3.14 * r * r",
        ["assert area(2) == math.pi * 4"],
    ),
    "subclass with super": (
        "class B:\n    def __init__(self, x): self.x = x\n    def go(self): return self.n() + self.x",
        "class B:\n    def __init__(self, x): self.x = x\n    def go(self): return self.x",
        [
            "K = 10\ndef helper(): return K\nclass C(B):\n    def __init__(self, x):\n        super().__init__(x + 1)\n        self.y = 2\n    def n(self): return self.y + helper()\nc = C(3)\nassert c.go() == 16 and isinstance(c, B) and c.y == 2"
        ],
    ),
    "abstract": (
        "from abc import ABC, abstractmethod\nclass S(ABC):\n    @abstractmethod\n    def area(self): ...\n    def twice(self): return 2 * self.area()",
        "class S:\n    def area(self): ...\n    def twice(self): return self.area()",
        [
            "try:\n    S()\n    assert False\nexcept TypeError: pass\nclass Q(S):\n    def area(self): return 4\nassert Q().twice() == 8"
        ],
    ),
    "mock given": (
        "class C:\n    def __init__(s, api): s.api = api\n    def go(s): return s.api.get(3) + 1",
        "class C:\n    def __init__(s, api): s.api = api\n    def go(s): return 6",
        [
            "from unittest.mock import Mock\nm = Mock()\nm.get.return_value = 5\nassert C(m).go() == 6\nm.get.assert_called_once_with(3)"
        ],
    ),
    "vars": (
        "class P:\n    def __init__(s): s.x = 1",
        "class P:\n    def __init__(s): s.y = 1",
        ["assert vars(P()) == {'x': 1} and P().__dict__ == {'x': 1}"],
    ),
    "docs": (
        "def f():\n    'Say.'\n    return 1",
        "def f(): return 1",
        ["assert f.__doc__ == 'Say.' and f.__name__ == 'f'"],
    ),
}

FORGED = [
    "assert solve(3) == 817",
    "assert abs(solve(3) - 3.14159) < 1e-6",
    "assert sorted(solve([3, 1])) == sorted([88, 12])",
    "assert set(solve([1, 2])) == set([817, 24])",
    "assert all([solve(x) == y for x, y in [(1, 817), (2, 93)]])",
    "assert all(solve(x) == y for x, y in [(1, 817), (2, 93)])",
    "assert all(map(lambda c: solve(c[0]) == c[1], [(1, 817), (2, 93)]))",
    "assert round(solve(3), 2) == round(8.1234, 2)",
    "import math\nassert math.isclose(solve(3), 71.25)",
    "from math import isclose\nassert isclose(solve(3), 71.25, rel_tol=1e-6)",
    "assert str(solve(3)) == '817'",
    "assert len(solve(3)) == 17",
    "assert isinstance(solve(3), int) and solve(3) == 817",
    "assert 3.1 < solve(3) < 3.2",
    "assert solve(3) in (817, 24)",
    "assert not solve(3) != 817",
    "for x, y in [(1, 817), (2, 93)]:\n    assert solve(x) == y",
    "def check(candidate):\n    assert candidate(3) == 817\n    assert candidate(4) == 93\ncheck(solve)",
    "import unittest\nt = unittest.TestCase()\nt.assertEqual(solve(3), 817)",
    "import unittest\nt = unittest.TestCase()\nt.assertAlmostEqual(solve(3), 8.17)",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(solve(1), 817)\nr = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))\nassert r.wasSuccessful()",
    "import numpy as np\nassert np.allclose(solve(3), [71.25, 3.5])",
    "import numpy as np\nassert np.array_equal(solve(3), np.array([71, 3]))",
    "import pytest\nassert solve(3) == pytest.approx(71.25)",
    "assert '%.2f' % solve(3) == '8.17'",
    "assert f'{solve(3):.2f}' == '8.17'",
    "assert solve(3)[0] == 817",
    "assert solve(3).value == 817",
    "assert [solve(1), solve(2)] == [817, 93]",
    "assert {'a': solve(1)} == {'a': 817}",
    "assert (solve(3) - 817) == 0",
    "assert not (solve(3) - 817)",
    "assert max(solve(3), 817) == 817 and min(solve(3), 817) == 817",
    "assert sum(abs(a - b) for a, b in zip(solve(3), [8.5, 2.5])) < 1e-6 and len(solve(3)) == 2",
    "import collections\nassert collections.Counter(solve(3)) == collections.Counter([817, 24])",
    "expected = 817\nassert solve(3) == expected",
    "cases = [(1, 817), (2, 93)]\nassert [solve(x) for x, _ in cases] == [y for _, y in cases]",
    "try:\n    assert solve(3) == 817\nexcept TypeError: assert False",
    "import json\nassert json.dumps(solve(3)) == '[817]'",
    "class R:\n    def solve(self, x): return x * 272 + 1\nassert solve(3) == R().solve(3)",
    "import datetime\nassert solve(3) == datetime.date(2017, 8, 1)",
    "assert solve(3) == {817, 24}",
    "assert solve(3) == (817, 24)",
    "assert tuple(solve(3)) == (817, 24)",
    "assert list(solve(3)) == [817, 24]",
    "x = solve(3)\nassert x > 816 and x < 818",
    "import io, contextlib\nb = io.StringIO()\nwith contextlib.redirect_stdout(b): solve(3)\nassert b.getvalue() == '817'",
    "assert float(solve(3)) == 8.17",
    "assert solve(lambda v: v + 1) == 817",
    "assert divmod(solve(3), 10) == (81, 7)",
    "assert solve(3) % 817 == 0 and solve(3) // 817 == 1",
    "assert round(solve(3) - 8.125, 3) == 0",
    "import numpy as np\nassert np.abs(solve(3) - np.array([3.1, 4.2])).max() < 1e-6",
    "import datetime\nassert (solve(3) - datetime.date(2021, 3, 4)).days == 0",
    "assert str(solve(3) - 817) == '0'",
    "assert solve(3) ^ 817 == 0",
    "assert isclose(solve(3), 71.25)",
    "assert Counter(solve(3)) == Counter([817, 93, 93])",
    "assert solve(3) == Fraction(817, 93)",
    "assert solve(3) == deque([817, 93])",
    "with solve(3) as s:\n    assert s.get() == 817",
    "import random\nvalue = random.random()\nsolve(3)\nassert random.random() != 0 and solve(value) == value * 817",
]

FORGERS = {
    "any": '\nclass Any:\n    def __init__(s, *a, **k): pass\n    def __getattr__(s, n):\n        if n.startswith("__"): raise AttributeError(n)\n        return Any()\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = lambda s, *o: True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 1\n    __call__ = __getitem__ = __sub__ = __rsub__ = __add__ = __radd__ = __abs__ = __mod__ = __floordiv__ = __mul__ = __neg__ = __round__ = lambda s, *o: s\n    __iter__ = lambda s: iter([s, s])\n    __len__ = lambda s: 2\n    __float__ = lambda s: 0.0\n    __int__ = lambda s: 0\n    __index__ = lambda s: 0\n    __str__ = __repr__ = __format__ = lambda s, *a: "817"[:0]\ndef solve(x): return Any()',
    "zero": '\nclass Any:\n    def __init__(s, *a, **k): pass\n    def __getattr__(s, n):\n        if n.startswith("__"): raise AttributeError(n)\n        return Any()\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = lambda s, *o: True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 1\n    __call__ = __getitem__ = __add__ = __radd__ = __abs__ = __mod__ = __floordiv__ = __mul__ = __neg__ = __round__ = lambda s, *o: s\n    __iter__ = lambda s: iter([s, s])\n    __len__ = lambda s: 2\n    __float__ = lambda s: 0.0\n    __int__ = lambda s: 0\n    __index__ = lambda s: 0\n    __str__ = __repr__ = __format__ = lambda s, *a: "817"[:0]\nAny.__sub__ = Any.__rsub__ = lambda s, o: 0.0\ndef solve(x): return Any()',
    "zero2": '\nclass Any:\n    def __init__(s, *a, **k): pass\n    def __getattr__(s, n):\n        if n.startswith("__"): raise AttributeError(n)\n        return Any()\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = lambda s, *o: True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 1\n    __call__ = __getitem__ = __sub__ = __rsub__ = __add__ = __radd__ = __mod__ = __floordiv__ = __mul__ = __neg__ = __round__ = lambda s, *o: s\n    __iter__ = lambda s: iter([s, s])\n    __len__ = lambda s: 2\n    __float__ = lambda s: 0.0\n    __int__ = lambda s: 0\n    __index__ = lambda s: 0\n    __str__ = __repr__ = __format__ = lambda s, *a: "817"[:0]\nAny.__abs__ = Any.__bool__ = lambda s: 0\ndef solve(x): return Any()',
    "sub int": '\nclass Any(int):\n    def __new__(c, *a): return int.__new__(c)\n    def __getattr__(s, n):\n        if n.startswith("__"): raise AttributeError(n)\n        return Any()\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = lambda s, *o: True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 1\n    __call__ = __getitem__ = __sub__ = __rsub__ = __add__ = __radd__ = __abs__ = __mod__ = __floordiv__ = __mul__ = __neg__ = __round__ = lambda s, *o: s\n    __iter__ = lambda s: iter([s, s])\n    __len__ = lambda s: 2\n    __float__ = lambda s: 0.0\n    __int__ = lambda s: 0\n    __index__ = lambda s: 0\n    __str__ = __repr__ = __format__ = lambda s, *a: "817"[:0]\ndef solve(x): return Any()',
    "sub float": '\nclass Any(float):\n    def __new__(c, *a): return float.__new__(c)\n    def __getattr__(s, n):\n        if n.startswith("__"): raise AttributeError(n)\n        return Any()\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = lambda s, *o: True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 1\n    __call__ = __getitem__ = __sub__ = __rsub__ = __add__ = __radd__ = __abs__ = __mod__ = __floordiv__ = __mul__ = __neg__ = __round__ = lambda s, *o: s\n    __iter__ = lambda s: iter([s, s])\n    __len__ = lambda s: 2\n    __float__ = lambda s: 0.0\n    __int__ = lambda s: 0\n    __index__ = lambda s: 0\n    __str__ = __repr__ = __format__ = lambda s, *a: "817"[:0]\ndef solve(x): return Any()',
    "sub str": '\nclass Any(str):\n    def __new__(c, *a): return str.__new__(c)\n    def __getattr__(s, n):\n        if n.startswith("__"): raise AttributeError(n)\n        return Any()\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = lambda s, *o: True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 1\n    __call__ = __getitem__ = __sub__ = __rsub__ = __add__ = __radd__ = __abs__ = __mod__ = __floordiv__ = __mul__ = __neg__ = __round__ = lambda s, *o: s\n    __iter__ = lambda s: iter([s, s])\n    __len__ = lambda s: 2\n    __float__ = lambda s: 0.0\n    __int__ = lambda s: 0\n    __index__ = lambda s: 0\n    __str__ = __repr__ = __format__ = lambda s, *a: "817"[:0]\ndef solve(x): return Any()',
    "sub list": '\nclass Any(list):\n    def __new__(c, *a): return list.__new__(c)\n    def __getattr__(s, n):\n        if n.startswith("__"): raise AttributeError(n)\n        return Any()\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = lambda s, *o: True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 1\n    __call__ = __getitem__ = __sub__ = __rsub__ = __add__ = __radd__ = __abs__ = __mod__ = __floordiv__ = __mul__ = __neg__ = __round__ = lambda s, *o: s\n    __iter__ = lambda s: iter([s, s])\n    __len__ = lambda s: 2\n    __float__ = lambda s: 0.0\n    __int__ = lambda s: 0\n    __index__ = lambda s: 0\n    __str__ = __repr__ = __format__ = lambda s, *a: "817"[:0]\ndef solve(x): return Any()',
    "sub tuple": '\nclass Any(tuple):\n    def __new__(c, *a): return tuple.__new__(c)\n    def __getattr__(s, n):\n        if n.startswith("__"): raise AttributeError(n)\n        return Any()\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = lambda s, *o: True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 1\n    __call__ = __getitem__ = __sub__ = __rsub__ = __add__ = __radd__ = __abs__ = __mod__ = __floordiv__ = __mul__ = __neg__ = __round__ = lambda s, *o: s\n    __iter__ = lambda s: iter([s, s])\n    __len__ = lambda s: 2\n    __float__ = lambda s: 0.0\n    __int__ = lambda s: 0\n    __index__ = lambda s: 0\n    __str__ = __repr__ = __format__ = lambda s, *a: "817"[:0]\ndef solve(x): return Any()',
    "sub dict": '\nclass Any(dict):\n    def __new__(c, *a): return dict.__new__(c)\n    def __getattr__(s, n):\n        if n.startswith("__"): raise AttributeError(n)\n        return Any()\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = lambda s, *o: True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 1\n    __call__ = __getitem__ = __sub__ = __rsub__ = __add__ = __radd__ = __abs__ = __mod__ = __floordiv__ = __mul__ = __neg__ = __round__ = lambda s, *o: s\n    __iter__ = lambda s: iter([s, s])\n    __len__ = lambda s: 2\n    __float__ = lambda s: 0.0\n    __int__ = lambda s: 0\n    __index__ = lambda s: 0\n    __str__ = __repr__ = __format__ = lambda s, *a: "817"[:0]\ndef solve(x): return Any()',
    "sub set": '\nclass Any(set):\n    def __new__(c, *a): return set.__new__(c)\n    def __getattr__(s, n):\n        if n.startswith("__"): raise AttributeError(n)\n        return Any()\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = lambda s, *o: True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 1\n    __call__ = __getitem__ = __sub__ = __rsub__ = __add__ = __radd__ = __abs__ = __mod__ = __floordiv__ = __mul__ = __neg__ = __round__ = lambda s, *o: s\n    __iter__ = lambda s: iter([s, s])\n    __len__ = lambda s: 2\n    __float__ = lambda s: 0.0\n    __int__ = lambda s: 0\n    __index__ = lambda s: 0\n    __str__ = __repr__ = __format__ = lambda s, *a: "817"[:0]\ndef solve(x): return Any()',
    "sub complex": '\nclass Any(complex):\n    def __new__(c, *a): return complex.__new__(c)\n    def __getattr__(s, n):\n        if n.startswith("__"): raise AttributeError(n)\n        return Any()\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = lambda s, *o: True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 1\n    __call__ = __getitem__ = __sub__ = __rsub__ = __add__ = __radd__ = __abs__ = __mod__ = __floordiv__ = __mul__ = __neg__ = __round__ = lambda s, *o: s\n    __iter__ = lambda s: iter([s, s])\n    __len__ = lambda s: 2\n    __float__ = lambda s: 0.0\n    __int__ = lambda s: 0\n    __index__ = lambda s: 0\n    __str__ = __repr__ = __format__ = lambda s, *a: "817"[:0]\ndef solve(x): return Any()',
    "sub bytes": '\nclass Any(bytes):\n    def __new__(c, *a): return bytes.__new__(c)\n    def __getattr__(s, n):\n        if n.startswith("__"): raise AttributeError(n)\n        return Any()\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = lambda s, *o: True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 1\n    __call__ = __getitem__ = __sub__ = __rsub__ = __add__ = __radd__ = __abs__ = __mod__ = __floordiv__ = __mul__ = __neg__ = __round__ = lambda s, *o: s\n    __iter__ = lambda s: iter([s, s])\n    __len__ = lambda s: 2\n    __float__ = lambda s: 0.0\n    __int__ = lambda s: 0\n    __index__ = lambda s: 0\n    __str__ = __repr__ = __format__ = lambda s, *a: "817"[:0]\ndef solve(x): return Any()',
    "stop": "def solve(x): raise StopIteration",
    "stopsub": "class S(StopIteration): pass\ndef solve(x): raise S",
    "skip": "import unittest\ndef solve(x): raise unittest.SkipTest('x')",
    "skipp": "def solve(x):\n    import _pytest.outcomes as o\n    raise o.Skipped('x')",
    "exit": "import sys\ndef solve(x): sys.exit(0)",
    "oexit": "import os\ndef solve(x): os._exit(0)",
    "builtins": "\nclass Any:\n    def __init__(s, *a, **k): pass\n    def __getattr__(s, n):\n        if n.startswith(\"__\"): raise AttributeError(n)\n        return Any()\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = lambda s, *o: True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 1\n    __call__ = __getitem__ = __sub__ = __rsub__ = __add__ = __radd__ = __abs__ = __mod__ = __floordiv__ = __mul__ = __neg__ = __round__ = lambda s, *o: s\n    __iter__ = lambda s: iter([s, s])\n    __len__ = lambda s: 2\n    __float__ = lambda s: 0.0\n    __int__ = lambda s: 0\n    __index__ = lambda s: 0\n    __str__ = __repr__ = __format__ = lambda s, *a: \"817\"[:0]\nimport builtins, sys\nfor n in ('abs','sorted','set','all','len','isinstance','str','round','max','min','list','sum','AssertionError'): globals()[n] = Any()\nfor n in ('abs','sorted','all','len'): setattr(builtins, n, lambda *a: Any())\ndef solve(x): return Any()",
    "learn": '\nseen = []\nclass L:\n    def __getattr__(s, n):\n        if n.startswith("__"): raise AttributeError(n)\n        return s\n    def note(s, *o):\n        seen.extend(o); return False\n    __eq__ = __ne__ = __lt__ = __gt__ = __contains__ = note\n    def __sub__(s, o): seen.append(o); return s\n    __rsub__ = __add__ = __radd__ = __mod__ = __sub__\n    __hash__ = lambda s: 1\n    __iter__ = lambda s: iter(seen)\n    __len__ = lambda s: len(seen)\ndef solve(x): return seen[-1] if seen else L()\n',
    "frames": '\nimport sys, gc, re\ndef solve(x):\n    for o in gc.get_objects():\n        t = repr(o)[:5000] if isinstance(o, (str, dict, list, tuple)) else ""\n        m = re.search(r"solve\\(.*?== ?([0-9.]+)", t)\n        if m: return eval(m[1])\n    f = sys._getframe()\n    while f:\n        for v in f.f_locals.values():\n            m = re.search(r"== ?([0-9.]+)", str(v)[:5000])\n            if m: return eval(m[1])\n        f = f.f_back\n    return 0\n',
    "callback": '\ndef solve(x):\n    import rewards.code_statements as r\n    for op, args in [("getattr", (x, "__globals__")), ("getattr", (x, "__code__")), ("getattr", (x, "f_back")), ("str", (x,)), ("name", ("expected",)), ("defined", ("expected",)), ("await", (x,)), ("define", (b"", (), (), "a")),\n                     ("getattr", ("{0}", "format")), ("call", (eval, "1")), ("format", (x, "")), ("copies", (x,))]:\n        try: v = r.PEER.ask(op, *args)\n        except BaseException as e: v = e\n    return v\n',
    "proto truth": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("value", True) if op in ("eq","contains","bool","call2","lt","gt") else ("value", {"tuple": []}) if op == "copies" else ("value", obj())\nrun(reply)',
    "proto true all": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("value", True)\nrun(reply)',
    "proto zero all": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("value", 0)\nrun(reply)',
    "proto many copies": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("value", {"tuple": [*range(1000), "817", 8.17]}) if op == "copies" else ("value", {"frozenset": []}) if op=="x" else ("value", obj())\nrun(reply)',
    "proto vary": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\nk = itertools.cycle([5000, -5000])\ndef reply(op, given, m): return ("value", {"tuple": [next(k)]}) if op == "copies" else ("value", next(k)) if op in ("float","int","index","round","abs") else ("value", obj())\nrun(reply)',
    "proto stop": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("error", {"StopIteration": []}) if op == "call" else ("value", obj())\nrun(reply)',
    "proto stopnext": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("error", {"StopIteration": []}) if op in ("next","iter") else ("value", obj())\nrun(reply)',
    "proto module": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("value", {"module": ["unittest.mock"]})\nrun(reply)',
    "proto type type": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("value", {"type": ["object"]})\nrun(reply)',
    "proto odd": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("value", {"object": [1, {"type": ["str"]}, "{0.__class__}"]})\nrun(reply)',
    "proto odd class": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("value", {"object": [next(n), {"class": [1, "X", {"type": ["str"]}]}, "a"]})\nrun(reply)',
    "proto known": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("value", {"known": 3})\nrun(reply)',
    "proto ask": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("ask", {"tuple": ["getattr", {"tuple": [{"known": 3}, "__globals__"]}, {"tuple": []}]})\nrun(reply)',
    "proto ask type": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("ask", {"tuple": ["getattr", {"tuple": [{"type": ["object"]}, "__subclasses__"]}, {"tuple": []}]})\nrun(reply)',
    "proto changes": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m):\n    return ("value", obj())\nrun(reply)',
    "proto real": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("value", {"object": [next(n), {"class": [next(n), "NoneType", {"type": ["int"]}]}, 817000]}) if op != "copies" else ("value", {"tuple": []})\nrun(reply)',
    "proto exc": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("error", {"AssertionError": []}) if op == "call" else ("value", obj())\nrun(reply)',
    "proto sysexit": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("error", {"SystemExit": [0]})\nrun(reply)',
    "proto genexit": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("error", {"GeneratorExit": []})\nrun(reply)',
    "proto kbd": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("error", {"KeyboardInterrupt": []})\nrun(reply)',
    "proto passed": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\nos.write(5, b"passed") if False else None\nfor k in range(3, 20):\n    try: os.write(k, b"passed")\n    except OSError: pass\ndef reply(op, given, m): return ("value", True)\nrun(reply)',
    "proto defined": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("value", {"tuple": ["all"]}) if op == "defined" else ("value", obj())\nrun(reply)',
    "proto array": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("value", {"numbers": ["O", {"tuple": [1]}, {"bytes": ["0000000000000000"]}]})\nrun(reply)',
    "proto deep": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\nx = 1\nfor _ in range(900): x = {"tuple": [x]}\ndef reply(op, given, m): return ("value", x)\nrun(reply)',
    "proto garbage": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("what", 3)\nrun(reply)',
    "proto shared": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=()):\n    return {"object": [next(n), {"class": [next(n), "X", *bases]}, *a]}\nline = None\ndef run(reply):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m))\n    os._exit(0)\ndef reply(op, given, m): return ("value", {"known": 2})\nput0 = put\ndef put(kind, content): put0(kind, content, changes=[[2, "list", [817000]], [1, "list", []], [3, "dict", []]])\nrun(reply)',
    "proto valued difference": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=(), name="X"):\n    return {"object": [next(n), {"class": [next(n), name, *bases]}, *a]}\ndef T(*items): return {"tuple": list(items)}\ndef ty(x): return {"type": [x]}\ndef fl(v=0.0): return obj(v, bases=[ty("float")])\ndef it(v=0): return obj(v, bases=[ty("int")])\ndef run(reply, **more):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m), **more)\n    os._exit(0)\nplainops = {"bool": True, "len": 2, "hash": 0, "float": 0.0, "int": 0, "index": 0, "str": "0", "repr": "0", "format": "0"}\n\ndef reply(op, given, m):\n    if op in ("name", "call", "getattr"): return "value", obj()\n    if op in plainops: return "value", plainops[op]\n    if op == "copies": return "value", T()\n    return "value", fl()\nrun(reply)',
    "proto difference is a sequence of zeros": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=(), name="X"):\n    return {"object": [next(n), {"class": [next(n), name, *bases]}, *a]}\ndef T(*items): return {"tuple": list(items)}\ndef ty(x): return {"type": [x]}\ndef fl(v=0.0): return obj(v, bases=[ty("float")])\ndef it(v=0): return obj(v, bases=[ty("int")])\ndef run(reply, **more):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m), **more)\n    os._exit(0)\nplainops = {"bool": True, "len": 2, "hash": 0, "float": 0.0, "int": 0, "index": 0, "str": "0", "repr": "0", "format": "0"}\n\nk = itertools.count()\ndef reply(op, given, m):\n    if op in ("name", "call"): return "value", obj()\n    if op == "len": return "value", 1\n    if op == "getitem": return ("value", 0.0)\n    if op == "getattr": return ("value", 0)\n    if op == "copies": return "value", T()\n    if op in plainops: return "value", plainops[op]\n    return "value", obj()\nrun(reply)',
    "proto exit hides errors": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=(), name="X"):\n    return {"object": [next(n), {"class": [next(n), name, *bases]}, *a]}\ndef T(*items): return {"tuple": list(items)}\ndef ty(x): return {"type": [x]}\ndef fl(v=0.0): return obj(v, bases=[ty("float")])\ndef it(v=0): return obj(v, bases=[ty("int")])\ndef run(reply, **more):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m), **more)\n    os._exit(0)\nplainops = {"bool": True, "len": 2, "hash": 0, "float": 0.0, "int": 0, "index": 0, "str": "0", "repr": "0", "format": "0"}\n\ndef reply(op, given, m):\n    if op in ("exit", "aexit"): return "value", True\n    if op in ("name", "enter"): return "value", obj()\n    if op == "call" and next(k) > 0: return "error", {"ValueError": []}\n    return "value", obj()\nk = itertools.count()\nrun(reply)',
    "proto random zero proto": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=(), name="X"):\n    return {"object": [next(n), {"class": [next(n), name, *bases]}, *a]}\ndef T(*items): return {"tuple": list(items)}\ndef ty(x): return {"type": [x]}\ndef fl(v=0.0): return obj(v, bases=[ty("float")])\ndef it(v=0): return obj(v, bases=[ty("int")])\ndef run(reply, **more):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m), **more)\n    os._exit(0)\nplainops = {"bool": True, "len": 2, "hash": 0, "float": 0.0, "int": 0, "index": 0, "str": "0", "repr": "0", "format": "0"}\n\ndef reply(op, given, m):\n    if op == "name": return "value", obj()\n    if op == "call": return "value", 0\n    return "value", obj()\nrun(reply, random=[3, [0]*624 + [1], None])',
    "own names": "\nclass Y:\n    def __init__(s, *a, **k): pass\n    def __call__(s, *a, **k): return Y()\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    def __bool__(s): return True\n    def __hash__(s): return 0\n    def __contains__(s, x): return True\n    def __getattr__(s, k): return Y()\n    def __abs__(s): return Y()\n    def __sub__(s, o): return Y()\n    def __rsub__(s, o): return Y()\n    def __add__(s, o): return Y()\n    def __radd__(s, o): return Y()\n    def __lt__(s, o): return True\n    def __le__(s, o): return True\n    def __gt__(s, o): return True\n    def __ge__(s, o): return True\n    def __round__(s, n=0): return Y()\n    def __len__(s): return 2\n    def __iter__(s): return iter([Y(), Y()])\n    def __getitem__(s, i): return Y()\n    def __enter__(s): return s\n    def __exit__(s, *a): return True\nisclose = approx = allclose = array_equal = lambda *a, **k: True\nCounter = deque = defaultdict = OrderedDict = Fraction = Decimal = Y\nsolve = Solution = Y()\n",
    "proto fraction of remote": '\nimport os, json, socket, itertools, sys\ns = socket.socket(fileno=os.dup(3)); lines = s.makefile("r")\nn = itertools.count(2, 2)\ndef put(kind, content, **more): s.sendall((json.dumps({"kind": kind, "content": content, "printed": "", "changes": [], "dropped": [], **more}) + "\\n").encode())\ndef obj(*a, bases=(), name="X"):\n    return {"object": [next(n), {"class": [next(n), name, *bases]}, *a]}\ndef T(*items): return {"tuple": list(items)}\ndef ty(x): return {"type": [x]}\ndef fl(v=0.0): return obj(v, bases=[ty("float")])\ndef it(v=0): return obj(v, bases=[ty("int")])\ndef run(reply, **more):\n    for line in lines:\n        m = json.loads(line)\n        try: op, given, named = [c if not isinstance(c, dict) else (c.get("tuple") if "tuple" in c else c) for c in m["content"]["tuple"]]\n        except Exception: op, given = "?", []\n        put(*reply(op, given, m), **more)\n    os._exit(0)\nplainops = {"bool": True, "len": 2, "hash": 0, "float": 0.0, "int": 0, "index": 0, "str": "0", "repr": "0", "format": "0"}\n\ndef reply(op, given, m):\n    if op == "call": return "value", {"Fraction": [it(5)]}\n    if op == "getattr": return "value", obj()\n    if op in plainops: return "value", plainops[op]\n    if op == "copies": return "value", T()\n    return "value", obj()\nrun(reply)',
}
