"""The JSON Schema of recipes (draft 2020-12), by which an editor completes and checks one.

`sparse-rl keys --json-schema` prints it. It is made of the dataclasses (keys.py), and holds names of keys, types and
choices. It refuses nothing that the loader takes, but for settings beside a sweep that none of its caches has use for.
The loader refuses more: the bounds of a value are words here, and what must hold between keys is not said.

A definition in $defs is a dataclass, of its name, or a kind of recipe, `kind_NAME`. Which definition a mapping must
meet is said by `if` and `then`, not by `oneOf`: so an editor's message is about the one that was named.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from sparse_rl.config import NamedConfiguration, describe
from sparse_rl.methods.config import PolicyConfig
from sparse_rl.recipe.keys import Key, all_keys, read_docstring
from sparse_rl.recipe.kinds import KINDS
from sparse_rl.recipe.kinds.swept import SweepConfig, SweptRecipe
from sparse_rl.recipe.passed_through import PASSED_THROUGH

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]
_SIMPLE = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}


def recipe_schema(kind: str | None = None) -> Schema:
    """The schema of the recipes of one kind; None: of all recipes, each by its `kind`."""
    writer = SchemaWriter()
    if kind is not None:
        schema, title = writer.recipe(kind), f"A sparse-rl recipe of kind {kind}"
    else:
        choices = {name: writer.refer(f"kind_{name}", partial(writer.recipe, name)) for name in KINDS}
        schema, title = _chosen("kind", choices), "A sparse-rl recipe"
    return {"$schema": DIALECT, "title": title, **schema, "$defs": writer.definitions}


class SchemaWriter:
    """Writes schemas, and keeps those that several places share."""

    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}

    def refer(self, name: str, write: Callable[[], Schema]) -> Schema:
        """A reference to a definition, which is written when it is first referred to."""
        if name not in self.definitions:
            self.definitions[name] = {}  # what it holds may refer to it
            self.definitions[name] = write()
        return {"$ref": f"#/$defs/{name}"}

    # ---- recipes ---------------------------------------------------------------------------------------------------

    def recipe(self, kind: str) -> Schema:
        """A kind of recipe, with the options that are handed on to TRL."""
        cls = KINDS[kind]
        schema = self.mapping(cls)
        schema["properties"] = {"kind": {"const": kind}, **schema["properties"]}
        schema["required"] = ["kind", *schema["required"]]
        for option, hint in PASSED_THROUGH.get(kind, {}).items():
            words = f"{describe(hint)}: handed on to TRL and transformers as it is"
            schema["properties"][option] = {"description": words, **self.type(hint)}
        return self.swept(schema) if issubclass(cls, SweptRecipe) else schema

    def swept(self, schema: Schema) -> Schema:
        """A recipe whose cache need not be whole where a sweep says the rest, which its types leave open.

        SweptRecipe.read_points says what is taken: in `cache` the keys of any policy, in `sweep.policy` those of the
        one that is named; what a policy needs may stand in either. Without a sweep, `cache` is one whole policy.
        """
        members = {name: self.member(config, whole=False) for name, config in PolicyConfig.members().items()}
        name = {"enum": list(members)}
        found: dict[str, list[Schema]] = {PolicyConfig.name_key: [name]}
        for key, value in (pair for member in members.values() for pair in member["properties"].items()):
            if key != PolicyConfig.name_key and value not in found.setdefault(key, []):
                found[key].append(value)
        keys = {key: values[0] if len(values) == 1 else {"anyOf": values} for key, values in found.items()}
        base = {"type": "object", "properties": keys, "additionalProperties": False}
        entry = {"anyOf": [name, _chosen(PolicyConfig.name_key, members)]}
        self.definitions[SweepConfig.__name__]["properties"]["policy"] |= _list_of(entry, promote=True)
        schema["properties"]["cache"] |= {"anyOf": [name, base, {"type": "null"}]}
        whole = {"properties": {"cache": self.type(PolicyConfig | None)}}
        return schema | {"if": {"required": ["sweep"]}, "else": whole}

    # ---- dataclasses -----------------------------------------------------------------------------------------------

    def mapping(self, cls: type) -> Schema:
        """A dataclass."""
        keys = list(all_keys(cls))
        return {
            "type": "object",
            "description": read_docstring(cls)[0],
            "properties": {key.name: self.property(key) for key in keys},
            "required": [key.name for key in keys if key.required],
            "additionalProperties": False,
        }

    def property(self, key: Key) -> Schema:
        """A key: its type, its default, and what is said of it."""
        words = ": ".join(filter(None, [describe(key.hint), key.words]))
        schema = {"description": words, **self.type(key.hint)}
        if not key.required and not dataclasses.is_dataclass(key.default):
            schema["default"] = key.default
        elif isinstance(key.default, NamedConfiguration):
            schema["default"] = key.default.as_block()
        return schema

    def family(self, cls: type[NamedConfiguration]) -> Schema:
        """One of a family: by its name alone, where it needs no more, or as a mapping that says its name."""
        choices = {
            name: self.refer(member.__name__, partial(self.member, member)) for name, member in cls.members().items()
        }
        alone = [name for name, member in cls.members().items() if not any(key.required for key in all_keys(member))]
        return {"anyOf": [{"enum": alone}, _chosen(cls.name_key, choices)]}

    def member(self, cls: type[NamedConfiguration], whole: bool = True) -> Schema:
        """A member of a family as a mapping; not `whole`: what it needs may stand elsewhere."""
        schema = self.mapping(cls)
        schema["properties"] = {cls.name_key: {"const": cls.name}, **schema["properties"]}
        schema["required"] = [cls.name_key, *(schema["required"] if whole else [])]
        return schema

    # ---- types -----------------------------------------------------------------------------------------------------

    def type(self, hint: Any, promote: bool = True) -> Schema:
        """What `coerce` (sparse_rl/config.py) takes for a type, but for the bounds of its rules.

        promote : whether a single value passes as a list of one
        """
        origin, args = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return self.type(args[0], promote)
        if origin in (Union, types.UnionType):
            alone = sum(member is not type(None) for member in args) == 1
            return {"anyOf": [self.type(member, alone) for member in args]}
        if origin is Literal:
            return {"enum": list(args)}
        if isinstance(hint, type) and issubclass(hint, NamedConfiguration):
            return self.refer(hint.__name__, partial(self.family, hint))
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return self.refer(hint.__name__, partial(self.mapping, hint))
        if origin is list or hint is list:
            return _list_of(self.type(args[0]) if args else {}, promote)
        if origin is dict or hint is dict:
            return {"type": "object", **({"additionalProperties": self.type(args[1])} if args else {})}
        return {"type": _SIMPLE[hint]} if hint in _SIMPLE else {}


def _list_of(item: Schema, promote: bool) -> Schema:
    """A list; with `promote` also a single value in its place."""
    items = {"type": "array", "items": item}
    return {"anyOf": [items, item]} if promote else items


def _chosen(key: str, choices: Mapping[str, Schema]) -> Schema:
    """A mapping that must meet the schema that it names under this key."""
    return {
        "type": "object",
        "properties": {key: {"enum": list(choices)}},
        "required": [key],
        "allOf": [
            {"if": {"properties": {key: {"const": name}}, "required": [key]}, "then": schema}
            for name, schema in choices.items()
        ],
    }
