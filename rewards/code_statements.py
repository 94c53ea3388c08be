"""Statements that test a program from another process.

docs/rewards.md says what they may do with it. Plain results are copied, lists, dicts and sets are shared (messages
bring the changes to the other process), and anything else is a `Remote`: its methods, and operators between two of
them, run in the process that owns it. Its class is a copy with the same name and bases. Each process answers the
other's calls. A program may forge messages, so reading one makes values of these kinds only.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import copy
import datetime
import importlib
import io
import json
import marshal
import operator
import os
import pathlib
import random
import socket
import sys
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from math import isclose
from opcode import opmap
from pkgutil import resolve_name
from typing import Any

PROGRAM = "program"  # name of the module of a program whose functions are called
SHARED: dict[str, Any] = {kind.__name__: kind for kind in (list, dict, set, deque, OrderedDict, Counter, defaultdict)}
VALUES: tuple[Any, ...] = (str, bytes, int, float, complex, tuple, frozenset)  # a Remote that extends one holds a value
_MADE: tuple[Any, ...] = (
    bytearray, complex, Decimal, Fraction, range, slice, datetime.date, datetime.time, datetime.datetime,
    datetime.timedelta, datetime.timezone, pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath,
    json.JSONDecodeError,
    *(kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, BaseException)),
)  # fmt: skip
TYPES: dict[str, type] = {kind.__name__: kind for kind in (*_MADE, *SHARED.values(), *VALUES, bool, object, type(None))}
MAKERS: dict[str, Callable[..., Any]] = {  # the name of a form -> function that makes the value of its parts
    **{kind.__name__: kind for kind in _MADE},
    "int": lambda text: int(text, 16), "bytes": bytes.fromhex, "tuple": lambda *items: items,
    "frozenset": lambda *items: frozenset(items), "dict_keys": lambda *items: dict.fromkeys(items).keys(),
    "dict_values": lambda *items: dict(enumerate(items)).values(), "dict_items": lambda *items: dict(items).items(),
    "Fraction": lambda *parts: Fraction(*map(operator.index, parts)),  # no objects, which compare as they like
    "UUID": uuid.UUID, "type": TYPES.__getitem__, "module": importlib.import_module,
    "numbers": lambda kind, shape, data: resolve_name("numpy.frombuffer")(data, kind).reshape(shape).copy()[()],
}  # fmt: skip
ARITHMETIC = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift",
)  # fmt: skip
REFUSED = ("lt", "le", "gt", "ge", "sub", "xor", "mod")  # never done with an object of the program and a plain value
FUNCTIONS = (
    "abs", "neg", "pos", "invert", "round", "int", "float", "complex", "index", "bool", "format", "len", "iter", "next",
    "reversed", "str", "repr", "hash", "getitem", "setitem", "delitem", "call",
)  # fmt: skip
METHODS = ("exit", "aexit", "enter", "aenter", "aiter", "anext")
ATTRIBUTES = ("getattr", "setattr", "delattr")
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name, None) or getattr(builtins, name)
       for name in {*ARITHMETIC, *REFUSED, *FUNCTIONS, *ATTRIBUTES, "eq", "contains"}},
    **{name: lambda value, *given, name=f"__{name}__": getattr(type(value), name)(value, *given) for name in METHODS},
    "copy": copy.copy, "deepcopy": lambda value, *_: copy.deepcopy(value), "input": lambda: input(),
    "copies": lambda value: tuple(kind(value) for kind in (*VALUES, *SHARED.values()) if isinstance(value, kind))[:1],
}  # fmt: skip


def _items(value: Any) -> list[Any]:  # of a dict, keys and values in turn
    return [part for pair in value.items() for part in pair] if isinstance(value, dict) else list(value)


class Peer:
    """One of the two processes; `judges` means that of the statements."""

    def __init__(self, end: socket.socket, judges: bool) -> None:
        global PEER
        PEER = self
        self.judges, self.printed, self.operations = judges, io.StringIO(), dict(OPERATIONS)
        self._end, self._lines = end, end.makefile("r", encoding="ascii", newline="\n")
        self._objects: dict[int, Any] = {}  # number -> object that both processes know
        self._numbers: dict[int, int] = {}  # id of an object -> its number, which is odd if the statements made it
        self._shared: dict[int, list[Any]] = {}  # number of a shared object -> items that the other process knows
        self._count = 0

    def ask(self, operation: str, *given: Any, **named: Any) -> Any:
        """Return the result of an operation in the other process, or raise its exception."""
        self._send("ask", (operation, given, tuple(named.items())))
        return self.answer(operation)

    def answer(self, operation: str = "") -> Any:
        """Answer the other's calls until the answer to our own call arrives, and return it."""
        while True:
            kind, content = self._receive()
            if kind == "value":
                return content
            if kind == "error":  # StopIteration would end a loop of the statements
                raise RuntimeError() if isinstance(content, StopIteration) and operation != "next" else content
            try:
                self._send("value", self._run(*content))
            except BaseException as error:
                self._send("error", error)

    def _run(self, name: str, given: tuple[Any, ...], named: tuple[tuple[str, Any], ...]) -> Any:
        if self.judges and name != "input":  # no program reaches frames, or objects that it was not given
            own = any(self._numbers.get(id(value), 0) % 2 for value in given[: 1 if name in ATTRIBUTES else 2])
            if not own or (name in ATTRIBUTES and given[1].startswith(("_", "gi_", "cr_", "ag_", "tb_", "f_"))):
                raise AttributeError(f"a program cannot use {name} of this value of the tests")
        return self.operations[name](*given, **dict(named))

    def _send(self, kind: str, content: Any) -> None:
        message = {"kind": kind, "content": self._write(content), "printed": self.printed.getvalue(), "changes": []}
        self.printed.seek(self.printed.truncate(0))
        done: set[int] = set()
        while left := sorted(self._shared.keys() - done):  # writing items may share more objects
            for number in left:
                items = _items(self._objects[number])
                before, self._shared[number] = self._shared[number], items
                if len(before) != len(items) or not all(map(operator.is_, before, items)):
                    written = [self._write(item) for item in items]
                    message["changes"].append([number, type(self._objects[number]).__name__, written])
            done.update(left)
        message["dropped"] = [n for n in self._shared if self.judges and sys.getrefcount(self._objects[n]) <= 2]
        self._drop(message["dropped"])  # nothing but this table holds them
        self._end.sendall(json.dumps(message).encode("ascii") + b"\n")

    def _receive(self) -> tuple[str, Any]:
        line = self._lines.readline()
        if not line.endswith("\n"):
            raise EOFError("the other process has ended")
        message = json.loads(line)
        for number, name, _ in message["changes"]:
            if number not in self._shared:
                self._know(SHARED[name](), number)
        for number, _, written in message["changes"]:
            value, items = self._objects[number], [self._read(item) for item in written]
            value.clear()
            if isinstance(value, dict):
                for key, item in zip(items[::2], items[1::2], strict=True):
                    value[key] = item
            else:
                (value.update if isinstance(value, set) else value.extend)(items)
            self._shared[number] = _items(value)
        if self.judges:
            sys.stdout.write(message["printed"])
        content = self._read(message["content"])
        self._drop(message["dropped"])
        return message["kind"], content

    def _know(self, value: Any, number: int | None = None) -> int:
        """Remember an object that the other process knows, too. `number` is that of an object made there."""
        if number is None:
            self._count += 2
            number = self._count + self.judges
        elif number % 2 == self.judges:
            raise ValueError(f"the number {number} is one of this process")
        self._objects[number], self._numbers[id(value)] = value, number
        return number

    def _drop(self, numbers: list[int]) -> None:
        for number in numbers:
            del self._shared[number], self._numbers[id(self._objects.pop(number))]

    def _write(self, value: Any) -> Any:
        """Return a value as JSON: None, booleans, numbers and texts as they are, others as {form: parts}."""
        kind, parts = type(value), value
        if value is None or kind is types.TracebackType:
            return None
        if kind in (bool, str, float) or (kind is int and abs(value) < 2**63):
            return value
        if SHARED.get(kind.__name__) is kind and id(value) not in self._numbers:
            self._shared[self._know(value)] = [self]  # not yet the items
        if id(value) in self._numbers:
            return {"known": self._numbers[id(value)]}
        if isinstance(value, type):
            if TYPES.get(value.__name__) is value:
                return {"type": [value.__name__]}
            return {"class": [self._know(value), value.__name__, *map(self._write, value.__bases__)]}
        if kind is types.ModuleType and value.__name__ != PROGRAM:
            return {"module": [value.__name__]}
        if kind.__name__ in MAKERS and kind.__module__ != PROGRAM:
            if kind in (int, bytes, uuid.UUID):
                parts = [hex(value) if kind is int else value.hex() if kind is bytes else str(value)]
            elif kind in _MADE:
                maker, parts, *_ = value.__reduce_ex__(2)
                parts = parts if maker is kind else parts[1:]
            return {kind.__name__: [self._write(part) for part in parts]}
        if kind.__module__ == "numpy" and getattr(getattr(value, "dtype", None), "kind", "O") in "biufcSUmM":
            return {"numbers": [value.dtype.str, self._write(value.shape), self._write(value.tobytes())]}
        number = self._know(value)
        copies = [self._write(*kind.__getnewargs__(value)) for kind in VALUES[:-1] if isinstance(value, kind)]
        return {"object": [number, self._write(kind), *copies[:1]]}

    def _read(self, value: Any) -> Any:
        """Return the value that `_write` wrote in the other process. Raises an error for any other text."""
        if not isinstance(value, dict):
            return value
        [(form, content)] = value.items()
        if form == "known":
            return self._objects[content]
        parts = [self._read(part) for part in content]
        if form == "class":
            self._know(value := _class_like(parts[1], parts[2:]), parts[0])
        elif form == "object":
            base = next(base for base in parts[1].__mro__ if type(base) is not RemoteType)
            self._know(value := base.__new__(*parts[1:]), parts[0])
            if parts[1].__name__ == "coroutine":  # asyncio takes only true ones
                self._know(value := _awaiting(value), parts[0])
        return MAKERS[form](*parts) if form not in ("class", "object") else value


