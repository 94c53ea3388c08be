"""H2O: keep the tokens with the most accumulated attention (heavy hitters) and the most recent tokens.

Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference" (2023), §4: the score of token j is the sum
F_j = sum_q A[q, j] of the attention that all queries q of prefill and decoding have paid to it, without decay. Under
grouped-query attention, the sum includes all query heads of the group.
"""

from __future__ import annotations

from torch import Tensor

from sparse_rl.methods.config import H2OConfig
from sparse_rl.policies.base import Policy
from sparse_rl.policies.entries import Entries

CHUNK = 256  # prompt queries whose attention is computed at a time


class H2O(Policy):
    config: H2OConfig
    entry_memory = {"mass": 0.0}
    every_query = True
    score_reads = ()

    def observe(self, layer: int, entries: Entries, queries: Tensor, query_positions: Tensor) -> None:
        for start in range(0, queries.shape[2], CHUNK):
            positions = query_positions[:, start : start + CHUNK]
            attention = entries.attention(queries[:, :, start : start + CHUNK], positions)
            real = (positions < entries.seen[:, None])[:, None, None, :, None]
            entries.state["mass"] += attention.masked_fill(~real, 0.0).sum(dim=(2, 3))

    def score(self, layer: int, entries: Entries) -> Tensor:
        return entries.state["mass"]
