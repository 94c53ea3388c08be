"""KVpop's scorers predict, from a layer's keys and values, which tokens will matter once they have left the window.

    scorer = make_scorer({"name": "mlstm"}, heads=8, dim=128)      # the scorer of one layer with 8 kv heads
    scores, log_decay = scorer(keys, values, window)               # float32 [rows, kv heads, tokens], [kv heads]

Each kv head has its own parameters. To add a scorer, write its settings in config.py, a file with a subclass of
`Scorer`, and one line each in CONFIGS (config.py, which needs no torch) and SCORERS (registry.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparse_rl.lazy import public_names

if TYPE_CHECKING:
    from sparse_rl.methods.kvpop.scorers.base import Scorer
    from sparse_rl.methods.kvpop.scorers.config import ScorerConfig
    from sparse_rl.methods.kvpop.scorers.registry import SCORERS, make_scorer, sketch_scorer

__getattr__ = public_names(__name__)

__all__ = ["SCORERS", "Scorer", "ScorerConfig", "make_scorer", "sketch_scorer"]
