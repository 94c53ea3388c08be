"""All keys of a recipe, read from the configurations' dataclasses, for `sparse-rl keys`, the schema and the site.

Name, type and default come from the dataclass field. The description comes from the dataclass's docstring: an entry
`name : text`, or `a, b : text` for several keys, with continuation lines indented.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from sparse_rl.config import NamedConfiguration, default_of, describe, flat_fields, own_fields
from sparse_rl.methods.config import CONFIGS as POLICIES
from sparse_rl.methods.kvpop.config import SCORER_CONFIGS as SCORERS
from sparse_rl.recipe.load import KINDS
from sparse_rl.recipe.options import PASSED_THROUGH

REQUIRED = "required"
FAMILIES = {  # a topic of `sparse-rl keys` that is no kind -> description
    "policies": "keys of `cache` besides `policy`",
    "scorers": "keys of `cache.scorer` besides `name`",
    "rewards": "keys of a reward besides `name` and `weight`",
}
_ENTRY = re.compile(r"(\w+(?:, \w+)*) : (.*)")


@dataclass(frozen=True)
class KeyRow:
    """One key, as texts to display.

    default : default in YAML; REQUIRED if the key has no default; empty for a block, whose keys have their own defaults
    file : for a block, the file that defines its keys; else empty
    """

    key: str
    type: str
    default: str
    words: str
    file: str = ""


@dataclass(frozen=True)
class KeySection:
    """The keys of one dataclass and of its blocks, with the dataclass's description (`prose`) and file.

    name : name of a policy or a scorer, or the call of a reward; empty for a part of a recipe
    """

    prose: str
    file: str
    rows: list[KeyRow]
    name: str = ""


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


def description(cls: type, key: str) -> str:
    """Return the first description of a key in the docstrings of a class and its base classes."""
    descriptions = (entries[key] for base in cls.__mro__ if key in (entries := read_docstring(base)[1]))
    return next(descriptions, "").replace("None", "null")


def holders(cls: type) -> Iterator[type]:
    """Yield a dataclass and, recursively, the dataclasses of its flat fields."""
    yield cls
    for held in flat_fields(cls).values():
        yield from holders(held)


# ---- rows and sections -------------------------------------------------------------------------------------


def list_sections(cls: type, prefix: str = "") -> list[KeySection]:
    """Return the sections of a dataclass: one for its own keys, and one for each flat field."""
    places: dict[type, str] = {}
    return [
        KeySection(read_docstring(holder)[0], _file(holder), list(_list_rows(holder, prefix, places)))
        for holder in holders(cls)
    ]


def sections_of(topic: str) -> list[KeySection]:
    if topic in KINDS:
        rows = [KeyRow(key, describe(hint), "", "") for key, hint in PASSED_THROUGH.get(topic, {}).items()]
        return list_sections(KINDS[topic]) + ([KeySection("", "", rows)] if rows else [])
    if topic == "rewards":
        from rewards import REWARDS

        return [
            KeySection(inspect.getdoc(cls) or "", "", [], f"{n}{inspect.signature(cls)}") for n, cls in REWARDS.items()
        ]
    configs: Mapping[str, type] = POLICIES if topic == "policies" else SCORERS
    prefix = "cache." if topic == "policies" else "cache.scorer."
    named = ((name, section) for name, config in configs.items() for section in list_sections(config, prefix))
    return [dataclasses.replace(section, name=name) for name, section in named]


def _list_rows(cls: type, prefix: str, places: dict[type, str]) -> Iterator[KeyRow]:
    """Yield a row for each of a dataclass's own keys, and for the keys of its blocks, unless `places` has the block."""
    hints = own_fields(cls)
    for f in (f for f in dataclasses.fields(cls) if f.name in hints):
        hint, value, words = hints[f.name], default_of(f), description(cls, f.name)
        name, kind, block = f"{prefix}{f.name}", describe(hint), _block(hint)
        if block is None:
            yield KeyRow(name, kind, shown(value), words)
            continue
        block_class, by_name = block
        dotted_name, kind = (f"{name}.NAME", describe(block_class)) if by_name else (name, kind)
        if block_class in places:
            words = " ".join(filter(None, [words, f"It has the keys of `{places[block_class]}`."]))
            yield KeyRow(dotted_name, kind, shown(value), words)
            continue
        places[block_class] = dotted_name
        yield KeyRow(dotted_name, kind, shown(value), words or read_docstring(block_class)[0], _file(block_class))
        if not issubclass(block_class, NamedConfiguration):  # the keys of a policy depend on its name
            yield from _list_rows(block_class, f"{dotted_name}.", places)


def _block(hint: Any) -> tuple[type, bool] | None:
    """Return (the dataclass in a key's type, True if the key maps names to instances of it); None for a plain value."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint, False
    for member in get_args(hint):
        if (block := _block(member)) is not None:
            return block[0], block[1] or get_origin(hint) is dict
    return None


def shown(value: Any) -> str:
    if value is dataclasses.MISSING:
        return REQUIRED
    if isinstance(value, NamedConfiguration):
        value = value.name
    if dataclasses.is_dataclass(value):
        return ""
    return value if isinstance(value, str) and value else json.dumps(value)


def _file(cls: type) -> str:
    return f"{cls.__module__.replace('.', '/')}.py"
