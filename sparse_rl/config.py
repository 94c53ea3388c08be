"""What every configuration is made of: frozen dataclasses whose annotations say which values are valid.

Each component declares its settings once, in a dataclass of its own beside it, without torch: a recipe nests that
dataclass, and the component is given it as it is. `Annotated[int, Rule(...)]` adds a condition to a type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from sparse_rl.errors import UserError, did_you_mean


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


def check_choices(config: Any) -> None:
    """Raise UserError where a field with a list of values (a Literal) holds another one.

    For who makes a configuration in Python, where no schema has looked at it: code that asks for one value would take
    any other for the second.
    """
    hints = get_type_hints(type(config))
    for field in fields(config):
        choices, value = get_args(hints[field.name]), getattr(config, field.name)
        if get_origin(hints[field.name]) is Literal and value not in choices:
            named = ", ".join(map(str, choices))
            close = did_you_mean(value, map(str, choices))
            raise UserError(f"must be one of {named}, got {value!r}{close}", field.name)
