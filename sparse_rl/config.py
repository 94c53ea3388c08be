"""What every configuration is made of: frozen dataclasses whose annotations say which values are valid.

Each component declares its settings once, in a dataclass of its own beside it, without torch: a recipe nests that
dataclass, and the component is given it as it is. `Annotated[int, Rule(...)]` adds a condition to a type.

    Configuration        holds every value against its annotation as it is made, in YAML and in Python alike
    NamedConfiguration   one of a family, chosen by a name in its block: {policy: gkv, budget: 512}
    build                makes one of a mapping, with one-line errors that say where the wrong value stands
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

from sparse_rl.errors import UserError, did_you_mean, listed, nearest

T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """A condition on a value, for `Annotated[type, Rule(...)]`; `says` completes the sentence "expected ...".

    Of several the first describes the type. The others are bounds that few meet; who does is told that one alone.
    """

    says: str
    holds: Callable[[Any], bool]


def at_most(most: float) -> Rule:
    """The rule that a number is no larger."""
    return Rule(f"of at most {most:,}", lambda v: v <= most)


def names_a_file(text: str) -> bool:
    """Whether a file may have this path, as far as its length and its characters go."""
    if NO_TEXT.search(text):
        return False
    return len(text.encode()) <= 3000 and all(len(part.encode()) <= 255 for part in text.split("/"))


NO_TEXT = re.compile("[\0\ud800-\udfff]")  # NUL, and halves of a surrogate pair, which UTF-8 does not have
_COUNT = at_most(2**31 - 1)
_FLOAT32 = Rule("between 1e-30 and 1e30, or 0", lambda v: v == 0 or 1e-30 <= v <= 1e30)
Text = Annotated[str, Rule("that is not empty", lambda v: v.strip() != "")]
PathText = Annotated[Text, Rule("with names of at most 255 bytes, 3000 in all", names_a_file)]
PositiveInt = Annotated[int, Rule(">= 1", lambda v: v >= 1), _COUNT]
NonNegativeInt = Annotated[int, Rule(">= 0", lambda v: v >= 0), _COUNT]
Seed = Annotated[int, Rule(">= 0", lambda v: v >= 0), at_most(2**32 - 1)]  # NumPy takes no other
Positive = Annotated[float, Rule("> 0", lambda v: v > 0), _FLOAT32]
NonNegative = Annotated[float, Rule(">= 0", lambda v: v >= 0), _FLOAT32]
AtLeastOne = Annotated[float, Rule(">= 1", lambda v: v >= 1), _FLOAT32]
Fraction = Annotated[float, Rule("above 0, at most 1", lambda v: 0 < v <= 1), _FLOAT32]
Probability = Annotated[float, Rule("between 0 and 1", lambda v: 0 <= v <= 1)]
BelowOne = Annotated[float, Rule(">= 0 and < 1", lambda v: 0 <= v < 1)]


@dataclass(frozen=True)
class Source:
    """Where values came from, so that an error can say so; nothing, for what is made in Python."""

    name: str = ""
    overridden: frozenset[str] = frozenset()  # dotted keys given on the command line
    places: Mapping[str, str] = field(default_factory=dict)  # a key's name -> its dotted place, for suggestions

    def error(self, path: str, message: str, hint: Any = None) -> UserError:
        """hint : the type that the value at this place is none of"""
        given = any(path == key or path.startswith((f"{key}.", f"{key}[")) for key in self.overridden)
        error = Misplaced(": ".join(filter(None, ("command line" if given else self.name, path, message))))
        error.key, error.message, error.hint = path, message, hint
        return error

    def mismatch(self, path: str, hint: Any, value: Any) -> UserError:
        """The error for a value that is none of a type."""
        return self.error(path, f"expected {describe(hint)}, got {show(value)}", hint)


class Misplaced(UserError):
    """A mistake at a place. hint : the type that the value there is none of; None: something else is wrong"""

    hint: Any = None


# ---- types -------------------------------------------------------------------------------------------------

MOST_SHOWN = 12  # choices that an error message lists
LARGEST = 2.0**128  # no number of float32 is as large, in size
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def show(value: Any) -> str:
    """A value as an error message quotes it."""
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return "null" if value is None else f"{str(value).lower()} (a boolean)" if isinstance(value, bool) else text


def describe(hint: Any) -> str:
    """A type in the words of an error message."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return "anything"
    if origin is Annotated:
        return f"{describe(args[0])} {args[1].says}"
    if origin in (Union, types.UnionType):
        # sorted: of two unions of the same types Python may give either for both
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
    """`value` as type `hint`, or a UserError naming the key, the type expected and the value got.

    A whole number passes as a float, and (with `promote`) a single value as a list of one. A type that is none of the
    simple ones accepts everything: whoever owns it will check.
    """
    if why := _taken_by_none(value):
        raise source.error(path, why)
    origin, args = get_origin(hint), get_args(hint)
    wrong = source.mismatch(path, hint, value)
    if origin is Annotated:
        try:
            value = coerce(value, args[0], path, source, promote=promote)
        except UserError as error:
            raise error if error.key != path else wrong from None
        for rule in args[1:]:
            if not rule.holds(value):
                raise source.mismatch(path, hint if rule is args[1] else Annotated[args[0], rule], value)
        return value
    if origin in (Union, types.UnionType):
        return _coerce_union(value, args, path, source, wrong)
    if origin is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in args):
            close = f"; did you mean {near!r}?" if (near := nearest(value, map(str, args))) else ""
            raise source.error(path, f"{wrong.message}{close}", hint)
        return value
    if isinstance(hint, type) and issubclass(hint, NamedConfiguration):
        return hint.from_block(value, path, source)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if not isinstance(value, dict):
            raise wrong
        return build(hint, value, path, source)
    if origin is list or hint is list:
        if not isinstance(value, list | tuple) and (value is None or not promote):
            raise wrong
        if not isinstance(value, list | tuple):
            return [coerce(value, args[0] if args else Any, path, source)]
        return [coerce(item, args[0] if args else Any, f"{path}[{i}]", source) for i, item in enumerate(value)]
    if origin is dict or hint is dict:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise wrong
        return {key: coerce(item, args[1] if args else Any, f"{path}.{key}", source) for key, item in value.items()}
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise source.error(path, f"expected a finite number, got {value}")
        return float(value)
    if hint in _NAMES and type(value) is not hint:
        raise wrong
    return value


