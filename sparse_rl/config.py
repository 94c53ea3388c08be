"""What every configuration is made of: frozen dataclasses whose annotations say which values are valid.

Each component declares its settings once, in a dataclass of its own beside it, without torch: a recipe nests that
dataclass, and the component is given it as it is. `Annotated[int, Rule(...)]` adds a condition to a type, and `build`
makes the dataclass of a mapping, checking every value against its annotation, with one-line errors.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from sparse_rl.errors import UserError, did_you_mean, nearest

T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """A condition on a value, for `Annotated[type, Rule(...)]`; `says` completes the sentence "expected ..."."""

    says: str
    holds: Callable[[Any], bool]


Text = Annotated[str, Rule("that is not empty", lambda v: v.strip() != "")]
PositiveInt = Annotated[int, Rule(">= 1", lambda v: v >= 1)]
NonNegativeInt = Annotated[int, Rule(">= 0", lambda v: v >= 0)]
Positive = Annotated[float, Rule("> 0", lambda v: v > 0)]
NonNegative = Annotated[float, Rule(">= 0", lambda v: v >= 0)]
AtLeastOne = Annotated[float, Rule(">= 1", lambda v: v >= 1)]
Fraction = Annotated[float, Rule("above 0, at most 1", lambda v: 0 < v <= 1)]
Probability = Annotated[float, Rule("between 0 and 1", lambda v: 0 <= v <= 1)]
BelowOne = Annotated[float, Rule(">= 0 and < 1", lambda v: 0 <= v < 1)]


@dataclass(frozen=True)
class Source:
    """Where values came from, so that an error can say so."""

    name: str
    overridden: frozenset[str] = frozenset()  # dotted keys given on the command line
    places: Mapping[str, str] = field(default_factory=dict)  # a key's name -> its dotted place, for suggestions

    def error(self, path: str, message: str) -> UserError:
        given = any(path == key or path.startswith((f"{key}.", f"{key}[")) for key in self.overridden)
        error = UserError(f"{'command line' if given else self.name}: {path}: {message}")
        error.key, error.message = path, message
        return error


# ---- types -------------------------------------------------------------------------------------------------

MOST_SHOWN = 12  # choices that an error message lists
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def show(value: Any) -> str:
    """A value as an error message quotes it."""
    text = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
    return "null" if value is None else f"{str(value).lower()} (a boolean)" if isinstance(value, bool) else text


def describe(hint: Any) -> str:
    """A type in the words of an error message."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return "anything"
    if origin is Annotated:
        return " ".join([describe(args[0]), *(rule.says for rule in args[1:])])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(member) for member in args))
    if origin is Literal:
        return "one of " + ", ".join([*map(str, args[:MOST_SHOWN]), *(["..."] if len(args) > MOST_SHOWN else [])])
    if origin is list or hint is list:
        return f"a list of: {describe(args[0])}" if args and args[0] is not Any else "a list"
    if origin is dict or hint is dict or dataclasses.is_dataclass(hint):
        return "a mapping"
    return _NAMES.get(hint, getattr(hint, "__name__", str(hint)))


def coerce(value: Any, hint: Any, path: str, source: Source, *, promote: bool = True, default: Any = None) -> Any:
    """`value` as type `hint`, or a UserError naming the key, the type expected and the value got.

    default : where `value` describes a block, the block that the keys left out are taken from
    A whole number passes as a float, and (with `promote`) a single value as a list of one. A type that is none of the
    simple ones accepts everything: whoever owns it will check.
    """
    origin, args = get_origin(hint), get_args(hint)
    wrong = source.error(path, f"expected {describe(hint)}, got {show(value)}")
    if origin is Annotated:
        try:
            value = coerce(value, args[0], path, source, promote=promote)
        except UserError as error:
            raise error if error.key != path else wrong from None
        if not all(rule.holds(value) for rule in args[1:]):
            raise wrong
        return value
    if origin in (Union, types.UnionType):
        return _coerce_union(value, args, path, source, wrong)
    if origin is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in args):
            close = f"; did you mean {near!r}?" if (near := nearest(value, map(str, args))) else ""
            raise source.error(path, f"{wrong.message}{close}")
        return value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise wrong
        return build(hint, value, path, source, default=default)
    if origin is list or hint is list:
        if not isinstance(value, list) and (value is None or not promote):
            raise wrong
        items = value if isinstance(value, list) else [value]
        return [coerce(item, args[0] if args else Any, f"{path}[{i}]", source) for i, item in enumerate(items)]
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
    raise wrong


# ---- dataclasses -------------------------------------------------------------------------------------------


def flat(default_factory: Any = dataclasses.MISSING) -> Any:
    """A field that holds a component's configuration, whose keys stand in YAML beside those of the dataclass itself.

    default_factory : makes the configuration that the keys left out are taken from; without it some are required
    """
    return field(default_factory=default_factory, metadata={"flat": True})


def flat_fields(cls: type) -> dict[str, type]:
    """Name -> dataclass of the `flat` fields of a dataclass."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.metadata.get("flat")}


def own_fields(cls: type) -> dict[str, Any]:
    """Key -> type of what YAML may set in a dataclass, without what its `flat` fields hold."""
    hints = typing.get_type_hints(cls, include_extras=True)
    settable = (f for f in dataclasses.fields(cls) if f.init and f.metadata.get("yaml", True))
    return {f.name: hints[f.name] for f in settable if not f.metadata.get("flat")}


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
        mend = f"valid keys: {', '.join(sorted(valid))}"
    return source.error(path, f"unknown key; {mend}")


def build(
    cls: type[T],
    mapping: Mapping[str, Any],
    path: str,
    source: Source,
    *,
    also: Iterable[str] = (),
    default: T | None = None,
    **given: Any,
) -> T:
    """An instance of a dataclass from a mapping; `given` sets fields that YAML cannot.

    also : keys that an error suggests, but does not list
    default : an instance that the keys left out are taken from; None: the dataclass's own defaults

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
        usual = _default(f) if default is None else getattr(default, f.name, dataclasses.MISSING)
        block = usual if dataclasses.is_dataclass(usual) else None
        if f.name in held:
            mine = {key: value for key, value in mapping.items() if key in yaml_fields(held[f.name])}
            values[f.name] = build(held[f.name], mine, path, source, default=block)
        elif f.name in own and f.name in mapping:
            values[f.name] = coerce(mapping[f.name], own[f.name], f"{prefix}{f.name}", source, default=block)
        elif f.name in own and usual is dataclasses.MISSING:
            raise source.error(f"{prefix}{f.name}", f"missing; give {describe(own[f.name])}")
    try:
        if default is not None:
            return dataclasses.replace(cast(Any, default), **values, **given)
        return cls(**values, **given)
    except UserError as error:
        raise source.error(f"{prefix}{error.key}" if error.key else path or "recipe", error.message) from None


def _default(f: dataclasses.Field) -> Any:
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default


def check_choices(config: Any) -> None:
    """Raise UserError where a field with a list of values (a Literal) holds another one.

    For who makes a configuration in Python, where no schema has looked at it: code that asks for one value would take
    any other for the second.
    """
    hints = typing.get_type_hints(type(config))
    for f in dataclasses.fields(config):
        choices, value = get_args(hints[f.name]), getattr(config, f.name)
        if get_origin(hints[f.name]) is Literal and value not in choices:
            named = ", ".join(map(str, choices))
            close = did_you_mean(value, map(str, choices))
            raise UserError(f"must be one of {named}, got {value!r}{close}", f.name)
