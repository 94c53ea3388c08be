"""Scaled dot-product attention: the kernel call that the reference engine and the replay share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_exact = True


def compute_exactly(exact: bool) -> None:
    """Set whether this process computes float32 attention on a CPU in float64. The default is True.

    In float64, sampler and trainer agree up to rounding (`computing_dtype`); float32 attention is about twice as fast.
    """
    global _exact
    _exact = exact


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Attention of [B, Hq, T, D] over [B, Hkv, N, D].

    mask : bool, False if the query does not see the key; or floats, which are added to the logits
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
    """The dtype in which attention is computed.

    Under autocast it is autocast's dtype, since RoPE leaves queries and keys in float32. For float32 on a CPU it is
    float64: the engine sums over a compacted cache, the trainer over a masked row, and a trained model can amplify the
    difference between two summation orders a hundredfold. After `compute_exactly(False)` it is float32, which is about
    twice as fast.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.float64 if _exact and value.dtype == torch.float32 and device == "cpu" else value.dtype