def _taken_by_none(value: Any) -> str | None:
    """Why a value is none for any setting; None where it may be one."""
    if isinstance(value, str) and (wrong := NO_TEXT.search(value)):
        return f"holds a character that no file takes, {wrong[0]!r}; remove it"
    if isinstance(value, int | float) and LARGEST <= abs(value) < math.inf:
        return f"expected a number below {LARGEST:g} in size, got {show(value)}"
    return None


def _coerce_union(value: Any, members: Sequence[Any], path: str, source: Source, wrong: UserError) -> Any:
    if value is None and type(None) in members:
        return None
    rest = [member for member in members if member is not type(None)]
    for member in rest:
        try:
            return coerce(value, member, path, source, promote=len(rest) == 1)
        except UserError as error:
            if error.key != path:  # the member fits, something in it does not
                raise
            if not isinstance(error, Misplaced) or error.hint != member:  # a bound of the member
                wrong = error
    raise wrong


# ---- dataclasses -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Configuration:
    """A component's settings: a frozen dataclass, made only where each value is as its annotation says.

    A subclass that checks one value against another calls `super().__post_init__()` first.
    """

    def __post_init__(self) -> None:
        """Raises UserError, with the field as its key. A value is kept as YAML would give it (a whole number as a
        float, a mapping as the configuration that it describes).
        """
        cls: Any = type(self)
        for f in dataclasses.fields(self):
            try:
                value = coerce(getattr(self, f.name), _hints(cls)[f.name], f.name, Source())
            except UserError as error:
                raise UserError(error.message, error.key) from None
            object.__setattr__(self, f.name, value)


@dataclass(frozen=True, kw_only=True)
class NamedConfiguration(Configuration):
    """One of a family of configurations, which a block chooses by name: {policy: gkv, budget: 512}, or the name alone.

    The family is a direct subclass, which says what its members are called in errors ("cache policy"), under which key
    a block has the name ("policy"), and what members there are.
    """

    family: ClassVar[str]
    name_key: ClassVar[str]
    name: ClassVar[str]  # of a member

    @classmethod
    def members(cls) -> Mapping[str, type[Any]]:
        """The classes of the family, by name."""
        raise NotImplementedError

    @classmethod
    def chosen(cls, block: Mapping[str, Any]) -> type[Any]:
        """The member that a block names. Raises UserError where there is none, or one without the block's keys."""
        members = cls.members()
        if cls.name_key not in block:
            raise UserError(f"missing; name a {cls.family}, one of {', '.join(members)}", cls.name_key)
        name = block[cls.name_key]
        if not isinstance(name, str) or name not in members:
            known = f"known: {listed(members, name)}"
            raise UserError(f"unknown {cls.family} {show(name)}{did_you_mean(name, members)}; {known}")
        accepted = list(yaml_fields(members[name]))
        for key in block:
            if key not in (cls.name_key, *accepted):
                takes = f"takes {listed(accepted, key)}" if accepted else "takes no parameters"
                close = did_you_mean(key, accepted)
                raise UserError(f"{cls.family} {name!r} has no parameter {show(key)}{close}; it {takes}")
        return members[name]

    @classmethod
    def from_block(cls, block: Any, path: str = "", source: Source | None = None) -> Self:
        """The configuration that a block describes; one is returned as it is.

        path, source : where the block stands; by default nowhere, and its name comes first in errors

        Raises UserError, in one line: no name or an unknown one, an unknown parameter (with the nearest valid one), a
        missing parameter, or a value out of range.
        """
        if isinstance(block, cls):
            return block
        here = source or Source()
        if not isinstance(block, str | Mapping):
            wrong = f"a {cls.family} is a name or {{{cls.name_key}: ..., its parameters}}, got {show(block)}"
            raise here.error(path, wrong)
        block = {cls.name_key: block} if isinstance(block, str) else block
        try:
            member = cls.chosen(block)
        except UserError as error:
            raise here.error(".".join(filter(None, (path, error.key))), error.message) from None
        parameters = {key: value for key, value in block.items() if key != cls.name_key}
        return build(member, parameters, path, source or Source(member.name))

    def as_block(self) -> dict[str, Any]:
        """Plain values: from_block(block) == self."""
        return {self.name_key: self.name, **as_mapping(self)}


