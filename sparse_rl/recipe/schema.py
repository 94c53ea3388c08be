"""The JSON Schema of recipes (draft 2020-12), with which an editor completes and checks a recipe.

It holds the names, types and choices of the keys, and accepts every recipe that the loader accepts, except for a recipe
whose `cache` block has a value of a wrong type that the sweep replaces. The loader also checks bounds, which the schema
only describes, and conditions between keys. A definition in $defs is named after its dataclass or, for a kind of
recipe, `kind_NAME`. A mapping selects its definition by `if` and `then`: with `oneOf`, an editor would report the
errors of all definitions.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from sparse_rl.config import NamedConfiguration, default_of, describe, own_fields
from sparse_rl.methods.config import PolicyConfig
from sparse_rl.recipe.evaluation import BudgetsRecipe, EvalRecipe, SweepConfig, SweptRecipe
from sparse_rl.recipe.keys import description, holders, read_docstring
from sparse_rl.recipe.load import KINDS, named_tasks
from sparse_rl.recipe.options import PASSED_THROUGH

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]
_SIMPLE = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}


@dataclass(frozen=True)
class Key:
    """One key of a dataclass. `default` is dataclasses.MISSING if the key is required; `words` is its description."""

    name: str
    hint: Any
    default: Any
    words: str

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING


def all_keys(cls: type) -> Iterator[Key]:
    """Yield the keys at one level of the YAML: the dataclass's own keys, and the keys of its flat fields."""
    for holder in holders(cls):
        hints = own_fields(holder)
        for f in (f for f in dataclasses.fields(holder) if f.name in hints):
            yield Key(f.name, hints[f.name], default_of(f), description(holder, f.name))


def recipe_schema(kind: str | None = None) -> Schema:
    """Return the schema of recipes of one kind, or of all recipes if `kind` is None."""
    writer = SchemaWriter()
    if kind is not None:
        schema, title = writer.recipe(kind), f"A sparse-rl recipe of kind {kind}"
    else:
        choices = {name: writer.refer(f"kind_{name}", partial(writer.recipe, name)) for name in KINDS}
        schema, title = _chosen("kind", choices), "A sparse-rl recipe"
    return {"$schema": DIALECT, "title": title, **schema, "$defs": writer.definitions}


