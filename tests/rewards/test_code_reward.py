"""The reward `code` runs programs against tests of each form, and judges their outputs in another process."""

from __future__ import annotations

import base64
import datetime
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import uuid
import zlib
from collections import Counter, OrderedDict
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath

import pytest
from reward_cases import within
from statement_programs import FORGED, FORGERS, HONEST

from rewards import make_rewards
from rewards.code import CodeReward, program_of, read_livecodebench, read_tests, same_output
from rewards.code_statements import Peer

ROOT = Path(__file__).resolve().parents[2]
SUM = "print(sum(map(int, input().split())))"
SUM_TESTS = [{"input": "3 4\n", "output": "7\n"}, {"input": "5 6\n", "output": "11\n"}]
ADD = "def add(a, b):\n    return a + b"


def block(program: str) -> str:
    return f"I write:\n```python\n{program}\n```\n"


@pytest.fixture(scope="module")
def score():
    """score(program, tests) returns the reward of one program."""
    reward = CodeReward(timeout=1, workers=2)
    return lambda program, tests: reward([block(program)], tests=[tests])[0]


DOCSTRING = 'def f():\n    """\n    Example:\n    ```\n    f()\n    ```\n    """\n    return 1'
AT_THE_MARGIN = '"""\nUsage:\n```python\nf()\n```\n"""\ndef f(): return 1'


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("````\nx = 1\n````", "x = 1"),
        ("~~~\nx = 1\n~~~", "x = 1"),
        ("~~~~python\nx = 1\n~~~~~", "x = 1"),
        ("```python\r\nx = 1\r\n\r\ny = 2\r\n```\r\n", "x = 1\n\ny = 2"),
        # names of Python, and of other languages
        *((f"```{name}\nx = 1\n```\nIt prints\n```\n7\n```\n", "x = 1")
          for name in ("py", "python3", "Python", " py3", "PYTHON", "python3.11", "{.python}", "python a.py")),
        ("```\nx = 1\n```\nRun it:\n```bash\npython x.py\n```", "x = 1"),
        ("```python\nx = 1\n```\n```pycon\n>>> x\n```", "x = 1"),
        ("```solution\nx = 1\n```", "x = 1"),
        ("```py\nx = 1\n```\n```\ny = 2\n```\n```python\nz = 3\n\nz = 4\n```\nc", "z = 3\n\nz = 4"),
        ("a\n```\nx = 1\n```\nb\n```\ny = 2\n```\nc", "y = 2"),
        # spaces before fences, and text beside them
        ("1. Write\n   ```python\n   if x:\n       y = 2\n   ```\n2. Run", "if x:\n    y = 2"),
        ("\t```python\n\tx = 1\n\t```", "x = 1"),
        ("<answer>```python\nx = 1\n```</answer>", "x = 1"),
        ("```python\nx = 1\n``` That is all.", "x = 1"),
        ("Use ``` as in `a`.\n```python\nx = 1\n```", "x = 1"),
        # fences in a program
        *((f"```{name}\n{program}\n```\nafter", program)
          for name in ("", "python") for program in (DOCSTRING, AT_THE_MARGIN, "s = \'\'\'\n```\n\'\'\'")),
        ("```python\nx = '\"\"\"'\n```\nthen\n```python\ny = 2\n```", "y = 2"),  # a single triple quote
        # blocks that are never closed
        ("```python\nx = 1\n```\n```python\ny = 2", "x = 1"),
        ("```python\nx = 1\n```python\ny = 2\n```", "y = 2"),
        ("```python\nx = 1\ny = 2", "x = 1\ny = 2"),
        ("```\nx = 1\n```\nstill thinking", "x = 1"),
        ("```\n```", ""),
        ("x = 1", None),
        ("```x = 1```", None),
        ("```python\n", None),
        ("```", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_program_is_the_last_block_named_python_or_else_the_last_one(text, program):
    assert program_of(text) == program


@pytest.mark.parametrize("text", ["```\n" * 50_000, "`" * 99_999 + "x`", "~~~a" * 50_000, "```" + " " * 200_000 + "x`",
                                  '```\n' + '"""\n```\n' * 20_000, " " * 200_000])  # fmt: skip
def test_a_program_is_found_in_time_linear_in_the_text(text):
    start = time.process_time()
    program_of(text)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("program", "tests", "reward"),
    [
        (SUM, SUM_TESTS, 1.0),
        (SUM, json.dumps(SUM_TESTS), 1.0),
        (SUM, SUM_TESTS[0], 1.0),
        (SUM, {"inputs": ["3 4", "5 6"], "outputs": ["7", "11"]}, 1.0),
        (SUM, {"inputs": [["3 4"]], "outputs": [["7"]]}, 1.0),  # lists of lines
        (SUM, {"ground_truth": json.dumps({"inputs": ["3 4"], "outputs": ["7"], "fn_name": None})}, 1.0),
        (SUM, {"inputs": ["3 4", "5 6"], "outputs": ["7", "12"]}, 0.0),
        (SUM, {"input": ["3 4\n", "5 6\n"], "output": ["7\n", "11\n"]}, 1.0),  # CodeContests: two tests
        (SUM, [{"input": ["3 4", "5 6"], "output": ["7", "11"]}, SUM_TESTS[1]], 1.0),
        ("print(7)", {"input": ["3 4\n", "5 6\n"], "output": ["7\n", "11\n"]}, 0.0),
        (SUM, {"input": [["3 4"]], "output": [["7"]]}, 1.0),
        ("print(7)", SUM_TESTS, 0.0),
        (ADD, [{"input": "3\n4", "output": "7", "testtype": "functional", "fn_name": "add"}], 1.0),
        (ADD, [{"input": "3\n4", "output": "7", "testtype": "functional", "metadata": {"func_name": "add"}}], 1.0),
        (ADD, [{"type": "function_call", "fn_name": "add", "input": "3\n4", "output": "8"}], 0.0),
        (ADD, {"inputs": [[3, 4], ["a", "b"]], "outputs": [[7], "ab"], "fn_name": "add"}, 1.0),
        ("class Solution:\n    def add(self, a: List[int], b): return a + b", {"inputs": ["[1]\n[2]"],
            "outputs": ["[1, 2]"], "fn_name": "add"}, 1.0),
        (ADD, ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"], 1.0),
        (ADD, "assert add(1, 2) == 3\nassert add(2, 2) == 4", 1.0),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], 0.0),
        (ADD, ["1 / 0"], 0.0),
        (ADD, ["def test_add():\n    assert add(1, 2) == 3"], None),  # never called
        (ADD, ["def check(f):\n    assert f(1, 2) == 3\ncheck(add)"], 1.0),
        (ADD, ["assert add(1, 2) =="], None),
        ("def add(a, b) return", ["assert True"], 0.0),
        ("1 / 0", ["assert True"], 0.0),
    ],
)  # fmt: skip
def test_tests_of_each_form(score, program, tests, reward):
    assert score(program, tests) == reward


