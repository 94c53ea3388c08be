"""Statements that test a program from another process: the program's names stand for remote objects.

The process of the program answers calls (`answer_calls`), and the process of the statements runs them
(`run_statements`). Arguments and results are copied if they are plain data (code_values.py). If a function changes a
list, dict or set that is an argument, the change is copied back. Other results are remote objects, whose operations run
in the program's process.

A program must not learn expected values from the statements, or decide about them. So a remote object and plain data
are compared, added and so on here, by a plain copy of the object, such as the list of an object whose class extends
list. An object without a plain copy is unequal to plain data. And a program replaces names of built-in functions and of
the standard library's modules only if the statements use no other name of it.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import operator
import socket
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from rewards.code_values import from_text, to_text

ATTRIBUTES = ("__name__", "__doc__", "__dict__")
MESSAGE_LIMIT = 1_000  # characters of an exception's message that the statements see
_BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift",
)  # fmt: skip
_COMPARISONS = ("lt", "le", "gt", "ge")


def _call(function: Any, *arguments: Any, **named: Any) -> Any:
    return function(*arguments, **named)


def _enter(value: Any) -> Any:
    return type(value).__enter__(value)


def _leave(value: Any, name: str | None, message: str) -> Any:
    error = None if name is None else _exception(name, message)
    return type(value).__exit__(value, error and type(error), error, None)


def _plain(value: Any) -> list[Any]:
    """Return a list with a plain copy of an object. The list is empty if the object's class extends no plain type."""
    kinds: tuple[Any, ...] = (str, bytes, int, float, complex, list, tuple, dict, set, frozenset)
    return [kind(value) for kind in kinds if isinstance(value, kind)][:1]


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": _call, "plain": _plain,
    "enter": _enter, "leave": _leave, "getattr": getattr, "setattr": setattr, "delattr": delattr,
    "getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem, "len": len, "iter": iter,
    "next": next, "reversed": reversed, "str": str, "repr": repr, "bool": bool, "int": int, "float": float,
    "complex": complex, "index": operator.index, "abs": abs, "neg": operator.neg, "pos": operator.pos,
    "invert": operator.invert, "round": round, "isinstance": isinstance, "issubclass": issubclass, "eq": operator.eq,
    **{name: getattr(operator, name) for name in (*_BINARY, *_COMPARISONS)},
}  # fmt: skip


class Connection:
    """One end of a connection on which both sides write lines."""

    def __init__(self, end: socket.socket) -> None:
        self._lines = end.makefile("r", encoding="ascii", newline="\n")
        self._end = end

    def send(self, line: str) -> None:
        self._end.sendall(line.encode("ascii") + b"\n")

    def receive(self) -> str:
        line = self._lines.readline()
        if not line.endswith("\n"):
            raise EOFError("the other process has ended")
        return line


# ---- the process of the program ----------------------------------------------------------------------------


def answer_calls(names: Mapping[str, Any], connection: Connection) -> None:
    """Send the program's names that the statements ask for, and run their operations until they end."""
    objects: list[Any] = []
    numbers: dict[int, int] = {}  # id of an object -> its place in `objects`

    def refer(value: Any) -> int:
        if id(value) not in numbers:
            numbers[id(value)] = len(objects)
            objects.append(value)
        return numbers[id(value)]

    asked = from_text(connection.receive())
    connection.send(to_text({name: names[name] for name in asked if name in names}, refer))
    while True:
        try:
            line = connection.receive()
        except EOFError:
            return
        try:
            operation, arguments, named = from_text(line, objects.__getitem__)
            value = OPERATIONS[operation](*arguments, **named)
            given = (*arguments, *named.values())
            copies = [item for item in given if type(item) in (list, dict, set)]  # not the program's objects
            reply = to_text(["value", value, copies], refer)
        except BaseException as error:
            reply = to_text(["error", _built_in(type(error)), _message(error)])
        connection.send(reply)


def _built_in(kind: type) -> str:
    """Return the name of an exception class, or of its first built-in base class."""
    return next(base.__name__ for base in kind.__mro__ if base.__module__ == "builtins")


def _message(error: BaseException) -> str:
    try:
        return str(error)[:MESSAGE_LIMIT]
    except BaseException:
        return ""


