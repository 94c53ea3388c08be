"""Programs that attack the machine or the tests, and honest programs among which they are mixed.

hostile_attacks.txt has the attacks: a line `######## CLASS` begins a class, and `----` separates two attacks. A hostile
program attacks, and then prints or returns a guess. The right output of a test is a
function of its input that no program knows, so only a program that steals it could score. In an attack, VICTIM stands
for the path of a file that the caller chooses.
"""

from __future__ import annotations

import os
import random
import resource
import secrets
import signal
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from rewards.code import SLACK, CodeReward
from rewards.workers import Worker

KINDS = ("stdin", "functional", "statements")
CONFUSING = "confusing source"


@dataclass(frozen=True)
class Case:
    """A program, its tests, and the right reward. `label` is the class of a hostile program, or "honest"."""

    label: str
    program: str
    tests: Any
    reward: float


def read_attacks(victim: str) -> dict[str, list[str]]:
    """Return class -> attacks."""
    text = Path(__file__).with_name("hostile_attacks.txt").read_text().replace("VICTIM", repr(victim))
    sections = [section.partition("\n") for section in text.split("######## ")[1:]]
    attacks = {label: content.strip("\n").split("\n----\n") for label, _, content in sections}
    return {**attacks, CONFUSING: CONFUSING_SOURCES}


CONFUSING_SOURCES = [
    "(" * 10_000 + ")" * 10_000,
    "x = " + "[" * 200 + "]" * 200,
    "x = " + "-" * 100_000 + "1",
    "x = " + " + ".join(["1"] * 30_000),
    "'" + "x" * 150_000,
    "x = 1\x00",
    "# -*- coding: utf-7 -*-\n+AGk-mport os",
    "return 0",
    "yield 0",
    "await f",
    "\ud800 = 1",
    "import torch, rewards.code, sparse_rl\ntorch.zeros(10**9)",
    "from __future__ import braces",
    "import " + ".".join(["a"] * 10_000),
    "f'{" * 100 + "1" + "}'" * 100,
]

CHEATS = {
    "stdin": ["print(0)", "print(input())", "print('passed')", "import os\nos.write(1, b'0')\nos._exit(0)"],
    "functional": [
        "def solve(x): return 0",
        "class Same(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def solve(x): return Same()",
        "class Solution:\n    def solve(self, x): return x",
        "def solve(x): return type('A', (), {'__eq__': lambda *a: True})()",
    ],
    "statements": [
        "def solve(x): return 0",
        "class Same:\n    __eq__ = __le__ = __ge__ = lambda self, other: True\n    __ne__ = lambda self, other: False\n"
        "def solve(x): return Same()",
        "def solve(x):\n    import os\n    os._exit(0)",
        "def solve(x): raise SystemExit(0)",
    ],
}


def secret_tests(kind: str, rng: random.Random) -> Any:
    """Return tests of one kind, whose right outputs no program can know."""
    offset = rng.randrange(1_000_003)
    inputs = rng.sample(range(10_000), 2)
    outputs = [(value * 7919 + offset) % 1_000_003 for value in inputs]
    if kind == "stdin":
        return {"inputs": [f"{value}\n" for value in inputs], "outputs": [f"{value}\n" for value in outputs]}
    if kind == "functional":
        return {"inputs": [str(x) for x in inputs], "outputs": [str(y) for y in outputs], "fn_name": "solve"}
    return [f"assert solve({x}) == {y}" for x, y in zip(inputs, outputs, strict=True)]


def hostile_cases(per_class: int, victim: str = "/tmp/victim", seed: int = 0) -> Iterator[Case]:
    """Yield at least `per_class` programs of each class, which pair its attacks with the kinds of tests in turn."""
    rng = random.Random(seed)
    for label, attacks in read_attacks(victim).items():
        kinds, number = cycle(KINDS), 0
        cheats = {kind: cycle(CHEATS[kind]) for kind in KINDS}
        order = rng.sample(attacks, len(attacks))
        while number < per_class:
            for attack in order[:per_class]:
                kind = next(kinds)
                attempt = f"try:\n{textwrap.indent(attack, '    ')}\nexcept BaseException: pass"
                body = attack if label == CONFUSING else attempt
                yield Case(label, f"{body}\n{next(cheats[kind])}", secret_tests(kind, rng), 0.0)
                number += 1
            if len(attacks) % len(KINDS) == 0:
                next(kinds)  # the next round pairs each attack with another kind