def test_livecodebenchs_columns(score):
    private = json.dumps([{"input": "2\n2", "output": "4", "testtype": "functional"}])
    packed = base64.b64encode(zlib.compress(pickle.dumps(private))).decode()
    columns = {
        "public_test_cases": [json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}])] * 2,
        "private_test_cases": [private, packed],
        "metadata": [json.dumps({"func_name": "add"})] * 2,
    }
    reward = CodeReward(workers=1)
    assert reward([block(ADD)] * 2, **columns) == [1.0, 1.0]
    public = {
        "tests": columns["public_test_cases"],
        "metadata": [{"func_name": "add"}, {"func_name": None}],
    }  # DeepCoder
    assert reward([block(ADD)] * 2, **public) == [1.0, None]
    assert reward([block(ADD)], tests=[["assert add(1, 2) == 3"]], metadata=["any text"]) == [1.0]
    assert reward([block("def add(a, b): return 3")] * 2, **columns) == [0.0, 0.0]


class Attack:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    packed = base64.b64encode(zlib.compress(pickle.dumps(Attack(str(tmp_path / "made"))))).decode()
    with pytest.raises(ValueError, match="cannot be unpacked"):
        read_livecodebench("[]", packed)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "tests",
    [
        None, [], "", "[]", "{}", "[1", 7, [7], [""], [None], ["1 +"], {"inputs": ["1"]},
        {"inputs": ["1"], "outputs": []},
        {"input": ["1", "2"], "output": ["1"]}, {"input": ["1"], "output": "1"}, {"input": [], "output": []},
        {"inputs": 3, "outputs": 3}, [{"input": "1"}], [{"input": 1, "output": "1"}],
        [{"input": "1", "output": "1", "testtype": "other"}], [{"input": "1", "output": "1", "testtype": "functional"}],
        [{"input": "1 2", "output": "1", "fn_name": "f"}], {"ground_truth": None},
    ],
)  # fmt: skip
def test_tests_that_cannot_be_read_give_no_reward(tests, caplog):
    metrics = {}
    with caplog.at_level(logging.WARNING):
        assert CodeReward(workers=1)([block(SUM)], tests=[tests], log_metric=metrics.__setitem__) == [None]
    assert metrics["rewards/unusable_tests"] == 1
    assert "tests cannot be read" in caplog.text
    with pytest.raises((ValueError, TypeError)):
        read_tests(tests)


