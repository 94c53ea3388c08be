"""What a recipe may say, read from the configurations' dataclasses: every key with its type, default and words.

This is the only reading. The page docs/recipes.md (reference.py), `sparse-rl keys` and the JSON Schema (json_schema.py)
are made of it. A key, its type and its default are those of the field; its words are those that the dataclass's
docstring has for it: an entry `name : text`, or `a, b : text` for several, whose further lines are indented.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from sparse_rl.config import NamedConfiguration, default_of, describe, flat_fields, own_fields

REQUIRED = "required"
_ENTRY = re.compile(r"(\w+(?:, \w+)*) : (.*)")


@dataclass(frozen=True)
class Key:
    """One key of a dataclass: its name, its type, its default (dataclasses.MISSING: it is required), and its words."""

    name: str
    hint: Any
    default: Any
    words: str

    @property
    def required(self) -> bool:
        """Whether a recipe must give it."""
        return self.default is dataclasses.MISSING


@dataclass(frozen=True)
class Row:
    """One key as it is shown: its dotted name, its type, its default in YAML's words, and what is said of it.

    default : REQUIRED where there is none; empty for a block, whose keys have defaults of their own
    file : of a block, the file that sets its keys
    """

    key: str
    type: str
    default: str
    words: str
    file: str = ""


@dataclass(frozen=True)
class Section:
    """The keys that one dataclass sets, with those of its blocks: what it is, the file that sets them, a row each."""

    prose: str
    file: str
    rows: list[Row]


# ---- docstrings --------------------------------------------------------------------------------------------


def read_docstring(cls: type) -> tuple[str, dict[str, str]]:
    """The prose of a dataclass's own docstring, and its entries: name -> words."""
    text = cls.__dict__.get("__doc__") or ""
    if text.startswith(f"{cls.__name__}("):  # the signature, which dataclasses write where there is none
        return "", {}
    prose: list[str] = []
    entries: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(text).splitlines():
        if entry := _ENTRY.fullmatch(line):
            names = entry[1].split(", ")
            entries |= dict.fromkeys(names, entry[2])
        elif names and line.startswith(" "):
            entries |= {name: f"{entries[name]} {line.strip()}" for name in names}
        else:
            names = []
            prose.append(line)
    return " ".join(" ".join(prose).split()), entries


def _words(cls: type, key: str) -> str:
    """What the docstrings of a dataclass, and of those that it extends, say of a key; the nearest one counts."""
    found = (entries[key] for base in cls.__mro__ if key in (entries := read_docstring(base)[1]))
    return next(found, "").replace("None", "null")


# ---- keys --------------------------------------------------------------------------------------------------


def own_keys(cls: type) -> Iterator[Key]:
    """The keys that a dataclass has itself, without what it holds flat."""
    hints = own_fields(cls)
    for f in dataclasses.fields(cls):
        if f.name in hints:
            yield Key(f.name, hints[f.name], default_of(f), _words(cls, f.name))


def all_keys(cls: type) -> Iterator[Key]:
    """The keys that stand beside each other in YAML: a dataclass's own, and those of what it holds flat."""
    return itertools.chain.from_iterable(map(own_keys, holders(cls)))


def holders(cls: type) -> Iterator[type]:
    """A dataclass and those that it holds flat."""
    yield cls
    for held in flat_fields(cls).values():
        yield from holders(held)


# ---- as they are shown -------------------------------------------------------------------------------------


def list_sections(cls: type, prefix: str = "") -> list[Section]:
    """The keys of a dataclass: a section of its own, and one for each configuration that it holds flat."""
    places: dict[type, str] = {}
    return [
        Section(read_docstring(holder)[0], _file(holder), list(_list_rows(holder, prefix, places)))
        for holder in holders(cls)
    ]


def _list_rows(cls: type, prefix: str, places: dict[type, str]) -> Iterator[Row]:
    """A row for each key that a dataclass has itself, and for those of its blocks.

    places : where a block's keys have been listed before; there they are not listed again
    """
    for key in own_keys(cls):
        name, value, words, kind = f"{prefix}{key.name}", key.default, key.words, describe(key.hint)
        block = _block(key.hint)
        if block is None:
            yield Row(name, kind, _show(value), words)
            continue
        held, by_name = block
        inner, kind = (f"{name}.NAME", describe(held)) if by_name else (name, kind)
        if held in places:
            words = " ".join(filter(None, [words, f"Its keys are those of `{places[held]}`."]))
            yield Row(inner, kind, _show(value), words)
            continue
        places[held] = inner
        yield Row(inner, kind, _show(value), words or read_docstring(held)[0], _file(held))
        yield from _list_rows(held, f"{inner}.", places)


def _block(hint: Any) -> tuple[type, bool] | None:
    """The dataclass that a key of this type holds, and whether it holds several by name; None: a plain value."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint, False
    for member in get_args(hint):
        if (block := _block(member)) is not None:
            return block[0], block[1] or get_origin(hint) is dict
    return None


def _show(value: Any) -> str:
    if value is dataclasses.MISSING:
        return REQUIRED
    if isinstance(value, NamedConfiguration):
        value = value.name
    if dataclasses.is_dataclass(value):
        return ""
    return value if isinstance(value, str) and value else json.dumps(value)


def _file(cls: type) -> str:
    return f"{cls.__module__.replace('.', '/')}.py"
