"""The reward `code` runs the program in a completion against tests, whose forms are in docs/rewards.md.

Each test runs the program afresh, in a process of its own that can only compute and read Python's files (sandbox.py,
code_worker.py). Outputs are compared here.
"""

from __future__ import annotations

import ast
import base64
import builtins
import io
import json
import logging
import os
import pickle
import re
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

from rewards.sandbox import absent_parts
from rewards.text import final_parts, require_choice, require_column, require_seconds, require_whole
from rewards.workers import WorkerPool

logger = logging.getLogger(__name__)

SLACK = 5  # a test may last this many times its processor time in real time
TESTS = 10  # by default, a program may use the time of this number of tests for all its tests
WAITS = (0.1, 0.3, 1.0, 3.0, 10.0)  # seconds between two attempts to start a process
GRACE = 20.0  # seconds after that, within which the worker must answer
PROGRAM_LIMIT = 200_000  # characters; a longer text is not a program
WARNING_LIMIT = 20  # maximum number of unusable tests in the log; the metric counts all
LEAST_MEMORY = 64  # megabytes
# The environment of the workers and of all programs. With a fixed hash seed, sets have a fixed order.
ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONUTF8": "1", "PYTHONHASHSEED": "0"}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
FENCE = re.compile(r"(?P<before>.*?)(?<![`~])(?P<fence>`{3,}+|~{3,}+)(?P<name>[^`~]*)$")  # linear in the text
PYTHON = re.compile(r"[{.]*i?py(thon)?[\d.]*(?![a-z-])", re.IGNORECASE)  # the name of a block: python, py3, {python}
NAME = re.compile(r"[\w+#.{}:-]+")


def program_of(text: str) -> str | None:
    """Return the program in a text: the content of its last fenced block named Python.

    If no block is named Python, the last one without a name counts, and else the last one. A last block that is never
    closed counts only if no other is closed. Fences between triple quotes are content. None means that there is none.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    blocks = _blocks(lines, quotes=True)
    if blocks and not blocks[-1].closed:  # perhaps because of a single triple quote
        blocks = _blocks(lines, quotes=False)
    chosen = [block for block in blocks if block.closed] or [block for block in blocks if "".join(block.lines).strip()]
    for kind in (PYTHON, re.compile("$"), re.compile("")):
        for block in reversed(chosen):
            if kind.match(block.name):
                return "\n".join(block.lines)
    return None


@dataclass
class _Block:
    fence: str
    spaces: int  # before the fence
    name: str
    lines: list[str] = field(default_factory=list)
    closed: bool = False


def _blocks(lines: Sequence[str], quotes: bool) -> list[_Block]:
    """Return the fenced blocks. If `quotes` is True, fences between triple quotes are content."""
    blocks: list[_Block] = []
    for line in lines:
        fence = FENCE.match(line)
        spaces = len(line) - len(line.lstrip())
        begun = fence and _Block(fence["fence"], spaces, fence["name"].strip())
        if not blocks or blocks[-1].closed:
            if begun and fence and (not fence["before"].strip() or PYTHON.match(begun.name)):
                blocks.append(begun)
                double = single = 0  # numbers of triple quotes in the block
            continue
        block = blocks[-1]
        quoted = quotes and (double % 2 or single % 2)
        if not begun or quoted or spaces > block.spaces + 3 or not line[spaces:].startswith(block.fence):
            block.lines.append(line[min(spaces, block.spaces) :])
            double, single = double + line.count('"""'), single + line.count("'''")
        elif NAME.fullmatch(begun.name):  # the block before was never closed
            blocks[-1] = begun
            double = single = 0
        else:
            block.closed = True
    return blocks


