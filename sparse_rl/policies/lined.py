"""Lined attention: heavy hitters that are a fraction of the tokens, and the most recent ones.

LuKA section 3.1: "a fixed fraction of past tokens with the highest accumulated attention", and a window. So the budget
grows with the sequence:

    left(P, n) = sinks + window + floor((m - sinks - window) / compression),    m = n, or P

A departure: the paper selects anew among all past tokens at each step. Here a token that went has gone, as under every
other policy, and its memory is freed. Scores are H2O's.
"""

from __future__ import annotations

from sparse_rl.policies.config import LinedConfig
from sparse_rl.policies.h2o import H2O


class Lined(H2O):
    """Scores as H2O does; what stays beside sinks and window is a fraction of the tokens (see the module)."""

    config: LinedConfig  # type: ignore[assignment]  # it has no budget
