"""Summaries of pages, and the pages that a query opens (LuKA section 3.2)."""

from __future__ import annotations

import torch

from sparse_rl.pages.pages import Pages


def summarise(keys: torch.Tensor, values: torch.Tensor, pages: Pages) -> tuple[torch.Tensor, torch.Tensor]:
    """k_p = mean over the page of k_t (after RoPE), v_p likewise: [..., n, D] -> [..., D], in their own dtype.

    As the cache holds them: what is read is rounded, in the sampler and in the trainer alike.
    """
    key, value = (x.double().mean(-2).to(x.dtype) for x in (keys, values))
    return key, value if pages.valued else torch.zeros_like(value)


def choose(logits: torch.Tensor, raw: int, most: int) -> torch.Tensor:
    """The pages to open: int64 [B, Hkv, K], -1 where there are fewer.

    logits : [B, Hkv, G, raw + M] of the cover, raw entries first, then M summaries; -inf: not seen

    Those of largest mass under the softmax over the cover, the largest over the group's query heads; of equal ones the
    earlier.
    """
    mass = (logits[..., raw:] - logits.logsumexp(-1, keepdim=True)).amax(2)
    best = mass.sort(dim=-1, descending=True, stable=True)
    count = min(most, mass.shape[-1])
    opened = best.indices[..., :count].masked_fill(best.values[..., :count] == float("-inf"), -1)
    return torch.nn.functional.pad(opened, (0, most - count), value=-1)
