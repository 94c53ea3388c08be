"""WindowCache, the cache of layers with a sliding window, and WindowedCache, which joins it and the policy's cache.

Sizes in shapes: B rows (sequences), Hkv kv heads, Hq query heads, C slots, T tokens of a forward pass, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl.attention.kernels.masked import masked_attention
from sparse_rl.attention.kernels.sdpa import sdpa
from sparse_rl.beside import Beside
from sparse_rl.trace import EvictionTrace

GROW = 128  # slots added at a time, up to the window
MOST_LOGITS = 2**26  # with more logits, the queries of a forward pass attend in smaller groups


class WindowCache:
    """Keys and values of the last W tokens of each row, in the layers that have the window W.

    The token at position p is in slot p % W. A layer gets its slots as its rows grow: at most W.

    sizes : the window of each layer of the model in tokens, 0 for layers that are not in this cache
    layers : layer -> keys and values, [B, Hkv, C, D] each
    seen : number of tokens that each row has seen
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.seen: list[int] = []
        self._starts = torch.empty(0)  # int64 [B], position of each row's first token in this forward pass
        self._ends = torch.empty(0)  # int64 [B], position after its last token that is not padding
        self._growing = torch.empty(0)  # int64, rows with at least one such token

    def begin(self, counts: Sequence[int], device: torch.device) -> None:
        """Prepare for a forward pass over the next tokens of each row, right-padded to equal length.

        counts : number of tokens of each row without padding; 0 for a row that has ended. A cache of one row is first
            repeated for all rows
        """
        if len(self.seen) == 1 < len(counts):
            self.select([0] * len(counts))
        starts = self.seen or [0] * len(counts)
        self.seen = [start + count for start, count in zip(starts, counts, strict=True)]
        self._starts, self._ends = (torch.tensor(x, device=device) for x in (starts, self.seen))
        growing = [row for row, count in enumerate(counts) if count]
        self._growing = torch.tensor(growing, dtype=torch.int64, device=device)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only `rows`, in this order; a row may be repeated."""
        index = list(rows)
        self.layers = {layer: (keys[index], values[index]) for layer, (keys, values) in self.layers.items()}
        self.seen = [self.seen[row] for row in rows]

    def fork(self, rows: Sequence[int]) -> Self:
        """Return a separate cache with `rows`, in this order."""
        forked = type(self)(self.sizes)
        forked.layers, forked.seen = dict(self.layers), list(self.seen)
        forked.select(rows)
        return forked

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(x.untyped_storage().nbytes() for pair in self.layers.values() for x in pair)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `KVView.attend`."""
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
        """Put one token of each row into its slot, in place, and return keys and values, [B, Hkv, C, D] each."""
        missing = min(max(self.seen), self.sizes[layer]) - keys.shape[2]
        if missing > 0:
            extra = min(GROW, self.sizes[layer] - keys.shape[2])
            keys, values = (F.pad(x, (0, 0, 0, extra)) for x in (keys, values))
        rows, slots = self._growing, self._starts[self._growing] % self.sizes[layer]
        keys[rows, :, slots], values[rows, :, slots] = key[rows, :, 0], value[rows, :, 0]
        self.layers[layer] = keys, values
        return keys, values

    def _store(self, layer: int, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        """Put the last tokens of each row into their slots. `keys` and `values` : the slots' old contents"""
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


def _positions(slots: int, window: int, seen: Tensor) -> Tensor:
    """Return the position of the token in each slot after `seen` tokens, int64 [B, slots]; negative for an empty slot.

    seen : int64 [B]
    """
    last = seen[:, None] - 1
    return last - (last - torch.arange(slots, device=seen.device)) % window


class WindowedCache(Beside):
    """Implements `Cache` (sparse_rl/policies/cache.py) for a model with layers of both kinds.

    inner : the cache of the global layers, which counts them from 0
    of_windows : the cache of the layers with a sliding window
    """

    def __init__(self, inner: Any, of_windows: WindowCache) -> None:
        self.inner, self.of_windows = inner, of_windows
        global_layers = (layer for layer, window in enumerate(of_windows.sizes) if not window)
        self.places = {layer: place for place, layer in enumerate(global_layers)}

    def begin_prefill(self, prompt_lengths: Sequence[int], device: torch.device) -> None:
        self.inner.begin_prefill(prompt_lengths, device)
        self.of_windows.begin(prompt_lengths, device)

    def begin_decode(self, active: Sequence[bool], device: torch.device) -> None:
        self.inner.begin_decode(active, device)
        self.of_windows.begin([int(a) for a in active], device)

    def select(self, rows: Sequence[int]) -> None:
        self.inner.select(rows)
        self.of_windows.select(rows)

    def fork(self, rows: Sequence[int]) -> WindowedCache:
        return type(self)(self.inner.fork(rows), self.of_windows.fork(rows))

    def trace(self, row: int, length: int) -> EvictionTrace:
        trace: EvictionTrace = self.inner.trace(row, length)
        return trace.beside_windows(self.of_windows.sizes)

    def allocated_bytes(self) -> int:
        return self.of_windows.nbytes + int(self.inner.allocated_bytes())

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if self.of_windows.sizes[layer]:
            return self.of_windows.attend(layer, query, key, value, scaling)
        return super().attend(self.places[layer], query, key, value, scaling)
