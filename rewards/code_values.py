"""Plain values as JSON texts, for values that cross a pipe from a process that runs a program.

None, booleans, numbers, texts and lists are written as in JSON. Other values are objects with one key, the name of
their type: {"tuple": [1, 2]}, {"dict": [[key, value], ...]}, {"bytes": "00ff"}. Numbers of NumPy become numbers. A
value of any other type is not plain. Reading a text makes plain values only, even from a text that a program forged.
`from_json_like` reads only values that JSON has, and therefore takes time in proportion to the text's length.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

PROGRAM = "program"  # name of the module of a program whose functions are called
SAFE_INTEGER = 2**63  # larger whole numbers are written as hexadecimal texts, which are read in linear time


def _fraction(parts: list[str]) -> Fraction:
    return Fraction(*(int(part, 16) for part in parts))


_TAGGED: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "int": (int, hex, lambda text: int(text, 16)),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "complex": (complex, repr, complex),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, lambda f: [hex(f.numerator), hex(f.denominator)], _fraction),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "range": (range, lambda r: [r.start, r.stop, r.step], lambda r: range(*r)),
    "timedelta": (datetime.timedelta, lambda t: [t.days, t.seconds, t.microseconds], lambda t: datetime.timedelta(*t)),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
}  # fmt: skip
_COLLECTIONS = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}


def read_json(text: str) -> Any:
    """Return the value of a JSON text, in which a whole number may have any number of digits."""
    return json.loads(text, parse_int=lambda digits: int(Decimal(digits)))


def to_text(value: Any, refer: Callable[[Any], Any] | None = None) -> str:
    """Return a value as one line of JSON.

    refer : function that returns a number for a value that is not plain, or whose class belongs to the program; the
        value is written as {"object": number}

    Raises TypeError for a value that is not plain, and RecursionError if lists are nested too deeply.
    """
    return json.dumps(_written(value, refer))


def from_text(text: str, resolve: Callable[[Any], Any] | None = None) -> Any:
    """Return the value that a text of `to_text` describes.

    resolve : function that returns the value for the number of an object that is not plain

    Raises ValueError, TypeError, ArithmeticError or RecursionError for a text that `to_text` did not write.
    """
    return _read(json.loads(text), resolve)


def from_json_like(text: str) -> Any:
    """Return the value of a text of `to_text` whose values JSON could have, except that lists may be tuples.

    Raises ValueError, TypeError or RecursionError for any other text.
    """

    def read(value: Any) -> Any:
        if isinstance(value, list):
            return [read(item) for item in value]
        if not isinstance(value, dict):
            return value
        [(name, content)] = value.items()
        if name == "tuple":
            return tuple(read(item) for item in content)
        if name == "int":
            return int(content, 16)
        if name not in ("dict", "Counter") or not all(isinstance(key, str) for key, _ in content):
            raise ValueError(f"JSON has no {name} like this")
        return {key: read(item) for key, item in content}

    return read(json.loads(text))


def _written(value: Any, refer: Callable[[Any], Any] | None) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if refer is not None and type(value).__module__ == PROGRAM:
        return {"object": refer(value)}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int) and -SAFE_INTEGER < value < SAFE_INTEGER:
        return int(value)
    if isinstance(value, list):
        return [_written(item, refer) for item in value]
    if isinstance(value, dict):
        name = "Counter" if isinstance(value, Counter) else "dict"
        return {name: [[_written(key, refer), _written(item, refer)] for key, item in value.items()]}
    for name, kind in _COLLECTIONS.items():
        if isinstance(value, kind):
            return {name: [_written(item, refer) for item in value]}
    for name, (scalar, write, _) in _TAGGED.items():
        if isinstance(value, scalar):
            return {name: write(value)}
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():  # a number or a boolean of numpy
        return _written(value.item(), refer)
    if refer is None:
        raise TypeError(f"{type(value).__name__} is not plain data")
    return {"object": refer(value)}


def _read(value: Any, resolve: Callable[[Any], Any] | None) -> Any:
    if isinstance(value, list):
        return [_read(item, resolve) for item in value]
    if not isinstance(value, dict):
        return value
    [(name, content)] = value.items()
    if name in ("dict", "Counter"):
        pairs = {_read(key, resolve): _read(item, resolve) for key, item in content}
        return pairs if name == "dict" else Counter(pairs)
    if name in _COLLECTIONS:
        return _COLLECTIONS[name]([_read(item, resolve) for item in content])
    if name == "object" and resolve is not None:
        return resolve(content)
    if name not in _TAGGED:
        raise ValueError(f"{name} is not the name of a type")
    return _TAGGED[name][2](content)
