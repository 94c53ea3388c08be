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

    normaliser : with sparse, a query's attention is normalised over the tokens that it sees under evictions; with
        dense, over all tokens up to the query
    group : reduction over the query heads that share a kv head: max takes the largest logarithm, mean takes the mean of
        the mass before the logarithm
    lookahead : number of queries that count, in addition to the first query for which the token is outside the window;
        null means that all later queries count
    normalise : with true, mass is the mean over the queries that count; with false, it is their sum
    floor : number that is added to the mass before the logarithm is taken
    """

    normaliser: Literal["sparse", "dense"] = "sparse"
    group: Literal["max", "mean"] = "max"
    lookahead: PositiveInt | None = None
    normalise: bool = True
    floor: Positive = 1e-6
