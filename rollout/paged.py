"""PagedCache: all keys and values, and the summaries of closed pages; a query reads a cover of them (sparse_rl/pages).

Token t of a row stands in slot t. As a query arrives, pages close for it: their summaries are made, and evict_at of
their tokens is this query. Then it chooses pages, and attends to sinks, tail, the other summaries and the chosen pages'
tokens. So a step reads O(sinks + window + pages + K n) entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from rollout.cache import EvictingCache, Layer
from sparse_rl.attention.kernels.sdpa import computing_dtype
from sparse_rl.errors import UserError
from sparse_rl.pages import Pages, choose, summarise
from sparse_rl.policies.base import Policy
from sparse_rl.policies.clustered import Clustered
from sparse_rl.trace import NEVER

KEYS, VALUES = "page_keys", "page_values"  # in a layer's memory: [B, Hkv, M, D]
OPENED = "opened"  # there too: int16 [B, Hkv, S, K]
MOST_PAGES = torch.iinfo(torch.int16).max


class PagedCache(EvictingCache):
    """See the module."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        assert isinstance(policy, Clustered)
        self.pages: Pages = policy.pages

    def begin_decode(self, active: Sequence[bool], device: torch.device) -> None:
        """See EvictingCache.begin_decode."""
        super().begin_decode(active, device)
        queries = [n - 1 for n in self.seen]
        self._closed = self.pages.all_closed(self.prompt_lengths, queries)
        if max(self._closed) > MOST_PAGES:
            raise UserError(f"a sequence has more than {MOST_PAGES} pages; larger ones are needed", "cache.page")
        self._were = self.pages.all_closed(self.prompt_lengths, [q - 1 for q in queries])

    def _extend_records(self) -> None:
        super()._extend_records()
        for layer in self.layers.values():
            missing = layer.evict_at.shape[-1] - layer.memory[OPENED].shape[2]
            if missing > 0:
                layer.memory[OPENED] = F.pad(layer.memory[OPENED], (0, 0, 0, missing), value=-1)

    def further(self, row: int, length: int) -> dict[str, torch.Tensor]:
        opened = torch.stack([self.layers[i].memory[OPENED][row] for i in sorted(self.layers)]).cpu()
        missing = length - opened.shape[2]
        opened = F.pad(opened, (0, 0, 0, missing), value=-1) if missing > 0 else opened[:, :, :length]
        return {"opened": opened.contiguous(), "paged_with": self.pages.settings()}

    def _prefill(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        out = super()._prefill(index, query, key, value, scaling)
        layer = self.layers[index]
        batch, heads, _, dim = key.shape
        width = layer.evict_at.shape[-1]
        layer.memory = {
            KEYS: layer.keys.new_zeros(batch, heads, 0, dim),
            VALUES: layer.values.new_zeros(batch, heads, 0, dim),
            OPENED: torch.full((batch, heads, width, self.pages.most), -1, dtype=torch.int16, device=key.device),
        }
        return out

    def _decode(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        layer, pages = self.layers[index], self.pages
        batch, heads, _, dim = key.shape
        rows, now = torch.arange(batch, device=key.device), self._seen_tensor - 1
        layer.keys[rows, :, self._slots] = key[:, :, 0].to(layer.keys.dtype)
        layer.values[rows, :, self._slots] = value[:, :, 0]
        layer.positions[rows, :, self._slots] = now[:, None]
        self._close(layer, now)

        tokens, real = self._raw(now)
        closed = torch.tensor(self._closed, device=key.device)
        summaries = torch.arange(max(self._closed), device=key.device) < closed[:, None]
        most = summaries.shape[1]
        slots = tokens[:, None].expand(-1, heads, -1)
        wide = computing_dtype(query, value)
        # The G query heads of a group attend as G "queries" to their kv head: nothing is repeated.
        grouped = query.reshape(batch, heads, -1, dim).to(wide) * scaling
        raw = grouped @ _read(layer.keys, slots).to(wide).mT
        raw = raw.masked_fill(~real[:, None, None], float("-inf"))
        read = [(raw, _read(layer.values, slots))]
        if most:
            page_keys, page_values = (layer.memory[name][:, :, :most] for name in (KEYS, VALUES))
            sums = grouped @ page_keys.to(wide).mT + pages.bias
            sums = sums.masked_fill(~summaries[:, None, None], float("-inf"))
            opened = choose(torch.cat([raw, sums], dim=-1), raw.shape[-1], pages.most)
            active = self._active[:, None, None]
            record = layer.memory[OPENED]
            record[rows, :, now] = torch.where(active, opened, record[rows, :, now].long()).to(torch.int16)
            inside = pages.tokens(opened.clamp(min=0)).flatten(2).clamp(max=layer.keys.shape[2] - 1)
            is_open = (opened >= 0).repeat_interleave(pages.size, dim=-1)
            far = grouped @ _read(layer.keys, inside).to(wide).mT
            replaced = torch.zeros(batch, heads, most + 1, dtype=torch.bool, device=key.device)
            replaced = replaced.scatter(2, torch.where(opened < 0, most, opened), True)[..., :most]
            read += [
                (sums.masked_fill(replaced[:, :, None], float("-inf")), page_values),
                (far.masked_fill(~is_open[:, :, None], float("-inf")), _read(layer.values, inside)),
            ]
        return _weighed(read).to(value.dtype).reshape(query.shape)

    def _raw(self, now: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sinks and tail of each row: int64 [B, R], and which of them are there."""
        pages, device = self.pages, now.device
        start = [pages.sinks + count * pages.size for count in self._closed]
        longest = max(max(n - s for n, s in zip(self.seen, start, strict=True)), 0)
        tail = torch.tensor(start, device=device)[:, None] + torch.arange(longest, device=device)
        tokens = torch.cat([torch.arange(pages.sinks, device=device).expand(len(now), -1), tail], dim=1)
        real = tokens <= now[:, None]
        return torch.where(real, tokens, 0), real

    def _close(self, layer: Layer, now: torch.Tensor) -> None:
        """Summarise the pages that this query is the first not to see raw."""
        low = min((a for a, b in zip(self._were, self._closed, strict=True) if a < b), default=None)
        if low is None:
            return
        high, device, pages = max(self._closed), now.device, self.pages
        numbers = torch.arange(low, high, device=device)
        were, closed = torch.tensor(self._were, device=device), torch.tensor(self._closed, device=device)
        new = (numbers >= were[:, None]) & (numbers < closed[:, None])  # [B, M']
        tokens = pages.tokens(numbers).expand(len(now), -1, -1)
        tokens = torch.where(new[..., None], tokens, 0)
        batch, heads, dim = len(now), layer.keys.shape[1], layer.keys.shape[3]
        slots = tokens.flatten(1)[:, None].expand(-1, heads, -1)
        raw = [_read(x, slots).view(batch, heads, len(numbers), pages.size, dim) for x in (layer.keys, layer.values)]
        for name, made in zip((KEYS, VALUES), summarise(raw[0], raw[1], pages), strict=True):
            held = F.pad(layer.memory[name], (0, 0, 0, max(high - layer.memory[name].shape[2], 0)))
            held[:, :, low:high] = torch.where(new[:, None, :, None], made, held[:, :, low:high])
            layer.memory[name] = held
        gone = new.repeat_interleave(pages.size, dim=1)[:, None].expand_as(slots)
        at = torch.where(gone, now[:, None, None], NEVER).to(torch.int32)
        layer.evict_at.scatter_reduce_(-1, slots, at, reduce="amin")


def _weighed(read: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Attention over several parts, each its logits [..., T, N] and values [..., N, D]: [..., T, D]."""
    shares = torch.cat([logits for logits, _ in read], dim=-1).softmax(-1).split([x.shape[-1] for x, _ in read], dim=-1)
    return torch.stack([a @ v.to(a) for a, (_, v) in zip(shares, read, strict=True)]).sum(0)


def _read(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """x [B, Hkv, C, D] at int64 [B, Hkv, N]: [B, Hkv, N, D]."""
    return x.gather(2, slots[..., None].expand(*slots.shape, x.shape[-1]))
