"""Reads the tests of a problem in the forms that datasets use, and compares outputs.

    ["assert add(1, 2) == 3", ...]                                           statements, one text per test
    [{"input": "1 2\n", "output": "3\n"}, ...]                               standard input and output
    [{"input": "1\n2", "output": "3", "testtype": "functional", "fn_name": "add"}, ...]
    {"inputs": ["1 2\n", ...], "outputs": ["3\n", ...]}                      TACO, APPS and PRIME; "fn_name" for a call

Every form may also be a JSON text. A functional test calls a function with the JSON values in the lines of `input`, and
`output` is the JSON of the expected result. The forms of LiveCodeBench and DeepCoder are lists of the second and third
kind, with `metadata: {"func_name": ...}` instead of `fn_name`, in a test or for all tests of a problem.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

from rewards.code_values import from_json_like, read_json, to_text

MOST_BYTES = 2**28  # of tests after decompression
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass)
CALLS = ("functional", "function_call", "call")
STREAMS = ("stdin", "stdin_stdout", "standard_input")


@dataclass(frozen=True)
class Test:
    """One test of a program.

    kind : stdin, call or statements
    input : text for standard input, JSON values in lines, or statements
    outputs : the expected text, or the accepted results (two in some tests of APPS); empty for statements
    function : name of the called function, or ""
    """

    kind: str
    input: str
    outputs: tuple[Any, ...] = ()
    function: str = ""

    @property
    def most_output(self) -> int:
        """Number of bytes that an output may have: enough for every output that can be right."""
        return 2**16 + 8 * max((len(to_text(output)) for output in self.outputs), default=0)

    def is_right(self, output: str) -> bool:
        """Return True if the output of a run (standard output, or the result as text) is an expected one."""
        if self.kind == "stdin":
            return same_output(output, self.outputs[0])
        try:
            result = from_json_like(output)
            # An outer tuple counts as a list: JSON has no tuples.
            result = list(result) if isinstance(result, tuple) else result
            return any(bool(result == expected) for expected in self.outputs)
        except (ValueError, TypeError, RecursionError):  # the program wrote the text
            return False


def same_output(output: str, expected: str) -> bool:
    """Return True if two outputs have equal lines, without white space around them, and with numbers compared by value.

    This is the comparison of LiveCodeBench's checker.
    """
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
    """Return the tests that a dataset's value describes; see the top of the file.

    function : name of the function of functional tests that name none

    Raises ValueError with a one-line message if the value describes no test, or a wrong one.
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
    return [item if isinstance(item, Test) else _read_test(item, function) for item in value]


def read_livecodebench(public: Any, private: Any, function: str = "") -> list[Test]:
    """Return the tests of LiveCodeBench's columns. Private tests are JSON, or a compressed pickle of that text."""
    if isinstance(private, str) and private and private.lstrip()[:1] != "[":
        private = unpacked(private)
    values = [value for value in (public, private) if value not in (None, "", "[]", [])]
    if not values:
        raise ValueError("there are no tests in public_test_cases and private_test_cases")
    return [test for value in values for test in read_tests(value, function)]


def function_name(metadata: Any) -> str:
    """Return the name of the tested function in LiveCodeBench's and DeepCoder's column `metadata`, or ""."""
    try:
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    except ValueError:
        return ""
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return name if isinstance(name, str) else ""


def unpacked(text: str) -> str:
    """Return the text in base64 of zlib of a pickle. A pickle that holds anything but a text is refused."""
    try:
        decompressed = zlib.decompressobj()
        content = decompressed.decompress(base64.b64decode(text, validate=True), MOST_BYTES)
        value = _Texts(io.BytesIO(content)).load()
    except Exception as error:
        raise ValueError(f"the private tests cannot be unpacked: {error}") from error
    if not isinstance(value, str):
        raise ValueError(f"the private tests hold {type(value).__name__}, not a text")
    return value


class _Texts(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"a pickle that names {module}.{name} is refused")


def _of_columns(value: Mapping[str, Any], function: str) -> list[Test]:
    """Return the tests in {"inputs": [...], "outputs": [...], "fn_name": optional}."""
    inputs, outputs = value["inputs"], value.get("outputs")
    function = value.get("fn_name") or function
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"inputs and outputs must be lists of one length in {_short(value)}")
    if not function:
        return [Test("stdin", _lines(given), (_lines(wanted),)) for given, wanted in zip(inputs, outputs, strict=True)]
    tests = []
    for given, wanted in zip(inputs, outputs, strict=True):
        if isinstance(given, str):  # LiveCodeBench: JSON values in lines
            tests.append(_call(function, given, wanted))
        else:  # APPS: a list of arguments, and a list with the result, or the result
            arguments = "\n".join(json.dumps(argument) for argument in given)
            alone = (wanted[0],) if isinstance(wanted, list) and len(wanted) == 1 else ()
            tests.append(Test("call", arguments, (wanted, *alone), function))
    return tests


def _read_test(item: Any, function: str) -> Test:
    if isinstance(item, str):
        if not item.strip():
            raise ValueError("a test is empty")
        try:
            body = ast.parse(item).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"a test is not Python: {error}: {_short(item)}") from error
        if all(isinstance(node, DEFINITIONS) for node in body):
            raise ValueError(f"a test calls nothing, so that every program would pass: {_short(item)}")
        return Test("statements", item)
    if not isinstance(item, Mapping) or "input" not in item or "output" not in item:
        raise ValueError(f"a test must be a text, or a mapping with input and output, not {_short(item)}")
    kind = item.get("testtype") or item.get("type") or ("functional" if item.get("fn_name") else "stdin")
    if kind in STREAMS:
        return Test("stdin", _lines(item["input"]), (_lines(item["output"]),))
    if kind not in CALLS:
        raise ValueError(f"the kind of a test must be stdin or functional, not {_short(kind)}")
    metadata = item.get("metadata")
    named = item.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else "") or function
    if not named:
        raise ValueError("a functional test needs fn_name, the name of its function")
    if not isinstance(item["input"], str):
        raise ValueError(f"the input of a functional test must be JSON values in lines, not {_short(item['input'])}")
    return _call(named, item["input"], item["output"])


def _call(function: str, lines: str, output: Any) -> Test:
    """Return a test that calls a function with the JSON values in the lines, and expects the JSON value `output`."""
    try:
        for line in lines.split("\n") if lines else ():
            read_json(line)
        expected = read_json(output) if isinstance(output, str) else output
    except ValueError as error:
        raise ValueError(f"a functional test is not JSON: {error}") from error
    return Test("call", lines, (expected,), function)


def _lines(value: Any) -> str:
    """Return a text, or the text of a list of lines."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if not isinstance(value, str):
        raise ValueError(f"standard input and output must be texts, not {_short(value)}")
    return value


def _short(value: Any) -> str:
    return f"{value!r:.80}"
