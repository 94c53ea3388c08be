"""TOVA: token omission via attention.

Oren et al., "Transformers are Multi-State RNNs" (2024), §3.2: after each step, drop the token to which the LAST query
pays the least attention. Attention is averaged over all heads of the layer, so that its kv heads keep the same tokens.
The newest token competes like any other (window = 0).
"""

from __future__ import annotations

from torch import Tensor

from sparse_rl.methods.config import TovaConfig
from sparse_rl.policies.base import Policy
from sparse_rl.policies.entries import Entries


class Tova(Policy):
    config: TovaConfig

    @property
    def last_queries(self) -> int:
        return 1

    def score(self, layer: int, entries: Entries) -> Tensor:
        if not bool(((entries.positions == entries.positions[:, :1]) | ~entries.valid()).all()):
            raise AssertionError("tova: the kv heads of a layer must hold the same tokens")
        mean = entries.mean_over_ranks(entries.window_attention(1).mean(dim=(1, 2, 3)))  # [R, N]
        return mean[:, None].expand(-1, entries.positions.shape[1], -1)
