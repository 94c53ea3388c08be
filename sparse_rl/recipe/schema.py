"""YAML, and overrides of it from the command line. What a configuration makes of the values: sparse_rl/config.py.

YAML is read with the 1.2 core rules for plain scalars, because the 1.1 rules of PyYAML turn `1e-6` into text, `no` into
False and `2024-01-01` into a date. A key given twice is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from sparse_rl.config import show
from sparse_rl.errors import UserError

_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)
_INT = re.compile(r"[-+]?[0-9][0-9_]*$")
_SIGNED = list("-+.0123456789")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # none of PyYAML's own; filled below

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (name := (key.tag, key.value)) in lines:
                problem = f"the key {key.value!r} is given twice (first in line {lines[name]}); keep one"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                lines[key.tag, key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)

    def construct_integer(self, node: Any) -> int:
        return int(self.construct_scalar(node).replace("_", ""))  # 010 is ten, not eight


class _Dumper(yaml.SafeDumper):
    """Quotes whatever YAML 1.1 or these rules would not read back as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:[tT]rue|TRUE|[fF]alse|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"<<$"), ["<"])
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:int", _INT, _SIGNED)
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, _SIGNED)


def parse_yaml(text: str, name: str) -> Any:
    """The value of a YAML text; a syntax error or a duplicate key is a UserError with the line."""
    try:
        return _unshared(yaml.load(text, Loader=_Loader))  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{name}{line}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{name}: not YAML: {error}") from None


def dump_yaml(mapping: Mapping[str, Any]) -> str:
    """YAML that `parse_yaml` reads back unchanged, keys in the order given."""
    return yaml.dump(dict(mapping), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def _unshared(value: Any) -> Any:
    """A copy in which an aliased node is no longer one object, so that an override changes one place only."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def apply_overrides(mapping: dict[str, Any], overrides: Iterable[str]) -> frozenset[str]:
    """Set each `key=value` (dotted for blocks, the value in YAML) in `mapping`; returns the keys that were set."""
    keys = set()
    for text in overrides:
        key, equals, value = text.partition("=")
        *blocks, last = path = key.strip().split(".")
        if not equals or not all(path):
            raise UserError(f"command line: {text!r} is not of the form key=value or block.key=value")
        block = mapping
        for depth, name in enumerate(blocks):
            if block.get(name) is None:
                block[name] = {}
            if not isinstance(block[name], dict):
                where = ".".join(blocks[: depth + 1])
                raise UserError(f"command line: {text}: {where} is not a block but {show(block[name])}; set it whole")
            block = block[name]
        block[last] = parse_yaml(value, f"command line: {text}")
        keys.add(".".join(path))
    return frozenset(keys)
