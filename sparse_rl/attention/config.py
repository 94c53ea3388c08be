"""The attention kernels by name, and what the learned attention of a retrofit is told. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sparse_rl.config import Configuration, Positive, PositiveInt

AttentionKernel = Literal["gather", "sdpa", "flex", "flex_sorted", "dense"]
ATTENTION_KERNELS: tuple[AttentionKernel, ...] = get_args(AttentionKernel)
"""The names of the attention kernels; `auto`, which recipes know too, stands for one of them."""


@dataclass(frozen=True, kw_only=True)
class TargetConfig(Configuration):
    """What KVpop's scorers are to foresee (target.py): log(floor + mass of future attention).

    normaliser : of the attention: over what the student's query sees (sparse), or over all before it (dense)
    group : of the query heads of a kv head, the largest logarithm, or the logarithm of their mean
    lookahead : count only so many queries after the window; None: all
    normalise : divide by their number
    """

    normaliser: Literal["sparse", "dense"] = "sparse"
    group: Literal["max", "mean"] = "max"
    lookahead: PositiveInt | None = None
    normalise: bool = True
    floor: Positive = 1e-6
