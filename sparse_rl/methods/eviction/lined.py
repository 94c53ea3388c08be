"""Lined attention: heavy hitters that are a fraction of the tokens, and the most recent ones.

LuKA section 3.1: "a fixed fraction of past tokens with the highest accumulated attention", and a window. So the budget
grows with the sequence. In section 4.2 the fraction is of the prompt's length, and the budget is constant:

    of: seen      left(P, n) = sinks + window + floor(max(0, n - sinks - window) / compression)
    of: prompt    left(P, n) = sinks + window + floor(P / compression)

A departure: the paper selects anew among all past tokens at each step. Here a token that went has gone, as under every
other policy, and its memory is freed. Scores are H2O's.
"""

from __future__ import annotations

from sparse_rl.methods.config import LinedConfig
from sparse_rl.methods.eviction.h2o import H2O


class Lined(H2O):
    """Scores as H2O does; what stays beside sinks and window is a fraction of the tokens (see the module)."""

    config: LinedConfig  # type: ignore[assignment]  # it has no budget