def flat(default_factory: Any = dataclasses.MISSING) -> Any:
    """A field that holds a component's configuration, whose keys stand in YAML beside those of the dataclass itself.

    default_factory : makes the configuration that the keys left out are taken from; without it some are required
    """
    return field(default_factory=default_factory, metadata={"flat": True})


def flat_fields(cls: type) -> dict[str, type]:
    """Name -> dataclass of the `flat` fields of a dataclass."""
    return {f.name: _hints(cls)[f.name] for f in dataclasses.fields(cls) if f.metadata.get("flat")}


def own_fields(cls: type) -> dict[str, Any]:
    """Key -> type of what YAML may set in a dataclass, without what its `flat` fields hold."""
    settable = (f for f in dataclasses.fields(cls) if f.init and f.metadata.get("yaml", True))
    return {f.name: _hints(cls)[f.name] for f in settable if not f.metadata.get("flat")}


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def yaml_fields(cls: type) -> dict[str, Any]:
    """Key -> type of what YAML may set in a dataclass, and in the configurations that it holds flat."""
    found = own_fields(cls)
    for name, held in flat_fields(cls).items():
        inner = yaml_fields(held)
        assert not found.keys() & inner.keys(), f"{cls.__name__}.{name} says again {found.keys() & inner.keys()}"
        found |= inner
    return found


def as_mapping(configuration: Any) -> dict[str, Any]:
    """The values of a dataclass as YAML would give them: plain data, those of `flat` fields beside the others."""
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


def unknown_key(key: Any, valid: Iterable[str], path: str, source: Source, also: Iterable[str] = ()) -> UserError:
    """The error for a key that is none of `valid` (nor of `also`, which are suggested but not listed)."""
    valid = list(valid)
    if key in source.places:
        place = source.places[key]
        mend = f"did you mean {place}?" if "." in place else f"did you mean {place} at the top level?"
    elif near := nearest(key, [*valid, *also]):
        mend = f"did you mean {path.rpartition('.')[0] + '.' if '.' in path else ''}{near}?"
    else:
        mend = f"valid keys: {listed(sorted(valid), key)}"
    return source.error(path, f"unknown key; {mend}")


def build(
    cls: type[T], mapping: Mapping[str, Any], path: str, source: Source, *, also: Iterable[str] = (), **given: Any
) -> T:
    """An instance of a dataclass from a mapping; `given` sets fields that YAML cannot.

    also : keys that an error suggests, but does not list

    Raises UserError for an unknown or missing key, a value of the wrong type, and whatever the dataclass's own
    `__post_init__` refuses (a UserError with a key relative to this block).
    """
    assert dataclasses.is_dataclass(cls)
    prefix = f"{path}." if path else ""
    hints = yaml_fields(cls)
    for key in mapping:
        if key not in hints:
            raise unknown_key(key, hints, f"{prefix}{key}", source, also)
    own, held = own_fields(cls), flat_fields(cls)
    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        if f.name in held:
            mine = {key: value for key, value in mapping.items() if key in yaml_fields(held[f.name])}
            values[f.name] = build(held[f.name], mine, path, source)
        elif f.name in own and f.name in mapping:
            values[f.name] = coerce(mapping[f.name], own[f.name], f"{prefix}{f.name}", source)
        elif f.name in own and default_of(f) is dataclasses.MISSING:
            raise source.error(f"{prefix}{f.name}", f"missing; give {describe(own[f.name])}")
    try:
        return cls(**values, **given)
    except UserError as error:
        raise source.error(f"{prefix}{error.key}" if error.key else path or "recipe", error.message) from None


def default_of(f: dataclasses.Field) -> Any:
    """The default of a field; dataclasses.MISSING: it is required."""
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
