"""All keys of a recipe, read from the configurations' dataclasses: each key with its type, default and description.

docs/recipes.md (reference.py), `sparse-rl keys` and the JSON Schema (json_schema.py) are generated from these keys.
Name, type and default come from the dataclass field. The description comes from the dataclass's docstring: an entry
`name : text`, or `a, b : text` for several keys, with continuation lines indented.
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
    """One key of a dataclass. `default` is dataclasses.MISSING if the key is required; `words` is its description."""

    name: str
    hint: Any
    default: Any
    words: str

    @property
    def required(self) -> bool:
        """True if a recipe must give the key."""
        return self.default is dataclasses.MISSING


@dataclass(frozen=True)
class Row:
    """One key, as texts to display.

    key : dotted name of the key
    default : default in YAML; REQUIRED if the key has no default; empty for a block, whose keys have their own defaults
    file : for a block, the file that defines its keys; else empty
    """

    key: str
    type: str
    default: str
    words: str
    file: str = ""


@dataclass(frozen=True)
class Section:
    """The keys of one dataclass and of its blocks, with the dataclass's description (`prose`) and file."""

    prose: str
    file: str
    rows: list[Row]


# ---- docstrings --------------------------------------------------------------------------------------------


def read_docstring(cls: type) -> tuple[str, dict[str, str]]:
    """Return the prose of a dataclass's own docstring, and the docstring's entries: name -> description."""
    text = cls.__dict__.get("__doc__") or ""
    if text.startswith(f"{cls.__name__}("):  # the signature that dataclasses insert if there is no docstring
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


def _description(cls: type, key: str) -> str:
    """Return the first description of a key in the docstrings of a class and its base classes."""
    descriptions = (entries[key] for base in cls.__mro__ if key in (entries := read_docstring(base)[1]))
    return next(descriptions, "").replace("None", "null")


# ---- keys --------------------------------------------------------------------------------------------------


def own_keys(cls: type) -> Iterator[Key]:
    """Yield the keys of a dataclass, without the keys of its flat fields."""
    hints = own_fields(cls)
    for f in dataclasses.fields(cls):
        if f.name in hints:
            yield Key(f.name, hints[f.name], default_of(f), _description(cls, f.name))


def all_keys(cls: type) -> Iterator[Key]:
    """Yield the keys at one level of the YAML: the dataclass's own keys, and the keys of its flat fields."""
    return itertools.chain.from_iterable(map(own_keys, holders(cls)))


def holders(cls: type) -> Iterator[type]:
    """Yield a dataclass and, recursively, the dataclasses of its flat fields."""
    yield cls
    for held in flat_fields(cls).values():
        yield from holders(held)


# ---- rows and sections -------------------------------------------------------------------------------------


def list_sections(cls: type, prefix: str = "") -> list[Section]:
    """Return the sections of a dataclass: one for its own keys, and one for each flat field."""
    places: dict[type, str] = {}
    return [
        Section(read_docstring(holder)[0], _file(holder), list(_list_rows(holder, prefix, places)))
        for holder in holders(cls)
    ]


def _list_rows(cls: type, prefix: str, places: dict[type, str]) -> Iterator[Row]:
    """Yield a row for each of a dataclass's own keys, and for the keys of its blocks.

    places : block dataclass -> key under which its keys were listed; they are not listed a second time
    """
    for key in own_keys(cls):
        name, value, words, kind = f"{prefix}{key.name}", key.default, key.words, describe(key.hint)
        block = _block(key.hint)
        if block is None:
            yield Row(name, kind, _show(value), words)
            continue
        block_class, by_name = block
        dotted_name, kind = (f"{name}.NAME", describe(block_class)) if by_name else (name, kind)
        if block_class in places:
            words = " ".join(filter(None, [words, f"It has the keys of `{places[block_class]}`."]))
            yield Row(dotted_name, kind, _show(value), words)
            continue
        places[block_class] = dotted_name
        yield Row(dotted_name, kind, _show(value), words or read_docstring(block_class)[0], _file(block_class))
        yield from _list_rows(block_class, f"{dotted_name}.", places)


def _block(hint: Any) -> tuple[type, bool] | None:
    """Return (the dataclass in a key's type, True if the key maps names to instances of it); None for a plain value."""
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
