"""The scorers by name, and how one is made."""

from __future__ import annotations

from typing import Any

import torch

from sparse_rl.scorers.base import Recency, Scorer
from sparse_rl.scorers.config import ScorerConfig
from sparse_rl.scorers.mlstm import MLSTM
from sparse_rl.scorers.stateless import MLP, Linear

SCORERS: dict[str, type[Scorer]] = {
    "recency": Recency,
    "linear": Linear,
    "mlp": MLP,
    "mlstm": MLSTM,
}
"""The class of each scorer, by the name that recipes give it."""


def make_scorer(scorer: Any, *, heads: int, dim: int) -> Scorer:
    """The scorer of one layer with `heads` kv heads, whose keys and values have `dim` numbers.

    scorer : its settings; or a name, or {name: ..., its parameters}

    Raises UserError for an unknown scorer or parameter, and a value that breaks a parameter's rule.
    """
    config = ScorerConfig.from_block(scorer)
    return SCORERS[config.name](config, heads=heads, dim=dim)


def sketch_scorer(scorer: Any, *, heads: int, dim: int) -> Scorer:
    """What `make_scorer` makes, with parameters that have shapes and take no memory; it draws no random numbers."""
    with torch.device("meta"):
        return make_scorer(scorer, heads=heads, dim=dim)
