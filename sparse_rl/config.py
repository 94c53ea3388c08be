"""Base of every configuration: frozen dataclasses whose annotations define the valid values. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

from sparse_rl.errors import UserError, did_you_mean, listed, nearest

T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """A condition on a value, for `Annotated[type, Rule(...)]`; `says` completes the sentence "expected ..."."""

    says: str
    holds: Callable[[Any], bool]


def at_most(most: float) -> Rule:
    return Rule(f"of at most {most:,}", lambda v: v <= most)


def names_a_file(text: str) -> bool:
    """Return True if a file's path may have the length and the characters of `text`."""
    if NO_TEXT.search(text):
        return False
    return len(text.encode()) <= 3000 and all(len(part.encode()) <= 255 for part in text.split("/"))


NO_TEXT = re.compile("[\0\ud800-\udfff]")  # NUL, and surrogates, which UTF-8 cannot encode
_COUNT = at_most(2**31 - 1)
_FLOAT32 = Rule("between 1e-30 and 1e30, or 0", lambda v: v == 0 or 1e-30 <= v <= 1e30)
Text = Annotated[str, Rule("that is not empty", lambda v: v.strip() != "")]
PathText = Annotated[Text, Rule("with names of at most 255 bytes, 3000 in all", names_a_file)]
PositiveInt = Annotated[int, Rule(">= 1", lambda v: v >= 1), _COUNT]
NonNegativeInt = Annotated[int, Rule(">= 0", lambda v: v >= 0), _COUNT]
Seed = Annotated[int, Rule(">= 0", lambda v: v >= 0), at_most(2**32 - 1)]  # NumPy accepts no other seeds
Positive = Annotated[float, Rule("> 0", lambda v: v > 0), _FLOAT32]
NonNegative = Annotated[float, Rule(">= 0", lambda v: v >= 0), _FLOAT32]
AtLeastOne = Annotated[float, Rule(">= 1", lambda v: v >= 1), _FLOAT32]
Fraction = Annotated[float, Rule("above 0, at most 1", lambda v: 0 < v <= 1), _FLOAT32]
Probability = Annotated[float, Rule("between 0 and 1", lambda v: 0 <= v <= 1)]
BelowOne = Annotated[float, Rule(">= 0 and < 1", lambda v: 0 <= v < 1)]


@dataclass(frozen=True)
class Source:
    """Origin of a configuration's values, for error messages. Values that are set in Python have an empty name."""

    name: str = ""
    overridden: frozenset[str] = frozenset()  # dotted keys given on the command line
    places: Mapping[str, str] = field(default_factory=dict)  # key -> its dotted key in a recipe, for suggestions

    def error(self, path: str, message: str, hint: Any = None) -> UserError:
        """Return the error for the value at the dotted key `path`; see `Misplaced` for `hint`."""
        is_overridden = any(path == key or path.startswith((f"{key}.", f"{key}[")) for key in self.overridden)
        error = Misplaced(": ".join(filter(None, ("command line" if is_overridden else self.name, path, message))))
        error.key, error.message, error.hint = path, message, hint
        return error

    def mismatch(self, path: str, hint: Any, value: Any) -> UserError:
        return self.error(path, f"expected {describe(hint)}, got {show(value)}", hint)


class Misplaced(UserError):
    """A mistake at the dotted key `key`. `hint` is the type that the value must have; None if it is not at fault."""

    hint: Any = None


# ---- types -------------------------------------------------------------------------------------------------

MOST_SHOWN = 12  # maximum number of choices that an error message lists
LARGEST = 2.0**128  # larger in magnitude than any finite float32
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def show(value: Any) -> str:
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return "null" if value is None else f"{str(value).lower()} (a boolean)" if isinstance(value, bool) else text