@pytest.mark.parametrize(
    ("result", "expected", "reward"),
    [
        ("(1, 2)", [1, 2], 1.0), ("[(1, (2,))]", [[1, [2]]], 1.0), ("{'a': (1, [(2,)])}", {"a": [1, [[2]]]}, 1.0),
        ("namedtuple('P', 'x y')(1, 2)", [1, 2], 1.0), ("{1: (2,)}", {"1": [2]}, 1.0), ("[(1, 2)]", [[2, 1]], 0.0),
        ("{1, 2}", [1, 2], 0.0), ("range(2)", [0, 1], 0.0), ("b'a'", "a", 0.0), ("'[1]'", [1], 0.0),
        ("[10**5000, 1]", [float("inf"), 1], 0.0),
    ],
)  # fmt: skip
def test_results_are_equal_if_json_writes_them_alike(score, result, expected, reward):
    tests = {"input": "", "output": json.dumps(expected), "testtype": "functional", "fn_name": "f"}
    assert score(f"def f(): return {result}", [tests]) == reward


def test_partial_credit_is_the_share_of_passed_tests():
    reward = CodeReward(timeout=0.5, workers=1, partial=True)
    tests = ["assert f(0) == 0", "assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"]
    programs = ["f = int", "f = lambda x: 2 * x - 1", "def f(x):\n    while x == 1: pass\n    return x", "f = None"]
    assert reward(list(map(block, programs)), tests=[tests] * 4) == [1.0, 0.25, 0.25, 0.0]


def test_metrics_count_completions():
    metrics = {}
    programs = [SUM, "while True: pass", "1 / 0", "print(7)", SUM]
    texts = [*map(block, programs), "no program"]
    reward = CodeReward(timeout=0.5, workers=2)
    assert reward(texts, tests=[SUM_TESTS] * 6, log_metric=metrics.__setitem__) == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    counts = {"code_timeout": 1, "code_error": 1, "code_no_program": 1, "unusable_tests": 0}
    assert metrics == {f"rewards/{name}": float(count) for name, count in counts.items()}


