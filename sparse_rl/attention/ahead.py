"""Compile FlexAttention before training: a graph takes tens of seconds, so the first step would seem to hang."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparse_rl.attention.config import TargetConfig
from sparse_rl.attention.families import cache_shape
from sparse_rl.attention.kernels.flex import padded
from sparse_rl.attention.kernels.masked import masked_attention
from sparse_rl.attention.target import FutureTarget
from sparse_rl.trace import NEVER


def compile_ahead(
    kernel: str, config: Any, rows: int, length: int, device: torch.device, dtype: torch.dtype, target: bool = False
) -> None:
    """Compile flex or flex_sorted for `rows` sequences padded to `length` tokens, with and without gradients.

    Call this function under the same autocast as the training, because compiled graphs depend on autocast. If `target`
    is True, also compile the computation of the scorers' training target.
    """
    _, kv_heads, dim = cache_shape(config)
    heads = (config.num_attention_heads, kv_heads, kv_heads)
    query, key, value = (torch.zeros(rows, h, length, dim, device=device, dtype=dtype) for h in heads)
    evict_at = torch.full((rows, kv_heads, length), NEVER, dtype=torch.int32, device=device)
    scaling = dim**-0.5

    def attend() -> Tensor:
        return masked_attention(lambda: evict_at, query, key, value, scaling, kernel)

    with torch.no_grad():
        attend()
        if target:
            ends = torch.full((rows, length), length, device=device)
            FutureTarget(TargetConfig())(query, key, scaling, 1, ends, evict_at)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    torch.autograd.grad(attend().sum(), inputs)


def sizes_up_to(length: int) -> list[int]:
    sizes, size = [], 0
    while size < length:
        size = padded(size + 1)
        sizes.append(size)
    return sizes
