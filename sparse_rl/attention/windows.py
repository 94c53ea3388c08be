"""WindowCache, the cache of the layers with a sliding window, of models such as Gemma 3.

The model itself decides which tokens such a layer sees: a query at position q sees the tokens from q - W + 1 to q. So
the window is an eviction with evict_at = t + W, also inside the prompt. A cache policy acts on the other layers alone,
the global layers. The trace's section `windowed` has the window of each layer, 0 without one.

Sizes in shapes: B rows (sequences), Hkv kv heads, Hq query heads, C slots, T tokens of a forward pass, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl.attention.interface import KVView
from sparse_rl.kernels.exact import sdpa
from sparse_rl.kernels.masked import masked_attention

GROW = 128  # slots added at a time, up to the window
MOST_LOGITS = 2**26  # with more logits, the queries of a forward pass attend in smaller groups


class WindowCache(KVView):
    """Keys and values of the last W tokens of each row, in the layers that have the window W.

    The token at position p is in slot p % W. A layer gets its slots as its rows grow: at most W.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)  # window of each layer of the model in tokens, 0 for layers that are not in this cache
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys and values, [B, Hkv, C, D] each
        self.seen: list[int] = []  # number of tokens that each row has seen
        self._starts = torch.empty(0)  # int64 [B], position of each row's first token in this forward pass
        self._ends = torch.empty(0)  # int64 [B], position after its last token that is not padding
        self._growing = torch.empty(0)  # int64, rows with at least one such token

    def begin_prefill(self, counts: Sequence[int], device: torch.device) -> None:
        """Prepare for a forward pass over the next `counts` tokens of each row, right-padded to equal length; 0 for a
        row that has ended. A cache of one row is first repeated for all rows.
        """
        if len(self.seen) == 1 < len(counts):
            self.select([0] * len(counts))
        starts = self.seen or [0] * len(counts)
        self.seen = [start + count for start, count in zip(starts, counts, strict=True)]
        self._starts, self._ends = (torch.tensor(x, device=device) for x in (starts, self.seen))
        growing = [row for row, count in enumerate(counts) if count]
        self._growing = torch.tensor(growing, dtype=torch.int64, device=device)

    def begin_decode(self, active: Sequence[bool], device: torch.device) -> None:
        self.begin_prefill([int(a) for a in active], device)

    begin_chunk = begin_prefill

    def select(self, rows: Sequence[int]) -> None:
        index = list(rows)
        self.layers = {layer: (keys[index], values[index]) for layer, (keys, values) in self.layers.items()}
        self.seen = [self.seen[row] for row in rows]

    def fork(self, rows: Sequence[int]) -> Self:
        forked = type(self)(self.sizes)
        forked.layers, forked.seen = dict(self.layers), list(self.seen)
        forked.select(rows)
        return forked

    def taken(self, row: int) -> Self:
        return self.fork([row])

    @classmethod
    def joined(cls, caches: Sequence[Self]) -> Self:
        whole = cls(caches[0].sizes)
        whole.seen = [count for cache in caches for count in cache.seen]
        for layer in caches[0].layers:
            pairs = zip(*(cache.layers[layer] for cache in caches), strict=True)
            keys, values = (side_by_side(parts) for parts in pairs)
            whole.layers[layer] = keys, values
        return whole

    def allocated_bytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for pair in self.layers.values() for x in pair)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        key = key.to(value.dtype)
        if layer not in self.layers:
            return self._prefill(layer, query, key, value, scaling)
        keys, values = self.layers[layer]
        if key.shape[2] == 1:
            keys, values = self._append(layer, keys, values, key, value)
            held = torch.arange(keys.shape[2], device=key.device) < self._ends[:, None]
            mask = None if min(self.seen) >= keys.shape[2] else held[:, None, None]
            grouped = query.reshape(*key.shape[:2], -1, key.shape[3])  # so that no key is repeated for a group's heads
            return sdpa(grouped, keys, values, scaling, mask).reshape(query.shape)
        out = self.after(layer, query, key, value, scaling, self._starts)
        self._store(layer, keys, values, key, value)
        return out

    def after(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, starts: Tensor) -> Tensor:
        """Return the attention output [B, Hq, T, D] of tokens that follow the cache's tokens. They are not stored.

        starts : int64 [B], position of each row's first query, which is the number of tokens that the row has seen
        """
        (keys, values), window = self.layers[layer], self.sizes[layer]
        held, width, most = _positions(keys.shape[2], window, starts), key.shape[2], max(window, GROW)
        at_once = max(1, min(most, MOST_LOGITS // (query.shape[0] * query.shape[1] * (2 * window + most))))
        outs = []
        for first in range(0, max(width, 1), at_once):
            slots = keys.shape[2] if first < window - 1 else 0  # later queries see no token of the cache
            some, near = slice(first, first + at_once), slice(max(first - window + 1, 0), first + at_once)
            asking, arriving = (torch.arange(width, device=key.device)[x] for x in (some, near))
            oldest = (asking - window + 1)[:, None]  # of each query, counted from the first token that arrives
            earlier = (held >= 0)[:, None, :slots] & (held[:, None, :slots] >= starts[:, None, None] + oldest)
            among = (arriving <= asking[:, None]) & (arriving >= oldest)
            mask = torch.cat([earlier, among.expand(len(key), -1, -1)], dim=2)[:, None]
            of_group = [torch.cat([old[:, :, :slots], x[:, :, near]], 2) for old, x in ((keys, key), (values, value))]
            outs.append(sdpa(query[:, :, some], of_group[0], of_group[1], scaling, mask))
        return torch.cat(outs, dim=2)

    def _prefill(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        batch, heads, width, dim = key.shape
        self._store(layer, key.new_zeros(batch, heads, 0, dim), value.new_zeros(batch, heads, 0, dim), key, value)
        if width <= self.sizes[layer]:
            return sdpa(query, key, value, scaling, causal=width > 1)
        evict_at = torch.arange(width, dtype=torch.int32, device=key.device) + self.sizes[layer]
        return masked_attention(lambda: evict_at.expand(batch, heads, -1), query, key, value, scaling, "gather")

    def _append(self, layer: int, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        missing = min(max(self.seen), self.sizes[layer]) - keys.shape[2]
        if missing > 0:
            extra = min(GROW, self.sizes[layer] - keys.shape[2])
            keys, values = (F.pad(x, (0, 0, 0, extra)) for x in (keys, values))
        rows, slots = self._growing, self._starts[self._growing] % self.sizes[layer]
        keys[rows, :, slots], values[rows, :, slots] = key[rows, :, 0], value[rows, :, 0]
        self.layers[layer] = keys, values
        return keys, values

    def _store(self, layer: int, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        """Put the last tokens of each row into their slots, whose old contents are `keys` and `values`."""
        window = self.sizes[layer]
        slots = min(window, max(self.seen))  # all others are empty
        positions = _positions(slots, window, self._ends)
        offsets = positions - self._starts[:, None]
        arrived = (offsets >= 0)[:, None, :, None]
        index = offsets.clamp(0, key.shape[2] - 1)[:, None, :, None]
        stored = []
        for old, new in ((keys, key), (values, value)):
            old = F.pad(old, (0, 0, 0, slots - old.shape[2]))
            stored.append(new.gather(2, index.expand(-1, new.shape[1], -1, new.shape[3])).where(arrived, old))
        self.layers[layer] = stored[0], stored[1]


def side_by_side(parts: Sequence[Tensor], filler: int = 0) -> Tensor:
    """Join the rows of tensors [B, Hkv, C, ...], right-padded in the axis C, if there is one, with `filler`."""
    if parts[0].ndim < 3:
        return torch.cat(list(parts))
    longest, after = max(part.shape[2] for part in parts), [0, 0] * (parts[0].ndim - 3)
    return torch.cat([F.pad(part, (*after, 0, longest - part.shape[2]), value=filler) for part in parts])


def _positions(slots: int, window: int, seen: Tensor) -> Tensor:
    """Return each slot's position after `seen` tokens, int64 [B] -> int64 [B, slots]; negative if it is empty."""
    last = seen[:, None] - 1
    return last - (last - torch.arange(slots, device=seen.device)) % window