HONEST: list[tuple[str, str]] = [  # the body of f(a, b), or of a program that reads a and b; the result is a * b + 1
    ("", "a * b + 1"),
    ("import functools", "functools.reduce(lambda x, y: x + y, [a] * b, 1)"),
    ("import heapq", "heapq.nlargest(1, [a * b + 1, 0])[0]"),
    ("from collections import deque", "sum(deque([a] * b)) + 1"),
    ("import itertools", "sum(itertools.repeat(a, b)) + 1"),
    ("import asyncio\nasync def g(a, b): return a * b + 1", "asyncio.run(g(a, b))"),
    ("import time", "time.sleep(0.02) or a * b + 1"),
    ("import gc, os\ngc.collect()\nos.getpid()", "a * b + 1"),
    ("import random\nrandom.seed(1)", "a * b + (random.random() < 2)"),
    ("try:\n    import resource\n    resource.setrlimit(resource.RLIMIT_STACK, (2**22, 2**22))\nexcept OSError: pass",
     "a * b + 1"),
    ("import sys\nsys.setrecursionlimit(10**6)\ndef g(a, b): return 1 if b == 0 else a + g(a, b - 1)", "g(a, b)"),
    ("import threading\nthreading.stack_size(2**26)\nout = []\n"
     "def g(a, b):\n    t = threading.Thread(target=lambda: out.append(a * b + 1))\n    t.start()\n    t.join()\n"
     "    return out[-1]", "g(a, b)"),
    ("from fractions import Fraction", "int(Fraction(a) * b + 1)"),
    ("from functools import lru_cache\n@lru_cache(None)\ndef g(a, b): return a * b + 1", "g(a, b)"),
    ("class Number:\n    def __init__(self, n): self.n = n\n    def __mul__(self, o): return Number(self.n * o.n)",
     "(Number(a) * Number(b)).n + 1"),
    ("data = bytearray(50 * 2**20)", "a * b + 1 + data[0]"),
    ("try:\n    open('/etc/passwd')\nexcept OSError: pass", "a * b + 1"),
]  # fmt: skip


