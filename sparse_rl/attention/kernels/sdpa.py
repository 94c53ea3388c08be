"""Scaled dot-product attention: the kernel call that the reference engine and the replay share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_exact = True


def compute_exactly(exact: bool) -> None:
    """Set whether this process computes float32 attention on a CPU in float64, which is the default.

    Attention in float32 is about twice as fast; `computing_dtype` gives the reason for float64.
    """
    global _exact
    _exact = exact


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Compute attention in the dtype that `computing_dtype` chooses: [B, Hq, T, D] in the dtype of the values.

    query : [B, Hq, T, D], T queries
    key, value : [B, Hkv, N, D], N keys and values
    mask : broadcasts to [B, Hq, T, N]; bool, False if the query does not see the key; or floats, added to the logits
    causal : True if each query sees only the keys up to its own index
    """
    dtype = value.dtype
    wanted = computing_dtype(query, value)
    query, key, value = query.to(wanted), key.to(wanted), value.to(wanted)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(wanted)  # if the dtypes differ, torch silently gives a wrong result
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
    )
    return out.to(dtype)


def computing_dtype(query: Tensor, value: Tensor) -> torch.dtype:
    """Return the dtype in which attention is computed: the dtype of the values, with two exceptions.

    Under autocast, it is autocast's dtype, because RoPE leaves queries and keys in float32. For float32 on a CPU, it is
    float64, unless `compute_exactly(False)` was called: the engine sums over a compacted cache, the trainer over a
    masked row, and a trained model can amplify the difference between these two orders of summation a hundredfold.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.float64 if _exact and value.dtype == torch.float32 and device == "cpu" else value.dtype