@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("import sys\nprint(sys.argv[1:], __name__)", "[] __main__"),
        ("if __name__ == '__main__':\n    print('ran')", "ran"),
        ("import atexit\natexit.register(print, 'late')\nprint('early')", "early\nlate"),
        ("import os\nfile = os.fdopen(1, 'w')\nfile.write('kept back')", "kept back"),
        ("import sys, io\nsys.stdout = io.TextIOWrapper(open(1, 'wb'))\nprint('wrapped')", "wrapped"),
        ("print('right')\nraise SystemExit(1)", "right"),
        ("import os\nprint('right', flush=True)\nos._exit(0)", "right"),
        ("print(open(0).read())", "given"),
        ("import sys\nprint(sys.stdin.readline())", "given"),
        ("import os\nprint(dict(os.environ).get('HOME'))", "None"),
        ("print(2 ** 100_000 % 10 ** 20_000 > 0, len(str(2 ** 100_000)))", "True 30103"),
        ("import threading\nthreading.Timer(0.1, print, ['from a thread']).start()", "from a thread"),
        ("import asyncio\nasync def f(): return 3\nprint(asyncio.run(f()))", "3"),
        ("from concurrent.futures import ThreadPoolExecutor\nprint(ThreadPoolExecutor(2).submit(sum, [1, 2]).result())",
         "3"),
        ("import io, sys\nsys.stdout = io.StringIO()\nprint(1)\nsys.stdout = sys.__stdout__\nprint(3)", "3"),
        ("import socket\na, b = socket.socketpair()\na.send(b'x')\nprint(b.recv(1))", "b'x'"),
        ("import sys, threading\nthreading.stack_size(2**27)\nsys.setrecursionlimit(10**6)\n"
         "def f(n): return n and 1 + f(n - 1)\nthreading.Thread(target=lambda: print(f(30_000))).start()", "30000"),
        ("import resource\nresource.setrlimit(resource.RLIMIT_STACK, (2**22, 2**22))\nprint(1)", "1"),
        ("with open('/dev/null', 'w') as file: print('lost', file=file)\nprint(1)", "1"),
        ("print(gcd(4, 6), Counter('aab')['a'], heappop([1]), List)", "2 2 1 typing.List"),
        ("import time\nprint(time.time() > 0, time.perf_counter() > 0, time.sleep(0.01))", "True True None"),
        ("print('\\udc80'.encode('utf-8', 'surrogateescape'), 'ä€😀')", "b'\\x80' ä€😀"),
    ],
)  # fmt: skip
def test_a_program_runs_as_python_runs_it(score, program, output):
    assert score(program, [{"input": "given", "output": output}]) == 1.0
    assert score(program, [{"input": "given", "output": output + "!"}]) == 0.0


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True), ("  1 2  \n 3\n\n", "1 2\n3", True), ("1.0 2", "1 2.00", True),
        ("1e2", "100", True), ("1\n2", "1 2", False), ("1\n\n2", "1\n2", False), ("yes", "YES", False),
        ("1.0000001", "1", False), ("nan", "nan", True), ("nan 1", "nan 1.0", False), ("sNaN 1", "sNaN 1.0", False),
        ("", "", True), ("", "0", False), ("1e999999999", "1e999999998", False), ("a 1", "a 1.0", False),
    ],
)  # fmt: skip
def test_outputs_are_compared_line_by_line_and_numbers_by_value(output, expected, same):
    assert same_output(output, expected) is same


@pytest.fixture
def peers():
    """Two ends of a connection: of a program's process, and of the statements' process."""
    program, statements = socket.socketpair()
    return Peer(program, judges=False), Peer(statements, judges=True)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -7, 2**63, -(10**500), [-(10**50_000)], 0.1, float("inf"), "ä\ud800\n", b"\x00\xff", 1 + 2j,
        [], {},
        (1, (2, [3])), {1, "a"}, frozenset({(1,)}), {1: "a", (2, 3): {"x": None}}, {"dict": 1}, {"tuple": [1]}, int,
        range(3), Counter("ab"), OrderedDict(a=1), ValueError,
        datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
        datetime.time(1, 2), Decimal("1.10"), Fraction(1, 3), PurePosixPath("a/b"), uuid.UUID(int=5), json,
        slice(1, None),
    ],
)  # fmt: skip
def test_plain_values_survive_the_pipe(peers, value):
    peers[0]._send("value", value)
    kind, copy = peers[1]._receive()
    assert kind == "value"
    assert copy == value
    assert type(copy) is type(value)


def test_lists_are_shared_until_nothing_holds_them(peers):
    program, statements = peers
    inner: list = []
    given = {"a": inner}
    statements._send("value", given)
    copy = program._receive()[1]
    copy["a"].append(1)
    program._send("value", copy["a"])
    assert statements._receive()[1] is inner
    assert given == {"a": [1]}
    del given, inner
    for _ in range(2):
        statements._send("value", None)
        program._receive()
    assert not statements._shared
    assert not program._shared


@pytest.mark.parametrize(
    "content",
    ['{"object": [0, {"type": ["os"]}]}', '{"os": ["system"]}', "{}", '{"a": [1], "b": [2]}', "[1",
     '{"frozenset": [[]]}', '{"int": ["z"]}',
     '{"Fraction": [1, 0]}', "[" * 100_000, '{"type": ["type"]}', '{"known": 1}', '{"memoryview": []}',
     '{"class": [1, "X", {"type": ["str"]}]}', '{"numbers": ["O", {"tuple": [1]}, {"bytes": ["0000000000000000"]}]}'],
)  # fmt: skip
def test_a_forged_message_raises_an_ordinary_error(peers, content):
    message = f'{{"kind": "value", "content": {content}, "printed": "", "changes": [], "dropped": []}}\n'
    peers[0]._end.sendall(message.encode())
    with pytest.raises((ValueError, TypeError, ArithmeticError, RecursionError, LookupError)):
        peers[1]._receive()


