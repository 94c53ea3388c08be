"""PagedCache: holds all keys and values and the summaries of closed pages; a query reads only a cover of them.

A cover represents every token once, by its own entry or by a summary. Token t of a row is in slot t. When a query
arrives, the pages that close at this query are summarised. Then the query opens up to K pages, and attends to sinks,
tail, the tokens of the opened pages, and the other summaries. So a step reads O(sinks + window + number of pages + K n)
entries, with n tokens in a page.

Sizes in shapes: B rows, Hkv kv heads, Hq query heads, C slots, M pages, K pages that a query opens, S tokens,
D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl.clock import part
from sparse_rl.errors import UserError
from sparse_rl.kernels.exact import computing_dtype
from sparse_rl.methods.pages.policy import Clustered, choose, random_weights, summarise
from sparse_rl.policies.base import Policy
from sparse_rl.policies.cache import EvictingCache, Layer, at_slots

KEYS, VALUES = "page_keys", "page_values"  # in a layer's memory: summaries [B, Hkv, M, D], rounded to the cache's dtype
OPENED = "opened"  # in a layer's memory: the pages that each query opened, int16 [B, Hkv, S, K]
# in a layer's state, [B, Hkv, C]: attention that a token received so far; weight of a token in its page's summary
RECEIVED, WEIGHTS = "received", "pi"
MOST_PAGES = torch.iinfo(torch.int16).max
CHUNK = 256  # prompt queries whose attention is summed at a time
ROOM = 64  # pages for which memory is added at a time


class PagedCache(EvictingCache):
    fillers = {OPENED: -1}

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        assert isinstance(policy, Clustered)
        self.config, self.pages, self.most_opened = policy.config, policy.pages, policy.most_opened

    def begin_decode(self, active: Sequence[bool], device: torch.device) -> None:
        with part("plan", detail=True):
            super().begin_decode(active, device)
            queries = [n - 1 for n in self.seen]
            self._closed = self.pages.all_closed(self.prompt_lengths, queries)
            if max(self._closed) > MOST_PAGES:
                raise UserError(f"a sequence has more than {MOST_PAGES} pages; use larger pages", "cache.page")
            before = self.pages.all_closed(self.prompt_lengths, [q - 1 for q in queries])
            self._were = [b if a else c for a, b, c in zip(active, before, self._closed, strict=True)]
            self._plan_cover(active, device)

    def _plan_cover(self, active: Sequence[bool], device: torch.device) -> None:
        pages = self.pages
        start = [pages.sinks + count * pages.size for count in self._closed]
        # A row that is not active reads only its last token: the tail of a row that fills up the batch is its prompt.
        start = [s if a else max(s, n - 1) for s, a, n in zip(start, active, self.seen, strict=True)]
        longest = max(max(n - s for n, s in zip(self.seen, start, strict=True)), 0)
        tail = torch.tensor(start, device=device)[:, None] + torch.arange(longest, device=device)
        sinks = torch.arange(pages.sinks, device=device).expand(len(start), -1)
        tokens = torch.cat([sinks, tail], dim=1)
        hidden = tokens >= self._seen_tensor[:, None]
        self._tokens, self._hidden = tokens.masked_fill(hidden, 0), hidden[:, None, None]
        closed = torch.tensor(self._closed, device=device)
        numbers = torch.arange(max(self._closed), device=device)
        self._open = (numbers >= closed[:, None])[:, None, None]  # [B, 1, 1, M], True for pages that are not closed yet
        self._allowed = None
        if self.config.fraction is not None:
            self._allowed = torch.tensor([self.most_opened(count) for count in self._closed], device=device)

    def _extend_records(self) -> None:
        super()._extend_records()
        for layer in self.layers.values():
            missing = layer.evict_at.shape[-1] - layer.memory[OPENED].shape[2]
            if missing > 0:
                layer.memory[OPENED] = F.pad(layer.memory[OPENED], (0, 0, 0, missing), value=-1)

    def further(self, row: int, length: int) -> dict[str, Tensor]:
        layers = [self.layers[i] for i in sorted(self.layers)]
        opened = torch.stack([layer.memory[OPENED][row] for layer in layers]).cpu()
        missing = length - opened.shape[2]
        opened = F.pad(opened, (0, 0, 0, missing), value=-1) if missing > 0 else opened[:, :, :length]
        closed_at = self.pages.closing(self.prompt_lengths[row], length)
        sections = {"paged_with": self.pages.settings(), "closed_at": closed_at, "opened": opened.contiguous()}
        if not self.pages.uniform:
            weights = torch.stack([layer.state[WEIGHTS][row] for layer in layers]).cpu()
            sections["pi"] = F.pad(weights, (0, max(length - weights.shape[-1], 0)))[..., :length].contiguous()
        return sections

    def _prefill(self, index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        out = super()._prefill(index, query, key, value, scaling)
        layer = self.layers[index]
        batch, heads, _, dim = key.shape
        width, wide = layer.evict_at.shape[-1], computing_dtype(query, value)
        layer.memory = {
            KEYS: torch.zeros(batch, heads, 0, dim, dtype=wide, device=key.device),
            VALUES: torch.zeros(batch, heads, 0, dim, dtype=wide, device=key.device),
            OPENED: torch.full((batch, heads, width, self.pages.most), -1, dtype=torch.int16, device=key.device),
        }
        if not self.pages.uniform:
            layer.state = {WEIGHTS: torch.zeros(layer.positions.shape, device=key.device)}
        if self.config.compressor == "attention":
            layer.state[RECEIVED] = _prompt_attention(query.to(wide), key.to(wide), scaling, self._seen_tensor)
        return out

    def _decode(self, index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        layer, pages = self.layers[index], self.pages
        batch, heads, _, dim = key.shape
        rows, now = torch.arange(batch, device=key.device), self._seen_tensor - 1
        layer.keys[rows, :, self._slots] = key[:, :, 0].to(layer.keys.dtype)
        layer.values[rows, :, self._slots] = value[:, :, 0]
        layer.positions[rows, :, self._slots] = now[:, None]
        if self._were != self._closed:
            with part("close", detail=True):
                self._close(index, layer)

        wide = computing_dtype(query, value)
        # The G query heads of a group attend as G "queries" to their kv head, so that no key is repeated.
        grouped = query.reshape(batch, heads, -1, dim).to(wide) * scaling
        slots = self._tokens[:, None].expand(-1, heads, -1)
        raw_logits = _logits(grouped, at_slots(layer.keys, slots)).masked_fill_(self._hidden, float("-inf"))
        parts = [(raw_logits, at_slots(layer.values, slots).to(wide))]
        if most := self._open.shape[-1]:
            page_keys, page_values = (layer.memory[name][:, :, :most] for name in (KEYS, VALUES))
            page_logits = _logits(grouped, page_keys) + pages.bias
            page_logits = page_logits.masked_fill_(self._open, float("-inf"))
            cover = torch.cat([raw_logits, page_logits], dim=-1)
            opened = choose(cover, raw_logits.shape[-1], pages.most, self.config.threshold, self._allowed)
            active, record = self._active[:, None, None], layer.memory[OPENED]
            record[rows, :, now] = torch.where(active, opened, record[rows, :, now].long()).to(torch.int16)
            opened_slots = pages.tokens(opened.clamp(min=0)).flatten(2).clamp(max=layer.keys.shape[2] - 1)
            is_open = opened[:, :, None] >= 0
            opened_logits = _logits(grouped, at_slots(layer.keys, opened_slots)).unflatten(-1, (-1, pages.size))
            if not pages.joint:
                of_opened = opened.clamp(min=0)[:, :, None].expand(*page_logits.shape[:3], -1)
                summary_logits = page_logits.gather(-1, of_opened)
                opened_logits = opened_logits.log_softmax(-1) + summary_logits[..., None]
            opened_logits = opened_logits.masked_fill(~is_open[..., None], float("-inf")).flatten(-2)
            opened_or_none = opened.masked_fill(opened < 0, most)[:, :, None].expand(*page_logits.shape[:3], -1)
            unopened_logits = F.pad(page_logits, (0, 1)).scatter_(-1, opened_or_none, float("-inf"))[..., :most]
            parts += [(unopened_logits, page_values), (opened_logits, at_slots(layer.values, opened_slots).to(wide))]
        out, received = _weighed(parts)
        if RECEIVED in layer.state:
            layer.state[RECEIVED].scatter_add_(-1, slots, received.mean(2))
        return out.to(value.dtype).reshape(query.shape)

    def _close(self, index: int, layer: Layer) -> None:
        """Summarise the pages that close at the current query, which is the first query to read their summaries."""
        low = min(a for a, b in zip(self._were, self._closed, strict=True) if a < b)
        high, device, pages = max(self._closed), layer.keys.device, self.pages
        batch, heads = layer.keys.shape[:2]
        numbers = torch.arange(low, high, device=device)
        closed_before, closed = torch.tensor(self._were, device=device), torch.tensor(self._closed, device=device)
        new = (numbers >= closed_before[:, None]) & (numbers < closed[:, None])  # [B, M']
        tokens = pages.tokens(numbers).expand(batch, -1, -1)
        tokens = torch.where(new[..., None], tokens, 0)
        slots = tokens.flatten(1)[:, None].expand(-1, heads, -1)
        shape = (len(numbers), pages.size)
        weights = None
        if self.config.compressor == "attention":
            weights = layer.state[RECEIVED].gather(2, slots).unflatten(2, shape).softmax(-1).float()
        elif self.config.compressor == "random":
            weights = random_weights(index, heads, numbers, pages.size).expand(batch, -1, -1, -1)
        page_keys, page_values = (at_slots(x, slots).unflatten(2, shape) for x in (layer.keys, layer.values))
        summaries = summarise(page_keys, page_values, pages, weights)
        for name, summary in zip((KEYS, VALUES), summaries, strict=True):
            stored = layer.memory[name]
            if high > stored.shape[2]:
                stored = F.pad(stored, (0, 0, 0, high + ROOM - stored.shape[2]))
            earlier = stored[:, :, low:high]
            stored[:, :, low:high] = torch.where(new[:, None, :, None], summary.to(stored.dtype), earlier)
            layer.memory[name] = stored
        if weights is not None:
            in_new_pages = new.repeat_interleave(pages.size, dim=1)[:, None].expand_as(slots)
            new_weights = weights.flatten(2).masked_fill(~in_new_pages, 0.0)
            layer.state[WEIGHTS].scatter_reduce_(-1, slots, new_weights, reduce="amax")


@part("logits", detail=True)
def _logits(query: Tensor, keys: Tensor) -> Tensor:
    return query @ keys.to(query.dtype).mT


@part("sum", detail=True)
def _weighed(read: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attend with one softmax over several parts, each logits [..., T, N] and values [..., N, D]. Returns the output
    [..., T, D], and the attention weights of the first part [..., T, N].
    """
    shares = torch.cat([logits for logits, _ in read], dim=-1).softmax(-1).split([x.shape[-1] for x, _ in read], dim=-1)
    parts = [a @ v for a, (_, v) in zip(shares, read, strict=True)]
    return sum(parts[1:], parts[0]), shares[0]


def _prompt_attention(query: Tensor, key: Tensor, scaling: float, lengths: Tensor) -> Tensor:
    """Return the attention that each prompt token receives, summed over the queries of the prompt, and averaged over
    the query heads of a group: [B, Hkv, S].
    """
    heads, width = key.shape[1:3]
    grouped, key_positions = query.unflatten(1, (heads, -1)) * scaling, torch.arange(width, device=key.device)
    received = torch.zeros_like(key[..., 0])
    for start in range(0, width, CHUNK):
        query_positions = key_positions[start : start + CHUNK]
        logits = torch.einsum("bhgtd,bhnd->bhgtn", grouped[:, :, :, start : start + CHUNK], key)
        shares = logits.masked_fill_(key_positions > query_positions[:, None], float("-inf")).softmax(-1)
        real = (query_positions < lengths[:, None])[:, None, None, :, None]
        received += shares.masked_fill_(~real, 0.0).sum(3).mean(2)
    return received