# ---- the process of the statements -------------------------------------------------------------------------


def run_statements(statements: str, connection: Connection) -> None:
    """Run statements that use the program's names. Raises the first error in them."""

    def ask(operation: str, *arguments: Any, **named: Any) -> Any:
        connection.send(to_text([operation, arguments, named], _number))
        kind, value, rest = from_text(connection.receive(), resolve)
        if kind == "error":
            raise _exception(value, rest)
        originals = [item for item in (*arguments, *named.values()) if isinstance(item, list | dict | set)]
        for original, changed in zip(originals, rest, strict=True):
            _copy_back(original, changed)
        return value

    @cache
    def resolve(number: int) -> Remote:
        return Remote(ask, number)

    used = {node.id for node in ast.walk(ast.parse(statements)) if isinstance(node, ast.Name)}
    connection.send(to_text(sorted(used)))
    names = from_text(connection.receive(), resolve)
    usual = {name for name in names if hasattr(builtins, name) or name in sys.stdlib_module_names}
    if usual != names.keys():
        modules = {name: importlib.import_module(name) for name in usual if not hasattr(builtins, name)}
        names = {**{name: value for name, value in names.items() if name not in usual}, **modules}
    names["__name__"] = "tests"
    exec(compile(statements, "<tests>", "exec"), names)


def _number(value: Any) -> int:
    if isinstance(value, Remote):
        return object.__getattribute__(value, "_number")
    raise TypeError(f"tests can give plain data and the program's objects to a program, not a {type(value).__name__}")


def _exception(name: str, message: str) -> Exception:
    """Return the built-in exception with this name, or a RuntimeError in place of SystemExit and others."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
        return kind(message)
    return RuntimeError(f"{name}: {message}")


def _copy_back(original: Any, changed: Any) -> None:
    if isinstance(original, list):
        original[:] = changed
    else:
        original.clear()
        original.update(changed)


class Remote:
    """An object in the program's process."""

    __slots__ = ("_ask", "_number")

    def __init__(self, ask: Callable[..., Any], number: int) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ATTRIBUTES:  # NumPy would follow an address in __array_interface__
            raise AttributeError(name)
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        _ask(self, "delattr", name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return bool(_ask(self, "eq", other))
        return [other] == _ask(self, "plain")

    def __hash__(self) -> int:
        return id(self)

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> bool:
        return bool(_ask(self, "leave", kind and _built_in(kind), "" if error is None else _message(error)))

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and bool(_ask(instance, "isinstance", self))

    def __subclasscheck__(self, subclass: Any) -> bool:
        return isinstance(subclass, Remote) and bool(_ask(subclass, "issubclass", self))


def _ask(remote: Remote, operation: str, *arguments: Any, **named: Any) -> Any:
    return object.__getattribute__(remote, "_ask")(operation, remote, *arguments, **named)


def _operator(operation: str) -> Callable[..., Any]:
    return lambda remote, *arguments, **named: _ask(remote, operation, *arguments, **named)


def _binary(operation: str, swapped: bool = False) -> Callable[..., Any]:
    def compute(remote: Remote, other: Any) -> Any:
        if isinstance(other, Remote):
            return _ask(remote, operation, other)
        for copy in _ask(remote, "plain"):
            return OPERATIONS[operation](other, copy) if swapped else OPERATIONS[operation](copy, other)
        return NotImplemented

    return compute


_METHODS = {
    "call": "call", "getitem": "getitem", "setitem": "setitem", "delitem": "delitem", "len": "len", "iter": "iter",
    "next": "next", "reversed": "reversed", "str": "str", "repr": "repr", "bool": "bool", "int": "int",
    "float": "float", "complex": "complex", "index": "index", "abs": "abs", "neg": "neg", "pos": "pos",
    "invert": "invert", "round": "round", "enter": "enter",
}  # fmt: skip
for _name, _operation in _METHODS.items():
    setattr(Remote, f"__{_name}__", _operator(_operation))
for _operation in (*_BINARY, *_COMPARISONS):
    setattr(Remote, f"__{_operation.strip('_')}__", _binary(_operation))
for _operation in _BINARY:
    setattr(Remote, f"__r{_operation.strip('_')}__", _binary(_operation, swapped=True))