@pytest.mark.few(16)
@pytest.mark.parametrize("name", HONEST)
def test_statements_judge_as_plain_python_does(score, name):
    right, wrong, tests = HONEST[name]
    assert [score(program, tests) for program in (right, wrong)] == [1.0, 0.0]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FORGERS)
def test_no_program_passes_statements_without_the_answer(name):
    """It may return objects that equal everything, replace functions, or write messages to the other process itself."""
    reward = CodeReward(timeout=0.3, workers=4)
    scores = reward([block(FORGERS[name])] * len(FORGED), tests=[[statements] for statements in FORGED])
    assert [statements for statements, score in zip(FORGED, scores, strict=True) if score != 0] == []


@pytest.mark.parametrize(
    ("forger", "kind"),
    [("proto valued difference", " - "), ("proto difference is a sequence of zeros", " - "),
     ("proto fraction of remote", " < "), ("proto exit hides errors", "with "), ("own names", "isclose"),
     ("own names", "Counter"), ("own names", "Fraction"), ("own names", "deque")],
)  # fmt: skip
def test_no_program_sees_a_difference_hides_an_error_or_replaces_a_comparison(forger, kind):
    chosen = [statements for statements in FORGED if kind in statements and "zip" not in statements]
    scores = CodeReward(timeout=0.3, workers=2)([block(FORGERS[forger])] * len(chosen), tests=[[s] for s in chosen])
    assert chosen and scores == [0.0] * len(chosen)


def test_no_program_chooses_the_random_numbers_of_statements(score):
    program = "import random\ndef solve(x): random.setstate((3, (0,) * 624 + (1,), None))"
    assert score(program, ["import random\nsolve(3)\nassert random.random() != 0"]) == 1.0


def test_tests_of_forgery_pass_with_the_answer(score):
    assert score("def solve(x): return 817 if x < 3 else 3.14159", [FORGED[1]]) == 1.0
    assert score("def solve(x): return {1: 817, 2: 93}[x]", [FORGED[4], FORGED[6]]) == 1.0
    names = "from math import isclose\nfrom fractions import Fraction\nfrom collections import Counter\n"
    statements = ["assert isclose(solve(71.25), 71.25)", "assert solve(Fraction(1, 3)) == Fraction(1, 3)"]
    assert score(f"{names}def solve(x): return x", [*statements, "assert Counter(solve('aa')) == Counter(a=2)"]) == 1.0


@pytest.mark.parametrize(
    "statements",
    ["class C(Base):\n    def go(self): assert self.x == 817\nC().go()", "assert globals()['add'](1, 2) == 3",
     "import unittest\nclass T(unittest.TestCase): pass\nif __name__ == '__main__': unittest.main()"],
)  # fmt: skip
def test_statements_that_cannot_be_judged_give_no_reward(score, statements):
    assert score("class Base: x = 817\ndef add(a, b): return a + b", [statements]) is None


VECTOR = """
class Vector:
    def __init__(self, x): self.x = x
    def __add__(self, other): return Vector(self.x + other.x)
    def __eq__(self, other): return isinstance(other, Vector) and self.x == other.x
    def __lt__(self, other): return self.x < other.x
    def __len__(self): return self.x
    def __repr__(self): return f"<{self.x}>"
class Always:
    __eq__ = __lt__ = __gt__ = __contains__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __sub__ = __abs__ = lambda self, *_: self
def sort_in_place(items): items.sort()
class Number(int):
    def __eq__(self, other): return True
class Stack(list): push = list.append
class Refused(ValueError): pass
def refuse(): raise Refused("no")
class Cheat:
    __sub__ = __rsub__ = lambda self, other: 0.0
class Pointer:
    __array_interface__ = {"data": (id(None), False), "shape": (2,), "typestr": "<f8", "version": 3}
def abs(x): return 0
def sorted(x): return x
def negative(): return -3
def line(): return deque([1])
def count_letters(): return Counter("ab")
def day(): return datetime.timedelta(days=1)
def steps(): return range(3)
def apply(function, x): return function(x)
LIMIT = 5
"""


