"""DMS (dynamic memory sparsification), KVpop's baseline: when a token arrives, a gate decides whether to drop it later.

The gate of token t is open if score + bias > 0. A token with an open gate is dropped when query t + w arrives, before
that query attends (evict_at = t + w); w is the window. So the number of entries that a kv head holds depends on its
gates. Only training controls the average number, through `compression`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl.methods.config import DMSConfig
from sparse_rl.methods.kvpop.learned import LearnedPolicy
from sparse_rl.policies.entries import Arriving, Chunk, Entries
from sparse_rl.trace import NEVER

GOES = "goes"  # 1.0 if the gate is open


class DMS(LearnedPolicy):
    config: DMSConfig
    entry_memory = {GOES: 0.0}

    def goes(self, scores: Tensor, positions: Tensor) -> Tensor:
        """Return 1.0 for tokens to drop when they leave the window, else 0.0: float32 [R, Hkv, T], like the scores."""
        return ((scores + self.config.bias > 0) & (positions >= self.config.sinks)[:, None]).float()

    def take_in(self, layer: int, chunk: Chunk) -> dict[str, Tensor]:
        return {GOES: self.goes(*self.scores_of(layer, chunk))}

    def masks(self, layer: int, state: dict[str, Tensor], lengths: Tensor) -> Tensor | None:
        if self.config.prefill == "dense":
            return None
        at = torch.arange(state[GOES].shape[-1], device=lengths.device) + self.config.window
        return torch.where((state[GOES] > 0) & (at < lengths[:, None, None]), at, NEVER).int().contiguous()

    def gone_in_prompt(self, state: dict[str, Tensor], positions: Tensor, ends: Tensor) -> Tensor:
        """Return a mask, bool [R, Hkv, N], that is True for entries that are dropped before their prompt ends."""
        return (state[GOES] > 0) & (positions + self.config.window < ends)

    def before_attending(self, layer: int, entries: Entries, arriving: Arriving) -> Tensor:
        now = (entries.seen - 1)[:, None]
        x = torch.cat([arriving.keys, arriving.values], dim=-1)[:, :, None]
        scores = self.scorers[layer].follow(arriving.memory, x, x, now)
        arriving.state[GOES].copy_(self.goes(scores, now)[..., 0])
        leaves = entries.positions == now[:, None] - self.config.window
        return ~(leaves & (entries.state[GOES] > 0))