def describe(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return "anything"
    if origin is Annotated:
        return f"{describe(args[0])} {args[1].says}"
    if origin in (Union, types.UnionType):
        # sorted, because Python may return the same union with its types in another order
        return " or ".join(sorted({describe(member) for member in args}, key=lambda text: (text == "null", text)))
    if origin is Literal:
        return "one of " + ", ".join([*map(str, args[:MOST_SHOWN]), *(["..."] if len(args) > MOST_SHOWN else [])])
    if origin is list or hint is list:
        return f"a list of: {describe(args[0])}" if args and args[0] is not Any else "a list"
    if isinstance(hint, type) and issubclass(hint, NamedConfiguration):
        return "a name or a mapping"
    if origin is dict or hint is dict or dataclasses.is_dataclass(hint):
        return "a mapping"
    return _NAMES.get(hint, getattr(hint, "__name__", str(hint)))


def coerce(value: Any, hint: Any, path: str, source: Source, *, promote: bool = True) -> Any:
    """Return `value` converted to the type `hint`, or raise UserError. A whole number is accepted as a float, and with
    `promote` a single value as a list with one item."""
    if why := _why_invalid(value):
        raise source.error(path, why)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        try:
            value = coerce(value, args[0], path, source, promote=promote)
        except UserError as error:
            raise error if error.key != path else source.mismatch(path, hint, value) from None
        for rule in args[1:]:
            if not rule.holds(value):
                raise source.mismatch(path, hint if rule is args[1] else Annotated[args[0], rule], value)
        return value
    if origin in (Union, types.UnionType):
        return _coerce_union(value, hint, path, source)
    if origin is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in args):
            close = f"; did you mean {near!r}?" if (near := nearest(value, map(str, args))) else ""
            raise source.error(path, f"{source.mismatch(path, hint, value).message}{close}", hint)
        return value
    if isinstance(hint, type) and issubclass(hint, NamedConfiguration):
        return hint.from_block(value, path, source)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if not isinstance(value, dict):
            raise source.mismatch(path, hint, value)
        return build(hint, value, path, source)
    if origin is list or hint is list:
        if not isinstance(value, list | tuple) and (value is None or not promote):
            raise source.mismatch(path, hint, value)
        if not isinstance(value, list | tuple):
            return [coerce(value, args[0] if args else Any, path, source)]
        item_hint = args[0] if args else Any
        return [coerce(item, item_hint, f"{path}[{i}]", source, promote=promote) for i, item in enumerate(value)]
    if origin is dict or hint is dict:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise source.mismatch(path, hint, value)
        return {key: coerce(item, args[1] if args else Any, f"{path}.{key}", source) for key, item in value.items()}
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise source.error(path, f"expected a finite number, got {value}")
        return float(value)
    if hint in _NAMES and type(value) is not hint:
        raise source.mismatch(path, hint, value)
    return value


def _why_invalid(value: Any) -> str | None:
    """Return the reason why no setting can have this value, or None."""
    if isinstance(value, str) and (match := NO_TEXT.search(value)):
        return f"contains a character that no file can hold, {match[0]!r}; remove it"
    if isinstance(value, int | float) and LARGEST <= abs(value) < math.inf:
        return f"expected a number below {LARGEST:g} in size, got {show(value)}"
    return None


def _coerce_union(value: Any, hint: Any, path: str, source: Source) -> Any:
    members = get_args(hint)
    mismatch: UserError | None = None
    if value is None and type(None) in members:
        return None
    rest = [member for member in members if member is not type(None)]
    for member in rest:
        try:
            return coerce(value, member, path, source, promote=len(rest) == 1)
        except UserError as error:
            if error.key != path:  # the value matches this member, but a value nested in it is wrong
                raise
            if not isinstance(error, Misplaced) or error.hint != member:  # the value violates a bound of this member
                mismatch = error
    raise mismatch or source.mismatch(path, hint, value)


# ---- dataclasses -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Configuration:
    """Base class for the settings of a component: a frozen dataclass that checks each value against its annotation."""

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for f in dataclasses.fields(self):
            try:
                value = coerce(getattr(self, f.name), _hints(cls)[f.name], f.name, Source())
            except UserError as error:
                raise UserError(error.message, error.key) from None
            object.__setattr__(self, f.name, value)


@dataclass(frozen=True, kw_only=True)
class NamedConfiguration(Configuration):
    """A member of a family of configurations, chosen by name: {policy: gkv, budget: 512}, or just the name.

    A family is a direct subclass of this class.
    """

    family: ClassVar[str]  # word for a member in errors, such as "cache policy"
    name_key: ClassVar[str]  # key under which a block names its member, such as "policy"
    name: ClassVar[str]  # set by each member

    @classmethod
    def members(cls) -> Mapping[str, type[Any]]:
        """Return the family's members: name -> class."""
        raise NotImplementedError

    @classmethod
    def member(cls, block: Mapping[str, Any]) -> type[Any]:
        """Return the class whose name a block has. Raises UserError for an unknown or missing name."""
        members = cls.members()
        if cls.name_key not in block:
            raise UserError(f"missing; name a {cls.family}, one of {', '.join(members)}", cls.name_key)
        name = block[cls.name_key]
        if not isinstance(name, str) or name not in members:
            choices = f"known: {listed(members, name)}"
            raise UserError(f"unknown {cls.family} {show(name)}{did_you_mean(name, members)}; {choices}")
        return members[name]

    @classmethod
    def chosen(cls, block: Mapping[str, Any]) -> type[Any]:
        """Return `member`. Raises UserError for a key that is none of its parameters, too."""
        member = cls.member(block)
        name, accepted = block[cls.name_key], list(yaml_fields(member))
        for key in block:
            if key not in (cls.name_key, *accepted):
                takes = f"takes {listed(accepted, key)}" if accepted else "takes no parameters"
                close = did_you_mean(key, accepted)
                raise UserError(f"{cls.family} {name!r} has no parameter {show(key)}{close}; it {takes}")
        return member

    @classmethod
    def from_block(cls, block: Any, path: str = "", source: Source | None = None) -> Self:
        """Return the configuration that a block at the dotted key `path` describes; a configuration as it is. Without
        `source`, errors start with the member's name."""
        if isinstance(block, cls):
            return block
        where = source or Source()
        if not isinstance(block, str | Mapping):
            message = f"a {cls.family} is a name or {{{cls.name_key}: ..., its parameters}}, got {show(block)}"
            raise where.error(path, message)
        block = {cls.name_key: block} if isinstance(block, str) else block
        try:
            member = cls.chosen(block)
        except UserError as error:
            raise where.error(".".join(filter(None, (path, error.key))), error.message) from None
        parameters = {key: value for key, value in block.items() if key != cls.name_key}
        return build(member, parameters, path, source or Source(member.name))

    def as_block(self) -> dict[str, Any]:
        """Return the configuration as a block of plain values, so that from_block(block) == self."""
        return {self.name_key: self.name, **as_mapping(self)}


