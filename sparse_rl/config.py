"""What every configuration is made of: frozen dataclasses whose annotations say which values are valid.

Each component declares its settings once, in a dataclass of its own beside it, without torch: a recipe nests that
dataclass, and the component is given it as it is. `Annotated[int, Rule(...)]` adds a condition to a type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any


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
