"""The specification: attention under an explicit S x S boolean mask, plain and slow.

Every fast kernel is compared with this file.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float, bias: Tensor | None = None
) -> Tensor:
    """softmax(q K^T scaling + bias) V over the visible keys, one query head at a time, in float64.

    query [B, Hq, S, D]; key, value [B, Hkv, N, D]; visible bool [B, Hkv, S (query), N (key)]; bias [B, Hkv, N]. Returns
    [B, Hq, S, D].
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
