"""Lined attention: keep heavy hitters, whose number is a fraction of the tokens, and the most recent tokens.

LuKA section 3.1 keeps "a fixed fraction of past tokens with the highest accumulated attention", and a window, so the
budget grows with the sequence. In section 4.2 the budget is constant: the fraction is taken of the prompt's length.
With a prompt of P tokens and n tokens seen, a compaction leaves this number of entries:

    of: seen      left(P, n) = sinks + window + floor(max(0, n - sinks - window) / compression)
    of: prompt    left(P, n) = sinks + window + floor(P / compression)

A departure: at each step, the paper selects again among all past tokens. Here a compaction runs every `period` tokens
(8 by default), and an evicted token never comes back, as under every other policy.
"""

from __future__ import annotations

from sparse_rl.methods.config import LinedConfig
from sparse_rl.methods.eviction.h2o import H2O


class Lined(H2O):
    config: LinedConfig  # type: ignore[assignment]  # LinedConfig has no budget
