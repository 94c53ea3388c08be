"""The table of scorer classes by name, and functions that make a scorer."""

from __future__ import annotations

from typing import Any

import torch

from sparse_rl.methods.kvpop.scorers.base import Recency, Scorer
from sparse_rl.methods.kvpop.scorers.config import ScorerConfig
from sparse_rl.methods.kvpop.scorers.mlstm import MLSTM
from sparse_rl.methods.kvpop.scorers.stateless import MLP, Linear

SCORERS: dict[str, type[Scorer]] = {
    "recency": Recency,
    "linear": Linear,
    "mlp": MLP,
    "mlstm": MLSTM,
}
"""The class of each scorer, by its name in recipes."""


def make_scorer(scorer: Any, *, heads: int, dim: int) -> Scorer:
    """Make the scorer of one layer with `heads` kv heads, whose keys and values have `dim` dimensions.

    scorer : the scorer's settings, its name, or {name: ..., its parameters}

    Raises UserError for an unknown scorer or parameter, and for a value that breaks a parameter's rule.
    """
    config = ScorerConfig.from_block(scorer)
    return SCORERS[config.name](config, heads=heads, dim=dim)


def sketch_scorer(scorer: Any, *, heads: int, dim: int) -> Scorer:
    """Make a scorer on the meta device, without memory for its parameters and without drawing random numbers.

    The arguments are those of `make_scorer`.
    """
    with torch.device("meta"):
        return make_scorer(scorer, heads=heads, dim=dim)
