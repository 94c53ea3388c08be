"""GatedCache: physical caches whose kv heads hold different numbers of entries, because DMS's gates decide per head.

In each kv head, a new token takes any free slot, and a mask marks the slots in use. A layer's buffers grow when one of
its heads has no free slot, and never shrink after prefill.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl.methods.dms.policy import DMS
from sparse_rl.methods.eviction.cache import EvictingCache, Layer
from sparse_rl.policies.entries import Arriving
from sparse_rl.trace import NEVER

HELD = "held"  # name in the policy's memory of an entry: 1.0 if the slot is in use, else 0.0
GROW = 16  # slots added at a time


class GatedCache(EvictingCache):
    """The caches of DMS. `lengths` and `_held` count the tokens seen, an upper bound of the entries held."""

    policy: DMS

    def begin_decode(self, active: Sequence[bool], device: torch.device) -> None:
        self.seen = [n + a for n, a in zip(self.seen, active, strict=True)]
        self._plan(self.seen, device)
        self._active = torch.tensor(active, device=device)
        self._extend_records()

    @property
    def longest_head(self) -> int:
        """Maximum number of entries that any kv head of any layer and row holds now."""
        return max(int(layer.state[HELD].sum(-1).max()) for layer in self.layers.values())

    def _prefill(self, index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        out = super()._prefill(index, query, key, value, scaling)
        layer, ends = self.layers[index], self._held_tensor[:, None, None]
        evicted = self.policy.gone_in_prompt(layer.state, layer.positions, ends)
        real = layer.positions < ends
        at = torch.where(evicted & real, ends, NEVER).to(torch.int32)
        width = at.shape[-1]
        layer.evict_at[..., :width] = torch.minimum(layer.evict_at[..., :width], at)
        held = real & ~evicted
        count = int(held.sum(-1).max())
        order = (~held).to(torch.uint8).argsort(dim=-1, stable=True)[..., :count]  # held entries come first
        layer.state[HELD] = held.float()
        layer.replace(
            {
                name: buffer.gather(
                    2, order if buffer.ndim == 3 else order[..., None].expand(-1, -1, -1, buffer.shape[3])
                )
                for name, buffer in layer.slotted().items()
            }
        )
        return out

    def _arrive(self, index: int, layer: Layer, key: Tensor, value: Tensor, scaling: float) -> None:
        """Drop the entries that are due, then put each row's new token into a free slot of each kv head."""
        now, active = self._seen_tensor - 1, self._active[:, None]
        count = layer.keys.shape[2]
        entries = self._entries(layer, slice(None), count, scaling, ("keys", "values"))
        shape = key.shape[:2]
        state = {name: torch.full(shape, start, device=key.device) for name, start in self.policy.entry_memory.items()}
        stays = self.policy.before_attending(index, entries, Arriving(key, value, state, layer.memory))
        held = layer.state[HELD] > 0
        dropped = held & ~stays & active[..., None]
        dropped_at = torch.where(dropped, now[:, None, None], NEVER).to(torch.int32)
        layer.evict_at.scatter_reduce_(-1, layer.positions, dropped_at, reduce="amin")
        held &= ~dropped
        layer.state[HELD] = held.float()
        if bool(held.all(-1).any()):  # a head has no free slot
            layer.replace(
                {n: F.pad(b, (0, 0, 0, GROW) if b.ndim == 4 else (0, GROW)) for n, b in layer.slotted().items()}
            )
        slot = (layer.state[HELD] == 0).int().argmax(-1)
        self._write(layer, slot, key, value, {**state, HELD: torch.ones(shape, device=key.device)})

    def _slots_seen(self, layer: Layer) -> tuple[int, Tensor | None]:
        return layer.keys.shape[2], layer.state[HELD][:, :, None] > 0