def flat(default_factory: Any = dataclasses.MISSING) -> Any:
    """Declare a field that holds a component's configuration. YAML has the keys of both dataclasses at one level."""
    return field(default_factory=default_factory, metadata={"flat": True})


def flat_fields(cls: type) -> dict[str, type]:
    """Return the `flat` fields of a dataclass: field name -> the dataclass that the field holds."""
    return {f.name: _hints(cls)[f.name] for f in dataclasses.fields(cls) if f.metadata.get("flat")}


def own_fields(cls: type) -> dict[str, Any]:
    """Return the keys that YAML may set in a dataclass, without the keys of its `flat` fields: key -> type."""
    settable = (f for f in dataclasses.fields(cls) if f.init and f.metadata.get("yaml", True))
    return {f.name: _hints(cls)[f.name] for f in settable if not f.metadata.get("flat")}


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def yaml_fields(cls: type) -> dict[str, Any]:
    """Return the keys that YAML may set in a dataclass, including the keys of its `flat` fields: key -> type."""
    hints = own_fields(cls)
    for name, flat_class in flat_fields(cls).items():
        inner = yaml_fields(flat_class)
        assert not hints.keys() & inner.keys(), f"{cls.__name__}.{name} repeats the keys {hints.keys() & inner.keys()}"
        hints |= inner
    return hints


def as_mapping(configuration: Any) -> dict[str, Any]:
    """Return a dataclass instance as the plain data of its YAML, with the keys of `flat` fields at the same level."""
    values: dict[str, Any] = {}
    for f in dataclasses.fields(configuration):
        value = getattr(configuration, f.name)
        if f.metadata.get("flat"):
            values |= as_mapping(value)
        elif f.init and f.metadata.get("yaml", True):
            values[f.name] = _plain(value)
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, NamedConfiguration):
        return value.as_block()
    if dataclasses.is_dataclass(value):
        return as_mapping(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def dotted(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted keys, such as `cache.budget`. Empty mappings are values."""
    flattened: dict[str, Any] = {}
    for key, value in mapping.items():
        nested = isinstance(value, dict) and value
        flattened |= dotted(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flattened


def unknown_key(key: Any, valid: Iterable[str], path: str, source: Source, also: Iterable[str] = ()) -> UserError:
    """Return the error for an unknown key: it suggests a name in `valid` or `also`, or lists the names in `valid`."""
    valid = list(valid)
    if key in source.places:
        place = source.places[key]
        mend = f"did you mean {place}?" if "." in place else f"did you mean {place} at the top level?"
    elif near := nearest(key, [*valid, *also]):
        mend = f"did you mean {path.rpartition('.')[0] + '.' if '.' in path else ''}{near}?"
    else:
        mend = f"valid keys: {listed(sorted(valid), key)}"
    return source.error(path, f"unknown key; {mend}")


def build(cls: type[T], mapping: Mapping[str, Any], path: str, source: Source, **given: Any) -> T:
    """Create an instance of a dataclass from the mapping at the dotted key `path`; `given` sets fields that YAML cannot
    set. Raises UserError for an unknown or missing key, and for an invalid value."""
    assert dataclasses.is_dataclass(cls)
    prefix = f"{path}." if path else ""
    hints = yaml_fields(cls)
    for key in mapping:
        if key not in hints:
            raise unknown_key(key, hints, f"{prefix}{key}", source)
    own_hints, flat_dataclasses = own_fields(cls), flat_fields(cls)
    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        if f.name in flat_dataclasses:
            own_values = {key: value for key, value in mapping.items() if key in yaml_fields(flat_dataclasses[f.name])}
            values[f.name] = build(flat_dataclasses[f.name], own_values, path, source)
        elif f.name in own_hints and f.name in mapping:
            values[f.name] = coerce(mapping[f.name], own_hints[f.name], f"{prefix}{f.name}", source)
        elif f.name in own_hints and default_of(f) is dataclasses.MISSING:
            raise source.error(f"{prefix}{f.name}", f"missing; give {describe(own_hints[f.name])}")
    try:
        return cls(**values, **given)
    except UserError as error:
        raise source.error(f"{prefix}{error.key}" if error.key else path or "recipe", error.message) from None


def default_of(f: dataclasses.Field) -> Any:
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
