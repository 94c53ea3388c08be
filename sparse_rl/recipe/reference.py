"""The reference of recipe keys, docs/recipes.md, made of the configurations' dataclasses alone.

    python -m sparse_rl.recipe.reference > docs/recipes.md

A key, its type and its default are those of the field; its words are those that the dataclass's docstring has for it:
an entry `name : text`, or `a, b : text` for several, whose further lines are indented.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from sparse_rl.config import NamedConfiguration, describe, flat_fields, own_fields
from sparse_rl.policies.config import CONFIGS as POLICIES
from sparse_rl.recipe.kinds import KINDS, Recipe
from sparse_rl.recipe.passed_through import PASSED_THROUGH
from sparse_rl.scorers.config import CONFIGS as SCORERS

REQUIRED = "required"
_ENTRY = re.compile(r"(\w+(?:, \w+)*) : (.*)")

OPENING = """\
# The keys of a recipe

Made of the dataclasses that hold the keys, by `python -m sparse_rl.recipe.reference > docs/recipes.md`; change the
dataclass and its docstring, not this page. The file in brackets, above a table or in the row of a block, is where these
keys and their defaults are set (or, where its class extends another, in the file of that one), and nowhere else.

`data.path` is the key `path` of the block `data`; NAME stands for a name of your choice. A key without words has TRL's
name and means what it means there, or says itself what it is. The parameters of a reward are those of its class in
`rewards/`.
"""


@dataclass(frozen=True)
class Row:
    """One key: its dotted name, its type, its default in YAML's words, and what is said of it."""

    key: str
    type: str
    default: str
    words: str


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
    return next((entries[key] for base in cls.__mro__ if key in (entries := read_docstring(base)[1])), "")


# ---- keys --------------------------------------------------------------------------------------------------


def _block(hint: Any) -> tuple[type, bool] | None:
    """The dataclass that a key of this type holds, and whether it holds several by name; None: a plain value."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint, False
    for member in get_args(hint):
        if (block := _block(member)) is not None:
            return block[0], block[1] or get_origin(hint) is dict
    return None


def _default(f: dataclasses.Field, holder: Any) -> Any:
    if holder is not None:
        return getattr(holder, f.name)
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default


def _show(value: Any) -> str:
    if value is dataclasses.MISSING:
        return REQUIRED
    if isinstance(value, NamedConfiguration):
        value = value.name
    if dataclasses.is_dataclass(value):
        return ""
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"


def list_rows(cls: type, prefix: str = "", default: Any = None, places: dict[type, str] | None = None) -> Iterator[Row]:
    """The keys that a dataclass has itself, and those of its blocks, without what it holds flat.

    default : an instance that the defaults are taken from; None: the dataclass's own
    places : where a block's keys have been listed before; there they are not listed again
    """
    places = {} if places is None else places
    hints = own_fields(cls)
    for f in dataclasses.fields(cls):
        if f.name not in hints:
            continue
        key, value = f"{prefix}{f.name}", _default(f, default)
        words = _words(cls if default is None else type(default), f.name).replace("None", "null")
        block = _block(hints[f.name])
        if block is None:
            yield Row(key, describe(hints[f.name]), _show(value), words)
            continue
        held, by_name = block
        inner = f"{key}.NAME" if by_name else key
        if held in places:
            words = " ".join(filter(None, [words, f"Its keys are those of `{places[held]}`."]))
            yield Row(inner, describe(held if by_name else hints[f.name]), _show(value), words)
            continue
        places[held] = inner
        usual = value if dataclasses.is_dataclass(value) else None
        words = f"{words or read_docstring(held)[0]} ({_file(held)})"
        yield Row(inner, describe(held if by_name else hints[f.name]), _show(value), words)
        yield from list_rows(held, f"{inner}.", usual, places)


def _tables(cls: type, default: Any, places: dict[type, str]) -> Iterator[str]:
    """A table of a dataclass's own keys, and one for each configuration that it holds flat."""
    prose, _ = read_docstring(cls if default is None else type(default))
    yield from _table(cls, prose, list(list_rows(cls, default=default, places=places)), default)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for name, held in flat_fields(cls).items():
        value = _default(fields[name], default)
        yield from _tables(held, None if value is dataclasses.MISSING else value, places)


def _table(cls: type, prose: str, rows: list[Row], default: Any = None) -> Iterator[str]:
    home = _file(cls if default is None else type(default))
    yield f"{prose} ({home})\n" if prose else f"({home})\n"
    if rows:
        yield "| key | type | default | what it is |\n|---|---|---|---|"
        for row in rows:
            cells = (f"`{row.key}`", _cell(row.type), row.default, _cell(row.words))
            yield f"| {' | '.join(cells)} |"
        yield ""


def _file(cls: type) -> str:
    return f"`{cls.__module__.replace('.', '/')}.py`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


# ---- the page ----------------------------------------------------------------------------------------------


def reference(kinds: Mapping[str, type[Recipe]] = KINDS) -> str:
    """The page in Markdown."""
    lines = [OPENING]
    for kind, recipe in kinds.items():
        lines += [f"## kind: {kind}\n", *_tables(recipe, None, {})]
        if options := PASSED_THROUGH.get(kind):
            names = ", ".join(f"`{name}`" for name in options)
            lines.append(f"Handed on to TRL and transformers as they are: {names}.\n")
    lines.append("## Cache policies\n\nWhat a `cache` block takes beside `policy`.\n")
    for title, key, configs in (("policy", "cache", POLICIES), ("scorer", "cache.scorer", SCORERS)):
        if configs is SCORERS:
            lines.append("## Scorers\n\nWhat `cache.scorer` of the policy `kvpop` takes beside `name`.\n")
        for name, config in configs.items():
            rows = list(list_rows(config, f"{key}."))
            prose = read_docstring(config)[0] or ("" if rows else "It has no parameters.")
            lines += [f"### {title}: {name}\n", *_table(config, prose, rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(reference(), end="")
