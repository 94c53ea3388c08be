"""Names of the attention kernels, and the settings of the training target of KVpop's scorers. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sparse_rl.config import Configuration, Positive, PositiveInt

AttentionKernel = Literal["gather", "sdpa", "flex", "flex_sorted", "dense"]
ATTENTION_KERNELS: tuple[AttentionKernel, ...] = get_args(AttentionKernel)
"""Names of the attention kernels. Recipes also accept `auto`, which stands for one of them."""


@dataclass(frozen=True, kw_only=True)
class TargetConfig(Configuration):
    """Settings of the training target of KVpop's scorers: log(floor + mass), where mass is a token's future attention.

    normaliser : with sparse, attention is normalised over the tokens that the student's query sees; with dense, over
        all tokens up to the query
    group : reduction over the query heads of a kv head: max takes the largest logarithm, mean the logarithm of the mean
    lookahead : number of queries that count after the first query for which the token is outside the window; None means
        that all later queries count
    normalise : true divides the mass by the number of queries that count
    floor : number that is added to the mass before the logarithm is taken
    """

    normaliser: Literal["sparse", "dense"] = "sparse"
    group: Literal["max", "mean"] = "max"
    lookahead: PositiveInt | None = None
    normalise: bool = True
    floor: Positive = 1e-6