@pytest.mark.parametrize(
    ("statements", "passes"),
    [
        ("assert Vector(1) + Vector(2) == Vector(3)", True),
        ("v = Vector(1)\nv.x = 7\nassert v.x == 7 and len(v) == 7 and repr(v) == '<7>'", True),
        ("assert isinstance(Vector(1), Vector) and not isinstance(Vector(1), Always)", True),
        ("assert apply(Vector, 3).x == 3", True),
        ("assert apply(len, 3)", False),  # a function of the statements does not reach the program
        ("s = Stack()\ns.push(1)\ns.push(2)\nassert s == [1, 2] and s.pop() == 2 and s == [1] and s < [2]", True),
        ("assert Number(3) == 4", False),
        ("assert Number(3) == 3 and 2 < Number(3) < 4", True),
        ("try: refuse()\nexcept ValueError as e: assert str(e) == 'no'\nelse: assert False", True),
        ("assert Always() == 3", False),
        ("assert Always() == None or Always() == [] or 3 in Always()", False),
        ("assert Always() < 3", False),
        ("assert abs(Cheat() - 3.5) < 1e-6 or abs(3.5 - Cheat()) < 1e-6", False),
        ("assert abs(negative()) == 3", True),  # the program's abs returns 0
        ("import math\nassert math.isclose(LIMIT, 5) and sorted([2, 1]) == [1, 2] and negative() == -3", True),
        ("import numpy as np\nassert np.asarray(Pointer()).shape == ()", True),  # one object, not memory
        ("items = [3, 1]\nsort_in_place(items=items)\nassert items == [1, 3]", True),
        (
            "from collections import Counter, deque\nassert line() == deque([1]) and count_letters() == Counter('ab')",
            True,
        ),
        ("from datetime import timedelta\nassert day() == timedelta(days=1) and steps() == range(3)", True),
        ("assert abs(Always() - 1.5) < 1e-6", False),
        ("assert [Always()] == [3] or {'a': Always()} == {'a': 3} or (Always(),) == (3,)", False),
        ("import sys; sys.exit(0)", False),
        ("from math import isclose\nassert isclose(LIMIT, 5)", True),
    ],
)
def test_statements_use_a_program_in_another_process(score, statements, passes):
    assert score(VECTOR, [statements]) == float(passes)


def test_a_program_can_neither_see_nor_replace_statements(score):
    secret = "assert answer() == 918273"
    spy = """
import gc, re, sys
def answer():
    texts = [str(item) for item in gc.get_objects() if isinstance(item, (str, dict, list, tuple))]
    frame = sys._getframe()
    while frame:
        texts.append(str(frame.f_locals))
        frame = frame.f_back
    return next((int(match[1]) for text in texts if (match := re.search(r"answer.. == ([0-9]+)", text))), 0)
"""
    assert score(spy, [secret]) == 0.0
    patch = (
        "import builtins\nbuiltins.AssertionError = builtins.exec = builtins.compile = print\ndef answer(): return 0"
    )
    assert score(patch, [secret]) == 0.0
    assert score("def answer(): return 918273", [secret]) == 1.0  # control
    assert score("kept = 'assert answer() == 918273'.upper().lower()\n" + spy, [secret]) == 1.0  # it sees what is there


@pytest.mark.parametrize(
    "forged",
    [
        '{"set": [{"int": "0x1"}]}', '{"Fraction": ["0x1", "0x2"]}', '{"dict": [[{"int": "0x1"}, 1]]}', "7.0", "[7]",
        '{"object": 0}', "[" * 50_000, '{"Decimal": "7"}',
    ],
)  # fmt: skip
def test_a_forged_result_counts_only_if_json_has_its_value(score, forged):
    program = f"import os\ndef f(): os.write(3, {forged!r}.encode() + b'\\n'); os._exit(0)"
    tests = {"inputs": [[]], "outputs": [7], "fn_name": "f"}
    assert score(program, tests) == float(forged == "7.0")


