"""Lined attention: heavy hitters, whose number is a fraction of the tokens, and the most recent tokens.

LuKA section 3.1: "a fixed fraction of past tokens with the highest accumulated attention", and a window. So the budget
grows with the sequence. In section 4.2 the budget is constant, with a fraction of the prompt's length:

    of: seen      left(P, n) = sinks + window + floor(max(0, n - sinks - window) / compression)
    of: prompt    left(P, n) = sinks + window + floor(P / compression)

A departure: at each step, the paper selects again among all past tokens. Here an evicted token never comes back, as
under every other policy, and its memory is freed. Scores are H2O's.
"""

from __future__ import annotations

from sparse_rl.methods.config import LinedConfig
from sparse_rl.methods.eviction.h2o import H2O


class Lined(H2O):
    """Scores as H2O does; keeps sinks, window and a fraction of the other tokens (see the module docstring)."""

    config: LinedConfig  # type: ignore[assignment]  # LinedConfig has no budget