class SchemaWriter:
    """Writes schemas, and collects the definitions that several schemas refer to."""

    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}

    def refer(self, name: str, write: Callable[[], Schema]) -> Schema:
        """Return a reference to the definition `name`. On first use, `write` creates the definition."""
        if name not in self.definitions:
            self.definitions[name] = {}  # its content may refer to the definition itself
            self.definitions[name] = write()
        return {"$ref": f"#/$defs/{name}"}

    def recipe(self, kind: str) -> Schema:
        """Return the schema of a kind of recipe, including the options that are passed on to TRL."""
        cls = KINDS[kind]
        schema = self.mapping(cls)
        schema["properties"] = {"kind": {"const": kind}, **schema["properties"]}
        schema["required"] = ["kind", *schema["required"]]
        for option, hint in PASSED_THROUGH.get(kind, {}).items():
            words = f"{describe(hint)}: passed on unchanged to TRL and transformers"
            schema["properties"][option] = {"description": words, **self.type(hint)}
        if issubclass(cls, EvalRecipe | BudgetsRecipe):  # the loader turns a list of named tasks into blocks
            blocks = {key: schema["properties"]["tasks"].pop(key) for key in ("type", "additionalProperties")}
            schema["properties"]["tasks"]["anyOf"] = [blocks, _list_of({"enum": list(named_tasks())}, promote=True)]
        return self.swept(schema) if issubclass(cls, SweptRecipe) else schema

    def swept(self, schema: Schema) -> Schema:
        """Refine the schema of a swept recipe, whose `cache` may be incomplete if a sweep supplies the rest.

        With a sweep, `cache` may have the keys of any policy, an item of `sweep.policy` may have the keys of its own
        policy, and both may lack required keys. Without a sweep, `cache` is one complete policy.
        """
        members = {name: self.member(config, whole=False) for name, config in PolicyConfig.members().items()}
        name = _name(members, PolicyConfig.name_key)
        schemas_of_key: dict[str, list[Schema]] = {PolicyConfig.name_key: [name]}
        for key, value in (pair for member in members.values() for pair in member["properties"].items()):
            if key != PolicyConfig.name_key and value not in schemas_of_key.setdefault(key, []):
                schemas_of_key[key].append(value)
        keys = {key: values[0] if len(values) == 1 else {"anyOf": values} for key, values in schemas_of_key.items()}
        base = {"type": "object", "properties": keys, "additionalProperties": False}
        entry = {"anyOf": [name, _chosen(PolicyConfig.name_key, members)]}
        sweep = self.definitions[SweepConfig.__name__]["properties"]
        sweep["policy"] |= _list_of(entry, promote=True)
        axes = {key: _list_of(value, promote=True) for key, value in keys.items() if key != PolicyConfig.name_key}
        sweep["cache"] |= {"properties": axes, "additionalProperties": False}
        schema["properties"]["cache"] |= {"anyOf": [name, base, {"type": "null"}]}
        whole = {"properties": {"cache": self.type(PolicyConfig | None)}}
        return schema | {"if": {"required": ["sweep"]}, "else": whole}

    def mapping(self, cls: type) -> Schema:
        keys = list(all_keys(cls))
        return {
            "type": "object",
            "description": read_docstring(cls)[0],
            "properties": {key.name: self.property(key) for key in keys},
            "required": [key.name for key in keys if key.required],
            "additionalProperties": False,
        }

    def property(self, key: Key) -> Schema:
        words = ": ".join(filter(None, [describe(key.hint), key.words]))
        schema = {"description": words, **self.type(key.hint)}
        if not key.required and not dataclasses.is_dataclass(key.default):
            schema["default"] = key.default
        elif isinstance(key.default, NamedConfiguration):
            schema["default"] = key.default.as_block()
        return schema

    def family(self, cls: type[NamedConfiguration]) -> Schema:
        """Return the schema of a family: a mapping with a member's name, or the name alone if it needs no key."""
        choices = {
            name: self.refer(member.__name__, partial(self.member, member)) for name, member in cls.members().items()
        }
        alone = [name for name, member in cls.members().items() if not any(key.required for key in all_keys(member))]
        return {"anyOf": [_name(alone, cls.name_key), _chosen(cls.name_key, choices)]}

    def member(self, cls: type[NamedConfiguration], whole: bool = True) -> Schema:
        """Return the schema of a family's member as a mapping. If not `whole`, the mapping may lack required keys."""
        schema = self.mapping(cls)
        schema["properties"] = {cls.name_key: {"const": cls.name}, **schema["properties"]}
        schema["required"] = [cls.name_key, *(schema["required"] if whole else [])]
        return schema

    def type(self, hint: Any, promote: bool = True) -> Schema:
        """Return the schema, without bounds, of the values that `coerce` (sparse_rl/config.py) accepts for a type."""
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
    """Return the schema of a list. With `promote`, the schema also accepts a single item without a list."""
    items = {"type": "array", "items": item}
    return {"anyOf": [items, item]} if promote else items


def _name(names: Iterable[str], key: str) -> Schema:
    """Return the schema of a name that a block may have under `key`; a policy may be the user's own, FILE.py:CLASS."""
    own = {"type": "string", "pattern": r"\.py:"}
    return {"anyOf": [{"enum": list(names)}, own]} if key == PolicyConfig.name_key else {"enum": list(names)}


def _chosen(key: str, choices: Mapping[str, Schema]) -> Schema:
    """Return the schema of a mapping whose value under `key` names the one of `choices` that the mapping must match."""
    return {
        "type": "object",
        "properties": {key: _name(choices, key)},
        "required": [key],
        "allOf": [
            {"if": {"properties": {key: {"const": name}}, "required": [key]}, "then": schema}
            for name, schema in choices.items()
        ],
    }
