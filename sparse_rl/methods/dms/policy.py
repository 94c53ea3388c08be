"""DMS (dynamic memory sparsification), KVpop's baseline: a gate says of each token, as it comes, whether it goes.

A token t whose gate is open, score + bias > 0, leaves as query t + w arrives, before that attends: evict_at = t + w. So
kv heads hold as many entries as their gates let them; how many they are on average is what training aims at
(`compression`), and only there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl.methods.config import DMSConfig
from sparse_rl.methods.kvpop.learned import LearnedPolicy
from sparse_rl.policies.entries import Arriving, Chunk, Entries
from sparse_rl.trace import NEVER

GOES = "goes"  # 1.0 where the gate is open


class DMS(LearnedPolicy):
    """kv heads hold different numbers of entries; see the module."""

    config: DMSConfig
    entry_memory = {GOES: 0.0}

    def goes(self, scores: Tensor, positions: Tensor) -> Tensor:
        """What leaves with the window, as a gate is open and it is no sink: float32 [R, Hkv, T], 1.0 or 0.0.

        scores : float32 [R, Hkv, T]; positions : int64 [R, T]
        """
        return ((scores + self.config.bias > 0) & (positions >= self.config.sinks)[:, None]).float()

    def take_in(self, layer: int, chunk: Chunk) -> dict[str, Tensor]:
        return {GOES: self.goes(*self.scores_of(layer, chunk))}

    def masks(self, layer: int, state: dict[str, Tensor], lengths: Tensor) -> Tensor | None:
        if self.config.prefill == "dense":
            return None
        at = torch.arange(state[GOES].shape[-1], device=lengths.device) + self.config.window
        return torch.where((state[GOES] > 0) & (at < lengths[:, None, None]), at, NEVER).int().contiguous()

    def gone_in_prompt(self, state: dict[str, Tensor], positions: Tensor, ends: Tensor) -> Tensor:
        """Which entries have gone at the end of their prompts: bool [R, Hkv, N].

        positions : int64 [R, Hkv, N]; ends : int64 [R, 1, 1], tokens of each prompt
        """
        return (state[GOES] > 0) & (positions + self.config.window < ends)

    def before_attending(self, layer: int, entries: Entries, arriving: Arriving) -> Tensor:
        now = (entries.seen - 1)[:, None]
        x = torch.cat([arriving.keys, arriving.values], dim=-1)[:, :, None]
        scores = self.scorers[layer].follow(arriving.memory, x, x, now)
        arriving.state[GOES].copy_(self.goes(scores, now)[..., 0])
        leaves = entries.positions == now[:, None] - self.config.window
        return ~(leaves & (entries.state[GOES] > 0))
