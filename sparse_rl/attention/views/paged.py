"""Replay of clustered attention: a query reads what its sampler read, page choices as recorded, summaries made again.

Summaries follow from keys and values, and are made again with gradients. The choice has none: it is a decision, as an
eviction is. Here every query attends, under a mask, to all tokens and all summaries of its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from sparse_rl.attention.interface import check_sections
from sparse_rl.attention.kernels.sdpa import computing_dtype, sdpa
from sparse_rl.pages import Pages, summarise
from sparse_rl.trace import NEVER


class PagedView:
    """A `kv_view` for training: B padded sequences, when their pages closed, and which of them each query opened.

    Parameters
    ----------
    batch : from `batch_traces`; evict_at int32 [L, B, Hkv, S], opened int16 [L, B, Hkv, S, K], paged_with int32 [6]
    device : where the model runs
    kernel : has no choice here
    through : has no meaning here: summaries always have gradients

    Raises TraceError where the batch has another section.
    """

    replays: ClassVar = frozenset({"evict_at", "opened", "paged_with"})

    def __init__(
        self, batch: Mapping[str, torch.Tensor], device: torch.device | str, kernel: str = "sdpa", through: bool = True
    ) -> None:
        check_sections(type(self), batch)
        self.device = torch.device(device)
        self.evict_at, self.opened = batch["evict_at"], batch["opened"]
        self.pages = Pages.read(batch["paged_with"])
        real = self.evict_at[0, :, 0] > 0  # a pad key is seen by nobody
        start, width = real.int().argmax(1), real.shape[1]
        self.count = max(0, (width - self.pages.sinks) // self.pages.size)
        columns = start[:, None, None] + self.pages.tokens(torch.arange(self.count))  # [B, M, n]
        self.columns = columns.clamp(max=width - 1).to(self.device)
        self.whole = (columns[..., -1] < (start + real.sum(1))[:, None]).to(self.device)
        behind = torch.arange(width) - start[:, None] - self.pages.sinks
        page = behind.div(self.pages.size, rounding_mode="floor").masked_fill(behind < 0, -1)
        self.page_of = page.masked_fill(page >= self.count, -1).to(self.device)  # [B, S]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        evict_at = self.evict_at[layer].to(self.device, non_blocking=True)
        opened = self.opened[layer].to(self.device, non_blocking=True).long()
        batch, heads, width, dim = key.shape
        at = self.columns.flatten(1)[:, None, :, None].expand(-1, heads, -1, dim)
        inside = [x.gather(2, at).unflatten(2, self.columns.shape[1:]) for x in (key, value)]
        page_keys, page_values = summarise(inside[0], inside[1], self.pages)
        mask = self._mask(evict_at, opened, computing_dtype(query, value)).flatten(0, 1)[:, None]
        keys, values = torch.cat([key, page_keys], dim=2), torch.cat([value, page_values], dim=2)
        group = query.shape[1] // heads
        grouped = query.reshape(batch * heads, group, width, dim)  # kv heads beside rows: a mask serves its group
        keys, values = (x.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for x in (keys, values))
        return sdpa(grouped, keys, values, scaling, mask).reshape(query.shape)

    def _mask(self, evict_at: torch.Tensor, opened: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What is added to the logits: [B, Hkv, S, S + M], -inf where a query does not see."""
        batch, heads, width = evict_at.shape
        query = torch.arange(width, device=self.device)
        seen = (query <= query[:, None]) & (query[:, None] < evict_at[:, :, None])
        closes = evict_at.gather(2, self.columns[:, None, :, 0].expand(-1, heads, -1))
        closes = closes.masked_fill(~self.whole[:, None], NEVER)
        is_open = torch.zeros(batch, heads, width, self.count + 1, dtype=torch.bool, device=self.device)
        is_open = is_open.scatter(3, torch.where(opened < 0, self.count, opened), True)
        is_open[..., self.count] = False
        place = torch.where(self.page_of < 0, self.count, self.page_of)[:, None, None].expand(-1, heads, width, -1)
        seen = seen | is_open.gather(3, place)
        seen = seen | torch.eye(width, dtype=torch.bool, device=self.device)  # a pad query sees itself
        summaries = (closes[:, :, None] <= query[:, None]) & ~is_open[..., : self.count]
        bias = torch.full(summaries.shape, self.pages.bias, dtype=dtype, device=self.device)
        return torch.cat(
            [
                torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill(~seen, float("-inf")),
                bias.masked_fill(~summaries, float("-inf")),
            ],
            dim=-1,
        )