class CodeReward:
    """Scores 1.0 if the program in a completion passes all tests, else 0.0. Scores None if the tests cannot be read.

    timeout : seconds of processor time for one test; in real time, a test may last five times as long
    total_timeout : the same for all tests of one program together; by default ten times `timeout`
    memory_mb : megabytes of address space of a program
    workers : maximum number of programs that run at once; by default as many as there are cores
    partial : True scores the share of the tests that the program passes
    sandbox : ``required`` refuses to run where a part of the sandbox is missing; ``unsafe`` then runs without that part

    The tests are the column `tests`, or LiveCodeBench's columns. If `partial` is False, the first test that fails ends
    the run of a program. If it is True, the first test that exceeds its time does; the tests after it count as failed.

    docs/rewards.md names the metrics that a call logs.
    """

    __name__ = "code"
    golds = ("tests", "private_test_cases", "public_test_cases")

    def __init__(
        self,
        *,
        timeout: float = 6.0,
        total_timeout: float | None = None,
        memory_mb: int = 2048,
        workers: int | None = None,
        partial: bool = False,
        sandbox: str = "required",
    ) -> None:
        self.timeout = require_seconds("timeout", timeout)
        self.total_timeout = require_seconds(
            "total_timeout", TESTS * timeout if total_timeout is None else total_timeout
        )
        if not isinstance(partial, bool):
            raise ValueError(f"partial must be true or false, not {partial!r}")
        self.partial, self.sandbox = partial, require_choice("sandbox", sandbox, ("required", "unsafe"))
        self.memory_mb = require_whole("memory_mb", memory_mb, LEAST_MEMORY)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = cores if workers is None else require_whole("workers", workers, 1)
        if absent := absent_parts():
            if sandbox == "required":
                raise ValueError(f"the sandbox is incomplete: {'; '.join(absent)}; set sandbox: unsafe to run without")
            logger.warning("code reward: programs run in an incomplete sandbox: %s", "; ".join(absent))
        self._reported: set[str] = set()
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}  # for some Pythons
        self._pool = WorkerPool("code_worker", self.workers, {**ENVIRONMENT, **kept})

    def __call__(
        self,
        completions: Sequence[Any],
        tests: Sequence[Any] | None = None,
        public_test_cases: Sequence[Any] | None = None,
        private_test_cases: Sequence[Any] | None = None,
        metadata: Sequence[Any] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        missing = [None] * len(completions)
        if tests is None and (public_test_cases or private_test_cases):
            sources: list[Any] = list(zip(public_test_cases or missing, private_test_cases or missing, strict=True))
        else:
            sources = list(require_column("code", "tests", tests, completions, columns))
        sources = list(zip(sources, map(function_name, metadata or missing), strict=True))
        programs = list(map(program_of, final_parts(completions, columns)))
        keys = [json.dumps(source, default=id) for source in sources]
        tests_of = {key: self._read(*source) for key, source in dict(zip(keys, sources, strict=True)).items()}

        # Many completions of a group may have the same program, so each distinct program is run only once.
        pairs = list(zip(programs, keys, strict=True))
        runs = [(program, key) for program, key in dict.fromkeys(pairs) if program is not None and tests_of[key]]
        verdicts = self._pool.map(lambda run: self._judge(run[0], tests_of[run[1]]), runs, len(runs))
        verdict_of: dict[Any, tuple[int, str]] = dict(zip(runs, verdicts, strict=True))

        rewards: list[float | None] = []
        ends: Counter[str] = Counter()
        for program, key in pairs:
            if not tests_of[key]:
                rewards.append(None)
                continue
            passed, end = verdict_of.get((program, key), (0, "no program"))
            ends[end] += 1
            share = passed / len(tests_of[key])
            rewards.append(share if self.partial else float(share == 1))
        if log_metric is not None:  # on every call, so that zeros count in TRL's averages
            for name, end in (("timeout", "timeout"), ("error", "failed"), ("no_program", "no program")):
                log_metric(f"rewards/code_{name}", float(ends[end]))
            log_metric("rewards/unusable_tests", float(rewards.count(None)))
        return rewards

    def _read(self, source: Any, function: str) -> list[Test]:
        """Return the tests of one problem. If they cannot be read, return none and log a warning."""
        try:
            if isinstance(source, tuple):
                return read_livecodebench(source[0], source[1], function)
            return read_tests(source, function)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            if len(self._reported) < WARNING_LIMIT and str(error) not in self._reported:
                self._reported.add(str(error))
                unread = "tests cannot be read, and the problem's completions get no reward (None)"
                logger.warning("code reward: %s, as rewards/unusable_tests counts: %s", unread, error)
            return []

    def _judge(self, program: str, tests: list[Test]) -> tuple[int, str]:
        """Return how many tests a program passes, and its end: "timeout" if it reached a limit of time; else the end of
        the first test that it did not pass, "wrong" (output) or "failed"; or "passed"."""
        passed, first_end, left = 0, "passed", float(self.total_timeout)
        for test in tests:
            end, seconds = self._run(program, test, min(self.timeout, left)) if left > 0 else ("timeout", 0.0)
            left -= seconds
            passed += end == "passed"
            first_end = end if end == "timeout" or first_end == "passed" else first_end
            if end == "timeout" or (end != "passed" and not self.partial):
                break
        return passed, first_end

    def _run(self, program: str, test: Test, seconds: float) -> tuple[str, float]:
        """Return the end of one test ("passed", "wrong", "failed" or "timeout"), and the time that it used.

        seconds : limit of that time, which is processor time, or the fifth part of the real time if that is more
        """
        if len(program) > PROGRAM_LIMIT:
            return "failed", 0.0
        statements = test.input if test.kind == "statements" else ""
        request: dict[str, Any] = {"kind": test.kind, "program": program, "input": "" if statements else test.input}
        request |= {"function": test.function, "most_output": test.most_output, "memory": self.memory_mb * 2**20}
        request |= {"seconds": seconds, "real_seconds": SLACK * seconds, "complete": self.sandbox == "required"}
        header, source = json.dumps(request).encode(), statements.encode("utf-8", "replace")
        message = struct.pack(">II", len(header), len(source)) + header + source
        for wait in WAITS:
            reply = self._pool.ask(message, SLACK * self.timeout + GRACE)
            if reply is None:
                return "timeout", seconds
            if not (busy := reply.get("busy")):
                break
            time.sleep(wait)  # until the machine can start processes again
        else:
            raise RuntimeError(f"the code reward can start no process ({busy}); is a limit of them reached?")
        if "error" in reply:
            raise RuntimeError(f"the sandbox of the code reward cannot run programs: {reply['error']}")
        if reply["end"] == "passed" and "output" in reply and not test.is_right(reply["output"]):
            return "wrong", reply["seconds"]
        return reply["end"], reply["seconds"]


MOST_BYTES = 2**28  # of tests after decompression
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass)
CALLS = ("functional", "function_call", "call")
STREAMS = ("stdin", "stdin_stdout", "standard_input")