def test_an_exception_in_a_call_is_an_error_and_not_a_wrong_result():
    metrics, tests = {}, [{"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}]
    CodeReward(workers=1)([block("def f(x): raise ValueError")], tests=tests, log_metric=metrics.__setitem__)
    assert metrics["rewards/code_error"] == 1


def test_time_is_processor_time_and_real_time():
    reward = CodeReward(timeout=0.4, workers=2)
    start = time.monotonic()
    assert reward([block("while True: pass")], tests=[SUM_TESTS]) == [0.0]
    busy = time.monotonic() - start
    assert reward([block("import time; time.sleep(60)")], tests=[SUM_TESTS]) == [0.0]
    asleep = time.monotonic() - start - busy
    assert reward([block(f"import time; time.sleep(0.8)\n{SUM}")], tests=[SUM_TESTS[:1]]) == [1.0]
    assert 0.4 < asleep < 0.4 * 5 + 1
    assert 0.4 < busy < 0.4 * 5 + 1


@pytest.mark.parametrize("partial", [False, True])
def test_a_program_has_a_limit_of_time_over_all_its_tests(partial):
    """A program that sleeps just below the limit of each test reaches the limit of all."""
    tests = [{"input": f"{number}", "output": f"{number}"} for number in range(6)]
    sleeper = block("import time\ntime.sleep(0.6)\nprint(input())")
    limited, metrics = CodeReward(timeout=0.3, total_timeout=0.4, workers=1, partial=partial), {}
    [score] = limited([sleeper], tests=[tests], log_metric=metrics.__setitem__)
    assert score < 1
    assert (score > 0) is partial
    assert metrics["rewards/code_timeout"] == 1
    assert CodeReward(timeout=0.3, workers=1, partial=partial)([sleeper], tests=[tests[:2]]) == [1.0]  # control


def test_memory_and_output_are_limited(score):
    small = CodeReward(workers=1, memory_mb=200)
    use = "import sys\ndata = bytearray(300 * 2**20)\n" + SUM
    assert small([block(use)], tests=[SUM_TESTS]) == [0.0]
    assert score(use, SUM_TESTS) == 1.0
    assert score(SUM + "\nwhile True: print('x' * 1000)", SUM_TESTS) == 0.0
    assert score("print('x' * 200_000)", [{"input": "", "output": "x" * 200_000}]) == 1.0


def test_rewards_survive_pickling_and_forks(score):
    reward = pickle.loads(pickle.dumps(CodeReward(timeout=1, workers=1)))
    assert reward([block(SUM)], tests=[SUM_TESTS]) == [1.0]
    child = os.fork()
    if child == 0:
        os._exit(0 if within(20, lambda: reward([block(SUM)], tests=[SUM_TESTS])) == [1.0] else 1)
    assert os.waitpid(child, 0)[1] == 0
    os.killpg(reward._pool._idle[0].process.pid, signal.SIGKILL)
    assert reward([block(SUM)], tests=[SUM_TESTS]) == [1.0]


def test_a_program_ends_when_the_trainer_is_killed():
    marker = f"sleeps_{os.getpid()}"
    script = (
        "from rewards.code import CodeReward\n"
        f"CodeReward(timeout=30)(['```\\nimport time\\n{marker} = 1\\ntime.sleep(60)\\n```'], tests=[['x = 1']])"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, start_new_session=True)

    def relatives() -> set[int]:
        listing = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True).stdout.split("\n")[1:]
        family = {parent.pid}
        for _ in range(6):
            family |= {int(pid) for pid, above in (line.split() for line in listing if line) if int(above) in family}
        return family

    deadline = time.monotonic() + 20
    while len(family := relatives()) < 5 and time.monotonic() < deadline:
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    assert len(family) >= 5  # trainer, worker, supervisor, program, statements
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in family) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0}, "timeout must be"),
        ({"timeout": "6"}, "timeout must be"),
        ({"total_timeout": 0}, "total_timeout must be"),
        ({"memory_mb": 1}, "memory_mb must be"),
        ({"workers": 0}, "workers must be"),
        ({"partial": "yes"}, "partial must be"),
        ({"sandbox": "off"}, "sandbox must be one of required, unsafe"),
        ({"sandbx": "unsafe"}, "unexpected keyword argument 'sandbx'"),
    ],
)
def test_wrong_options_give_a_one_line_error(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        make_rewards([{"name": "code", **options}])
    assert "\n" not in str(caught.value)


def test_an_incomplete_sandbox_is_refused_or_named(monkeypatch, caplog):
    monkeypatch.setattr("rewards.code.absent_parts", lambda: ["no Landlock, so programs could read files"])
    with pytest.raises(ValueError, match=r"the sandbox is incomplete: no Landlock, .*; set sandbox: unsafe"):
        make_rewards(["code"])
    with caplog.at_level(logging.WARNING):
        make_rewards([{"name": "code", "sandbox": "unsafe"}])
    assert "programs run in an incomplete sandbox: no Landlock, so programs could read files" in caplog.text
