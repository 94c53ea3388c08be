"""Attention under evict_at with any of ATTENTION_KERNELS: the interface between the views and the kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparse_rl.attention.kernels.dense import dense_attention
from sparse_rl.attention.kernels.flex import flex_attend
from sparse_rl.attention.kernels.gather import gathered_attention
from sparse_rl.attention.kernels.sdpa import sdpa

Evictions = Callable[[], Tensor]


def masked_attention(
    evict_at: Evictions, query: Tensor, key: Tensor, value: Tensor, scaling: float, kernel: str = "sdpa"
) -> Tensor:
    """Compute attention under evict_at with the given kernel. Returns the output [B, Hq, S, D].

    evict_at : function that returns evict_at, int32 [B, Hkv, S]; the kernels sdpa and dense call it again in the
        backward pass
    query, key, value : [B, Hq, S, D], [B, Hkv, S, D] and [B, Hkv, S, D]
    kernel : one of ATTENTION_KERNELS; on a CPU, flex is torch's plain operator, which is slow and refuses gradients
    """
    if kernel.startswith("flex"):  # saves lists of tiles, no S x S tensor
        sort, compiled = kernel == "flex_sorted", query.is_cuda
        return flex_attend(evict_at(), query, key, value, scaling, in_segments=sort, compiled=compiled)[0]
    if kernel == "gather":
        return gathered_attention(evict_at(), query, key, value, scaling)
    attend = partial(_by_reference if kernel == "dense" else _by_sdpa, evict_at)
    if not torch.is_grad_enabled():
        return attend(query, key, value, scaling)
    # If the mask were saved for the backward pass, the masks of all layers would stay in memory. So only query, key and
    # value are saved, and the mask is recomputed.
    return checkpoint(attend, query, key, value, scaling, use_reentrant=False, preserve_rng_state=False)


def _by_sdpa(evict_at: Evictions, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    batch, q_heads, width, dim = query.shape
    kv_heads = key.shape[1]
    group = q_heads // kv_heads
    # Fold kv heads into the batch: the mask [B * Hkv, 1, S, S] then serves all query heads of a group.
    mask = visible_mask(evict_at()).view(batch * kv_heads, 1, width, width)
    grouped = query.reshape(batch * kv_heads, group, width, dim)
    key = key.reshape(batch * kv_heads, 1, width, dim).expand(-1, group, -1, -1)
    value = value.reshape(batch * kv_heads, 1, width, dim).expand(-1, group, -1, -1)
    out = sdpa(grouped, key, value, scaling, mask)
    return out.reshape(batch, q_heads, width, dim)


def _by_reference(evict_at: Evictions, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    return dense_attention(query, key, value, visible_mask(evict_at()), scaling)


def visible_mask(evict_at: Tensor) -> Tensor:
    """Return the mask of evict_at, int32 [B, Hkv, S], as bool [B, Hkv, S queries, S tokens].

    Query q sees token t if t <= q < evict_at[t]. It always sees its own token, so that padding has no empty softmax.
    """
    position = torch.arange(evict_at.shape[-1], device=evict_at.device, dtype=evict_at.dtype)
    mask = position[:, None] < evict_at[:, :, None, :]
    mask.logical_and_(position[:, None] >= position)
    mask.diagonal(dim1=-2, dim2=-1).fill_(True)
    return mask


def mask_bytes(sequences: int, kv_heads: int, length: int, layers: int = 1) -> int:
    """Return the bytes of all masks: bool [length, length] for each sequence, kv head and layer."""
    return sequences * layers * kv_heads * length * length


def sdpa_mask_bytes(sequences: int, kv_heads: int, length: int, itemsize: int) -> int:
    """Return the bytes of one layer's boolean masks, and of the float masks that SDPA makes from them."""
    return mask_bytes(sequences, kv_heads, length) * (1 + itemsize)
