"""The scorers by name, and how one is made."""

from __future__ import annotations

from typing import Any

import torch

from sparse_rl.scorers.base import Recency, Scorer
from sparse_rl.scorers.config import ScorerConfig
from sparse_rl.scorers.mlstm import MLSTM
from sparse_rl.scorers.stateless import MLP, Linear

SCORERS: dict[str, type[Scorer]] = {"recency": Recency, "linear": Linear, "mlp": MLP, "mlstm": MLSTM}


def make_scorer(scorer: Any, *, heads: int, dim: int) -> Scorer:
    """The scorer of one layer with `heads` kv heads, whose keys and values have `dim` numbers.

    scorer : its settings; or a name, or {name: ..., its parameters}
    """
    config = ScorerConfig.from_block(scorer)
    return SCORERS[config.name](config, heads=heads, dim=dim)


def sketch_scorer(scorer: Any, *, heads: int, dim: int) -> Scorer:
    """The same without memory for its parameters; draws no random numbers."""
    with torch.device("meta"):
        return make_scorer(scorer, heads=heads, dim=dim)
