"""The reference of all attention kernels: attention under a boolean mask of queries x keys, plain and slow."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float, bias: Tensor | None = None
) -> Tensor:
    """Return softmax(q K^T scaling + bias) V over the visible keys, [B, Hq, S, D] in the dtype of the queries.

    query : [B, Hq, S, D], S queries of Hq query heads
    key, value : [B, Hkv, N, D], N keys of Hkv kv heads
    visible : bool [B, Hkv, S, N], True if the query sees the key
    bias : [B, Hkv, N], added to the logits of each key; None means no bias

    All computation is in float64.
    """
    dtype, group = query.dtype, query.shape[1] // key.shape[1]
    query, key, value = query.double(), key.double(), value.double()
    heads = []
    for head in range(query.shape[1]):
        kv = head // group
        logits = query[:, head] @ key[:, kv].transpose(-1, -2) * scaling
        if bias is not None:
            logits = logits + bias[:, kv, None].double()
        weights = logits.masked_fill(~visible[:, kv], float("-inf")).softmax(-1)
        heads.append(weights @ value[:, kv])
    return torch.stack(heads, dim=1).to(dtype)