def honest_cases(count: int = 200, seed: int = 0) -> Iterator[Case]:
    """Yield programs that do no harm, half of them right, with all kinds of tests in turn."""
    rng = random.Random(f"honest/{seed}")
    for number in range(count):
        setup, expression = HONEST[number // 6 % len(HONEST)]
        kind, right = KINDS[number % 3], number % 6 < 3
        pairs = [(rng.randrange(1, 90), rng.randrange(1, 90)) for _ in range(2)]
        results = [a * b + 1 for a, b in pairs]
        result = expression if right else f"{expression} + (a > {min(a for a, _ in pairs) - 1})"
        if kind == "stdin":
            program = f"{setup}\na, b = map(int, input().split())\nprint({result})"
            tests: Any = [{"input": f"{a} {b}\n", "output": f"{n}\n"} for (a, b), n in zip(pairs, results, strict=True)]
        else:
            program = f"{setup}\ndef f(a, b): return {result}"
            if kind == "functional":
                inputs = [f"{a}\n{b}" for a, b in pairs]
                tests = {"inputs": inputs, "outputs": [str(n) for n in results], "fn_name": "f"}
            else:
                tests = [f"assert f({a}, {b}) == {n}" for (a, b), n in zip(pairs, results, strict=True)]
        yield Case("honest", f"{program}  # {number}", tests, float(right))


# ---- the siege -----------------------------------------------------------------------------------------------------

TRACES = ("hostile_was_here", "hostile", "daemon_was_here", "link")
PLACES = ("/tmp", "/", "/dev/shm", "/var/tmp", "/root", "/home", "/usr/lib", "/etc", ".")


@dataclass
class Findings:
    """Everything that a siege found: each list is empty if the sandbox held.

    wrong : cases with a wrong reward, as "class: program"
    late : real seconds of the tests that lasted more than a second longer than their limit
    processes, files, signals : traces of programs outside their processes
    leaked : replies with the secret of the parent's environment
    seconds, growth : duration, and bytes by which the parent's memory grew
    """

    wrong: list[str] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    processes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    seconds: float = 0.0
    growth: int = 0

    @property
    def broken(self) -> list[str]:
        """Texts about everything that the sandbox let through."""
        names = ("wrong", "late", "processes", "files", "signals", "leaked")
        return [f"{name}: {getattr(self, name)}" for name in names if getattr(self, name)]


def besiege(cases: Sequence[Case], victim: Path, timeout: float, workers: int) -> Findings:
    """Score programs with the reward `code`, and return what was found afterwards. Runs in the main thread.

    victim : file at which the programs of hostile_cases(victim=...) aim
    """
    findings, secret, token = Findings(), secrets.token_hex(8), secrets.token_hex(8)
    victim.write_text("untouched")
    before = {name for place in PLACES for name in traces(place)}
    shared = shared_memory()
    caught = (signal.SIGUSR1, signal.SIGIO, signal.SIGTERM, signal.SIGURG, signal.SIGWINCH, signal.SIGCONT)
    handlers = [signal.signal(number, lambda number, _: findings.signals.append(number)) for number in caught]
    ask = Worker.ask

    def timed(worker: Worker, message: bytes, seconds: float) -> dict[str, Any]:
        start = time.monotonic()
        reply = ask(worker, message, seconds)
        elapsed = time.monotonic() - start
        if elapsed > SLACK * timeout + 1:
            findings.late.append(elapsed)
        if secret in str(reply):
            findings.leaked.append(str(reply)[:200])
        return reply

    os.environ["SECRET"] = secret
    Worker.ask = timed  # type: ignore[method-assign]
    try:
        reward = CodeReward(timeout=timeout, workers=workers)
        reward._pool.environment = {**reward._pool.environment, "SIEGE": token}
        reward([fenced(case.program) for case in cases[:8]], tests=[case.tests for case in cases[:8]])
        memory, start = resident_bytes(), time.monotonic()
        scores = reward([fenced(case.program) for case in cases], tests=[case.tests for case in cases])
        findings.seconds, findings.growth = time.monotonic() - start, resident_bytes() - memory
    finally:
        Worker.ask = ask  # type: ignore[method-assign]
        del os.environ["SECRET"]
        for number, handler in zip(caught, handlers, strict=True):
            signal.signal(number, handler)
    del reward  # ends its workers
    for case, score in zip(cases, scores, strict=True):
        if score != case.reward:
            findings.wrong.append(f"{case.label}, {score}: {case.program[:200]!r}")
    deadline = time.monotonic() + 1  # the kernel ends killed processes a little later
    while (left := processes_with(token)) and time.monotonic() < deadline:
        time.sleep(0.02)
    findings.processes = left
    findings.files = sorted({name for place in PLACES for name in traces(place)} - before)
    if victim.read_text() != "untouched" or victim.stat().st_mode & 0o777 == 0:
        findings.files.append(str(victim))
    if shared_memory() != shared:
        findings.files.append("/proc/sysvipc")
    return findings


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


def traces(place: str) -> list[str]:
    try:
        return [f"{place}/{name}" for name in os.listdir(place) if name.startswith(TRACES)]
    except OSError:
        return []


def shared_memory() -> list[str]:
    kinds = (Path(f"/proc/sysvipc/{kind}") for kind in ("shm", "sem", "msg"))
    return [line.split()[0] for kind in kinds if kind.exists() for line in kind.read_text().splitlines()]


def processes_with(token: str) -> list[str]:
    """Return the processes whose environment holds the token."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (folder / "environ").read_bytes():
                processes.append((folder / "cmdline").read_text())
        except OSError:
            continue
    return processes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