PEER: Peer


class RemoteType(type):
    """The class of copies of the other process's classes. Names are looked up there, but those with two underscores."""

    def __call__(cls, *given: Any, **named: Any) -> Any:
        return PEER.ask("call", cls, *given, **named)

    def __getattribute__(cls, name: str) -> Any:
        return type.__getattribute__(cls, name) if name.startswith("__") else PEER.ask("getattr", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        type.__setattr__(cls, name, value) if name.startswith("__") else PEER.ask("setattr", cls, name, value)


class Remote(metaclass=RemoteType):
    """An object of the other process."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__dict__", "__doc__"):
            try:
                return object.__getattribute__(self, name)
            except AttributeError:
                if name.startswith("__array"):  # NumPy would follow an address in __array_interface__
                    raise
        return PEER.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value) if name.startswith("__") else PEER.ask("setattr", self, name, value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return bool(PEER.ask("eq", self, other))
        return any(value == other for value in _copies(self))  # an object without a copy is unequal

    def __contains__(self, item: object) -> bool:  # an object that contains everything is not believed
        if not isinstance(item, Remote):
            for value in _copies(self):
                return item in value
        number, inside = int.from_bytes(os.urandom(4), "big"), PEER.ask("contains", self, item)
        return bool(inside) and not all(PEER.ask("contains", self, other) for other in (number, -number, str(number)))

    def __exit__(self, *error: Any) -> bool:  # a program hides only what a `raise` in the statements raises
        hidden, trace = bool(PEER.ask("exit", self, *error)), error[2]
        while trace and trace.tb_next:
            trace = trace.tb_next
        code = trace.tb_frame.f_code if trace else None
        raised = code and code.co_filename == "<tests>" and code.co_code[trace.tb_lasti] == opmap["RAISE_VARARGS"]
        return bool(hidden and raised and not isinstance(error[1], AssertionError))

    async def __aexit__(self, *error: Any) -> None:
        await PEER.ask("aexit", self, *error)

    def __await__(self) -> Any:
        yield from ()
        return PEER.ask("await", self)


def _copies(remote: Remote) -> tuple[Any, ...]:
    """Return the plain copy of an object whose class extends a plain one, in a tuple that is empty if there is none."""
    for kind in VALUES[:-1]:  # the value that this object holds: it cannot change between two comparisons
        if kind in type(remote).__mro__:
            return kind.__getnewargs__(remote)
    return tuple(value for value in PEER.ask("copies", remote)[:1] if type(value) in (*SHARED.values(), frozenset))


async def _awaiting(remote: Remote) -> Any:
    return await remote


def _forward(name: str) -> Callable[..., Any]:
    return lambda remote, *given, **named: PEER.ask(name, remote, *given, **named)


def _operator(name: str, swapped: bool = False) -> Callable[..., Any]:
    """Return an operator. With a plain value, it gives an object without a plain copy, and a difference is refused.

    Otherwise an object that a program returns in place of a number could see what is subtracted from it, and return 0.
    """

    def run(remote: Remote, other: Any) -> Any:
        pair, copies = [remote, other], () if isinstance(other, Remote) else _copies(remote)
        if isinstance(other, Remote) or not (copies or name in REFUSED):
            result = PEER.ask(name, *pair[:: -1 if swapped else 1])
            if isinstance(other, Remote) or (isinstance(result, Remote) and not isinstance(result, VALUES)):
                return result
            raise TypeError(f"{name} of an object of the program and a plain value gives a plain value")
        pair[:1] = copies
        return OPERATIONS[name](*pair[:: -1 if swapped else 1]) if copies else NotImplemented

    return run


for _name in (*FUNCTIONS, *METHODS[2:], "delattr", "copy", "deepcopy"):
    type.__setattr__(Remote, f"__{_name}__", _forward(_name))
for _name in ("len", "iter", "getitem", "contains"):
    type.__setattr__(RemoteType, f"__{_name}__", _forward(_name))
for _name in (*ARITHMETIC, *REFUSED):
    type.__setattr__(Remote, f"__{_name.strip('_')}__", _operator(_name))
    type.__setattr__(Remote, f"__r{_name.strip('_')}__", _operator(_name, swapped=True))


def _class_like(name: str, bases: list[type]) -> type:
    """Return a copy of a class of the other process, which extends copies and known types."""
    copies, extended = [base for base in bases if type(base) is RemoteType], (*VALUES, *SHARED.values(), BaseException)
    plain = [base for base in bases if issubclass(base, extended) and base not in copies]
    real = next((kind for kind in vars(types).values() if isinstance(kind, type) and kind.__name__ == name), None)
    members = {"__class__": property(lambda _: real)} if real else {}  # such as generator
    return type.__new__(RemoteType, name, (*(copies or [Remote]), *plain), {"__module__": PROGRAM, **members})


def serve_program(names: dict[str, Any]) -> None:
    """Run the calls of the statements. `names` are those of the program's module."""

    def define(code: bytes, others: Any, closure: Any, name: str, *bases: Any, **named: Any) -> Any:
        own = {**names, **dict(others)}
        body = types.FunctionType(marshal.loads(code), own, name, None, tuple(map(types.CellType, closure)))
        return builtins.__build_class__(body, name, *bases, **named)

    PEER.operations |= {"name": names.__getitem__, "defined": lambda *asked: tuple(n for n in asked if n in names)}
    PEER.operations |= {"await": asyncio.new_event_loop().run_until_complete, "define": define}
    PEER.operations["seed"] = random.seed
    PEER.printed.seek(PEER.printed.truncate(0))
    with suppress(EOFError):
        PEER.answer()


class Names(dict[str, Any]):
    """Built-in names, and modules. Other names are looked up in the program."""

    def __missing__(self, name: str) -> Any:
        return PEER.ask("name", name)


def _make_class(body: types.FunctionType, name: str, *bases: Any, **named: Any) -> Any:
    """Run a class statement: in the program's process, if it extends a class of the program."""
    if not any(type(base) is RemoteType for base in bases):
        return builtins.__build_class__(body, name, *bases, **named)
    codes = [body.__code__]
    for code in codes:
        codes += [item for item in code.co_consts if isinstance(item, types.CodeType)]
    used = tuple((key, body.__globals__[key]) for code in codes for key in code.co_names if key in body.__globals__)
    closure = tuple(cell.cell_contents for cell in body.__closure__ or ())
    return PEER.ask("define", marshal.dumps(codes[0]), used, closure, name, *bases, **named)


def run_statements(statements: str) -> None:
    """Run statements that use the program's names. Raises the first error in them."""
    nodes = list(ast.walk(ast.parse(statements)))
    own = {getattr(node, "name", None) or getattr(node, "arg", None) for node in nodes}
    own |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    used = {node.id for node in nodes if isinstance(node, ast.Name)} - own
    owners = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    modules = [name for name in owners - called - own if name in sys.stdlib_module_names or name == "np"]
    # Of names that statements often use and only the program imports, its own would be equal to everything.
    trusted = {**SHARED, "Decimal": Decimal, "Fraction": Fraction, "isclose": isclose}
    names = Names({**vars(builtins), **trusted, "__build_class__": _make_class})
    names |= {name: importlib.import_module("numpy" if name == "np" else name) for name in modules}
    if used <= names.keys():  # no other name of the program: it may replace one of these
        replaced = PEER.ask("defined", *used)
        if len(replaced) == 1:
            del names[replaced[0]]
    seed = random.seed
    random.seed = lambda *given: seed(*given) or PEER.ask("seed", *given)  # type: ignore[assignment, func-returns-value]
    exec(compile(statements, "<tests>", "exec"), {"__name__": "tests", "__builtins__": names})
