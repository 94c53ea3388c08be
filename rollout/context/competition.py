"""Competition of the keys of all kv heads of all layers by their attention (KVzip; Attention Matching, appendices B.3
and E, figures 6 and 8).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def competing_counts(scores: Tensor, total: int) -> list[list[int]]:
    """Return the number of keys that each kv head keeps if the `total` keys with the highest scores are kept.

    The best key of a head is always kept. Returns [layer][kv head].

    scores : [L, Hkv, N], score of each key
    """
    scores = scores.scatter(2, scores.argmax(2, keepdim=True), float("inf"))
    order = scores.flatten().sort(descending=True, stable=True).indices
    kept = torch.zeros_like(order, dtype=torch.bool)
    kept[order[: max(total, scores.shape[0] * scores.shape[1])]] = True
    return kept.view_as(scores).sum(-1).tolist()


def global_shares(scores: Tensor, ratios: Sequence[float]) -> Tensor:
    """Return the share of the kept keys that each kv head gets if the keys with the highest scores of all layers and
    heads are kept: float64 [number of ratios, L, Hkv], which adds up to 1 at each ratio.

    scores : [L, Hkv, N], score of each key
    ratios : shares of all keys that are kept; at least one key is kept
    """
    layers, heads, count = scores.shape
    owner = torch.arange(layers * heads).repeat_interleave(count)
    ranked = owner[scores.flatten().sort(descending=True, stable=True).indices]
    kept = (ranked[: max(1, round(ratio * len(owner)))] for ratio in ratios)
    shares = [torch.bincount(owners, minlength=layers * heads).double() / len(owners) for owners in kept]
    return torch.stack(shares).view(-1, layers, heads)
