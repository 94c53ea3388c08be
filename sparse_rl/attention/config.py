"""Names of the attention kernels, and the settings of the target that a retrofit's scorers learn. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sparse_rl.config import Configuration, Positive, PositiveInt

AttentionKernel = Literal["gather", "sdpa", "flex", "flex_sorted", "dense"]
ATTENTION_KERNELS: tuple[AttentionKernel, ...] = get_args(AttentionKernel)
"""Names of the attention kernels. Recipes also accept `auto`, which stands for one of them."""


@dataclass(frozen=True, kw_only=True)
class TargetConfig(Configuration):
    """Settings of the target that KVpop's scorers learn (target.py): log(floor + mass of future attention).

    normaliser : attention is normalised over the tokens that the student's query sees (sparse), or over all tokens up
        to the query (dense)
    group : reduction over the query heads of a kv head: the largest logarithm, or the logarithm of their mean
    lookahead : count only the queries up to this many after the first one outside the window; None means all
    normalise : divide the mass by the number of counted queries
    """

    normaliser: Literal["sparse", "dense"] = "sparse"
    group: Literal["max", "mean"] = "max"
    lookahead: PositiveInt | None = None
    normalise: bool = True
    floor: Positive = 1e-6
