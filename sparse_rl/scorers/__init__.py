"""KVpop's scorers: from a layer's keys and values, which tokens will matter once they have left the window.

    scorer = make_scorer({"name": "mlstm"}, heads=8, dim=128)      # of one layer
    scores, log_decay = scorer(keys, values, window)               # float32 [B, Hkv, S], [Hkv]

Each kv head has parameters of its own. To add one: a file with a subclass of `Scorer`, and one line in SCORERS.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from sparse_rl.errors import did_you_mean
from sparse_rl.scorers.base import NOT_DECAYED, Recency, Scorer
from sparse_rl.scorers.mlstm import MLSTM
from sparse_rl.scorers.stateless import MLP, Linear

SCORERS: dict[str, type[Scorer]] = {"recency": Recency, "linear": Linear, "mlp": MLP, "mlstm": MLSTM}


def check_scorer(scorer: str | Mapping[str, Any]) -> dict[str, Any]:
    """{"name": ..., its parameters} of a name or such a mapping.

    Raises ValueError, in one line, for an unknown name or parameter (with the nearest one), or a value out of range.
    """
    if not isinstance(scorer, str | Mapping):
        raise ValueError(f"a scorer is a name or {{name: ..., its parameters}}, got {scorer!r}")
    block = {"name": scorer} if isinstance(scorer, str) else dict(scorer)
    name = block.get("name")
    if name not in SCORERS:
        raise ValueError(f"unknown scorer {name!r}{did_you_mean(name, SCORERS)}; known: {', '.join(SCORERS)}")
    accepted = [p for p in inspect.signature(SCORERS[name].__init__).parameters if p not in ("self", "heads", "dim")]
    for key in block.keys() - {"name"}:
        if key not in accepted:
            takes = f"takes {', '.join(accepted)}" if accepted else "takes no parameters"
            raise ValueError(f"scorer {name!r} has no parameter {key!r}{did_you_mean(key, accepted)}; it {takes}")
    sketch_scorer(block, heads=1, dim=4)
    return block


def make_scorer(scorer: Mapping[str, Any], *, heads: int, dim: int) -> Scorer:
    """The scorer of one layer with `heads` kv heads, whose keys and values have `dim` numbers."""
    block = dict(scorer)
    return SCORERS[block.pop("name")](heads=heads, dim=dim, **block)


def sketch_scorer(scorer: Mapping[str, Any], *, heads: int, dim: int) -> Scorer:
    """The same without memory for its parameters; draws no random numbers."""
    with torch.device("meta"):
        return make_scorer(scorer, heads=heads, dim=dim)


__all__ = ["NOT_DECAYED", "SCORERS", "Scorer", "check_scorer", "make_scorer", "sketch_scorer"]