@dataclass(frozen=True)
class Test:
    kind: str  # stdin, call or statements
    input: str  # text for standard input, JSON values in lines, or statements
    outputs: tuple[Any, ...] = ()  # the expected text, or the accepted results (two in some tests of APPS)
    function: str = ""  # name of the called function

    @property
    def most_output(self) -> int:  # bytes, enough for every output that can be right
        return 2**16 + 8 * max((len(json.dumps(output, default=str)) for output in self.outputs), default=0)

    def is_right(self, output: str) -> bool:
        """Return True if the output of a run (standard output, or the result as text) is an expected one."""
        if self.kind == "stdin":
            return same_output(output, self.outputs[0])
        try:
            result = _json_value(output)
            return any(result == expected for expected in self.outputs)
        except (ValueError, RecursionError):  # the program wrote the text
            return False


def same_output(output: str, expected: str) -> bool:
    """Return True if two outputs have equal lines, without outer white space, numbers by value, as in LiveCodeBench."""
    lines, expected_lines = (text.strip().split("\n") for text in (output, expected))
    return len(lines) == len(expected_lines) and all(map(_same_line, lines, expected_lines))


def _same_line(line: str, expected: str) -> bool:
    line, expected = line.strip(), expected.strip()
    if line == expected:
        return True
    try:
        return [Decimal(word) for word in line.split()] == [Decimal(word) for word in expected.split()]
    except InvalidOperation:
        return False


def read_tests(value: Any, function: str = "") -> list[Test]:
    """Return the tests that a dataset's value describes; ValueError with one line if it describes none, or a wrong one.

    function : name of the function of functional tests that name none
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{", '"'):
        try:
            value = read_json(value)
        except ValueError as error:
            raise ValueError(f"the tests are not JSON: {error}") from error
    if isinstance(value, Mapping):
        if "ground_truth" in value:
            return read_tests(value["ground_truth"], function)
        value = _of_columns(value, function) if "inputs" in value else [value]
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, Sequence) or not value:
        raise ValueError(f"there are no tests in {_short(value)}")
    return [test for item in value for test in ([item] if isinstance(item, Test) else _read_test(item, function))]


def read_livecodebench(public: Any, private: Any, function: str = "") -> list[Test]:
    """Return the tests of LiveCodeBench's columns. Private tests are JSON, or a compressed pickle of that text."""
    if isinstance(private, str) and private and private.lstrip()[:1] != "[":
        try:  # base64 of zlib of a pickle of the text
            content = zlib.decompressobj().decompress(base64.b64decode(private, validate=True), MOST_BYTES)
            private = _Texts(io.BytesIO(content)).load()
        except Exception as error:
            raise ValueError(f"the private tests cannot be unpacked: {error}") from error
        if not isinstance(private, str):
            raise ValueError(f"the private tests hold {type(private).__name__}, not a text")
    values = [value for value in (public, private) if value not in (None, "", "[]", [])]
    if not values:
        raise ValueError("there are no tests in public_test_cases and private_test_cases")
    return [test for value in values for test in read_tests(value, function)]


