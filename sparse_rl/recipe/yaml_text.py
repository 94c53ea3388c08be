"""Reads YAML, and overrides from the command line. sparse_rl/config.py checks the values against the configuration.

YAML is read with the 1.2 core rules for plain scalars, because the 1.1 rules of PyYAML turn `1e-6` into text, `no` into
False and `2024-01-01` into a date. Duplicate keys are errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from sparse_rl.config import show
from sparse_rl.errors import UserError, one_line

_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)
_INT = re.compile(r"[-+]?[0-9][0-9_]*$")
_TAG = "tag:yaml.org,2002:"
# PyYAML looks up None for any other tag
_TYPES = (None, *(f"{_TAG}{name}" for name in ("null", "bool", "float", "str", "seq", "map")))
_SIGNED = list("-+.0123456789")
MOST_CHARACTERS = 100_000


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # replaces PyYAML's resolvers; filled below
    yaml_constructors = {tag: yaml.SafeLoader.yaml_constructors[tag] for tag in _TYPES}  # JSON types

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError):  # !!int abc
            wrong = f"{show(node.value)} is not a valid {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, wrong, node.start_mark) from None

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        if not isinstance(node, yaml.MappingNode):  # !!map [a]
            wrong = f"expected a mapping, found a {node.id}"
            raise yaml.constructor.ConstructorError(None, None, wrong, node.start_mark)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (name := (key.tag, key.value)) in lines:
                problem = f"the key {key.value!r} is given twice (first in line {lines[name]}); keep one"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                lines[key.tag, key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)

    def construct_integer(self, node: Any) -> int:
        return int(self.construct_scalar(node))  # 010 is ten, not eight


class _Dumper(yaml.SafeDumper):
    """Writes YAML, and quotes each text that YAML 1.1 or _Loader would read back as something other than text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Loader.add_constructor(f"{_TAG}int", _Loader.construct_integer)
_Loader.add_implicit_resolver(f"{_TAG}null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(f"{_TAG}bool", re.compile(r"(?:[tT]rue|TRUE|[fF]alse|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(f"{_TAG}merge", re.compile(r"<<$"), ["<"])
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(f"{_TAG}int", _INT, _SIGNED)
    _class.add_implicit_resolver(f"{_TAG}float", _FLOAT, _SIGNED)


def parse_yaml(text: str, name: str) -> Any:
    """Return the value of a YAML text. Errors start with `name` and, if it is known, the line.

    Raises UserError for invalid YAML, a duplicate key, or a text of more than MOST_CHARACTERS.
    """
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"{name}: longer than {MOST_CHARACTERS} characters, the limit for a recipe")
    try:
        return _unshared(yaml.load(text, Loader=_Loader))  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{name}{line}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # an escape such as "\\UFFFFFFFF"
        raise UserError(f"{name}: not YAML: {error}") from None


def dump_yaml(mapping: Mapping[str, Any]) -> str:
    """Return YAML that `parse_yaml` reads back unchanged, with the keys in the given order."""
    return yaml.dump(dict(mapping), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def _unshared(value: Any) -> Any:
    """Copy a value so that aliased nodes become separate objects, and an override changes only one of them."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def apply_overrides(mapping: dict[str, Any], overrides: Iterable[str]) -> frozenset[str]:
    """Set the overrides in `mapping`, and return the dotted keys that were set.

    overrides : strings "key=value"; the key is dotted if it belongs to a block, and the value is in YAML
    """
    keys = set()
    for text in overrides:
        key, equals, value = text.partition("=")
        *blocks, last = path = key.strip().split(".")
        if not equals or not all(path):
            raise UserError(f"command line: {show(text)} is not of the form key=value or block.key=value")
        block = mapping
        for depth, name in enumerate(blocks):
            if block.get(name) is None:
                block[name] = {}
            if not isinstance(block[name], dict):
                where = ".".join(blocks[: depth + 1])
                wrong = f"{where} is not a block but {show(block[name])}; set {where} as a whole"
                raise UserError(f"command line: {one_line(text, 60)}: {wrong}")
            block = block[name]
        block[last] = parse_yaml(value, f"command line: {one_line(text, 60)}")
        keys.add(".".join(path))
    return frozenset(keys)
