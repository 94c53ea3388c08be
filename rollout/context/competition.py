"""Share of the kept keys that each kv head gets if the keys of all heads of all layers compete by their attention
(Attention Matching, appendix E, figures 6 and 8; KVzip).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout.context.compact import Studied, _score
from rollout.context.config import PromptCacheConfig
from sparse_rl.matching import Block


def scores(studied: Studied, config: PromptCacheConfig) -> Tensor:
    """Return the attention that each competing key receives from the reference queries: float32 [L, Hkv, N].

    The keys are those of the N tokens between the first `config.first` and the last `config.last` ones.
    """
    tokens = len(studied.whole.tokens)
    place = torch.arange(tokens)
    competing = (place >= config.first) & (place < tokens - config.last)
    layers = []
    for entries, queries in zip(studied.whole.layers, studied.queries, strict=True):
        allowed = competing.to(entries.keys.device).expand(1, 1, -1)
        block = Block(entries.keys, entries.values, queries, entries.bias, allowed, studied.scaling)
        layers.append(_score(block, config.aggregate)[0, :, competing.to(entries.keys.device)].float().cpu())
    return torch.stack(layers)


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