def function_name(metadata: Any) -> str:
    """Return the name of the tested function in LiveCodeBench's and DeepCoder's column `metadata`, or ""."""
    with suppress(ValueError):
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return name if isinstance(name, str) else ""


class _Texts(pickle.Unpickler):
    """Refuses a pickle that holds anything but texts, numbers and containers of them."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"a pickle that names {module}.{name} is refused")


def _of_columns(value: Mapping[str, Any], function: str) -> list[Test]:
    """Return the tests in {"inputs": [...], "outputs": [...], "fn_name": optional}."""
    inputs, outputs = value["inputs"], value.get("outputs")
    function = value.get("fn_name") or function
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not len(inputs) == len(outputs) > 0:
        raise ValueError(f"inputs and outputs must be lists of one length, and not empty, in {_short(value)}")
    tests = []
    for given, wanted in zip(inputs, outputs, strict=True):
        if not function:
            tests.append(Test("stdin", _lines(given), (_lines(wanted),)))
        elif isinstance(given, str):  # LiveCodeBench: JSON values in lines
            tests.append(_call(function, given, wanted))
        else:  # APPS: a list of arguments, and a list with the result, or the result
            alone = wanted if isinstance(wanted, list) and len(wanted) == 1 else ()
            tests.append(Test("call", "\n".join(map(json.dumps, given)), (wanted, *alone), function))
    return tests


def _read_test(item: Any, function: str) -> list[Test]:
    if isinstance(item, str):
        if not item.strip():
            raise ValueError("a test is empty")
        try:
            body = ast.parse(item).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"a test is not Python: {error}: {_short(item)}") from error
        if all(isinstance(node, DEFINITIONS) or ast.unparse(node).startswith("if __name__ ==") for node in body):
            raise ValueError(f"a test calls nothing, so that every program would pass: {_short(item)}")
        nodes = [node for statement in body for node in ast.walk(statement)]
        if any(isinstance(node, ast.Name) and node.id in ("globals", "locals") for node in nodes):
            raise ValueError(f"a test cannot use globals() or locals(): {_short(item)}")
        defined = {node.asname or node.name for node in nodes if isinstance(node, ast.alias)} | vars(builtins).keys()
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        defined |= {node.name for node in classes}
        for node in classes:  # the class would take an expected value into the program's process
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if not bases <= defined and any(isinstance(part, ast.Assert) for part in ast.walk(node)):
                raise ValueError(f"a class that extends one of the program cannot assert: {_short(item)}")
        return [Test("statements", item)]
    if not isinstance(item, Mapping) or "input" not in item or "output" not in item:
        raise ValueError(f"a test must be a text, or a mapping with input and output, not {_short(item)}")
    kind = item.get("testtype") or item.get("type") or ("functional" if item.get("fn_name") else "stdin")
    if kind in STREAMS:
        columns = {"inputs": item["input"], "outputs": item["output"]}
        many = any(isinstance(column, list) for column in columns.values())
        return _of_columns(columns if many else {name: [text] for name, text in columns.items()}, "")
    if kind not in CALLS:
        raise ValueError(f"the kind of a test must be stdin or functional, not {_short(kind)}")
    metadata = item.get("metadata")
    named = item.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else "") or function
    if not named:
        raise ValueError("a functional test needs fn_name, the name of its function")
    if not isinstance(item["input"], str):
        raise ValueError(f"the input of a functional test must be JSON values in lines, not {_short(item['input'])}")
    return [_call(named, item["input"], item["output"])]


def _call(function: str, lines: str, output: Any) -> Test:
    """Return a test that calls a function with the JSON values in the lines, and expects the JSON value `output`."""
    try:
        for line in lines.split("\n") if lines else ():
            read_json(line)
        expected = _json_value(output) if isinstance(output, str) else output
    except ValueError as error:
        raise ValueError(f"a functional test is not JSON: {error}") from error
    return Test("call", lines, (expected,), function)


def read_json(text: str) -> Any:
    """Return the value of a JSON text, in which a whole number may have any number of digits."""
    return json.loads(text, parse_int=lambda digits: int(Decimal(digits)))


def _json_value(text: str) -> Any:
    """Return the value of a JSON text in time linear in its length: a long whole number is a Decimal."""
    return json.loads(text, parse_int=lambda digits: (int if len(digits) < 4_000 else Decimal)(digits))


def _lines(value: Any) -> str:
    """Return a text, or the text of a list of lines."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if not isinstance(value, str):
        raise ValueError(f"standard input and output must be texts, not {_short(value)}")
    return value


def _short(value: Any) -> str:
    return f"{value!r:.80}"
