"""StreamingLLM: keep the attention sinks and the most recent tokens.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023), §3.2. A departure: the paper's rolling
cache renumbers the positions of its entries; here each entry keeps its position, as in G-KV's baseline.
"""

from __future__ import annotations

from torch import Tensor

from sparse_rl.methods.config import StreamingConfig
from sparse_rl.policies.base import Policy
from sparse_rl.policies.entries import Entries


class Streaming(Policy):
    config: StreamingConfig
    score_reads = ()

    def score(self, layer: int, entries: Entries) -> Tensor:
        return entries.positions.float()
