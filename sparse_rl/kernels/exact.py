"""Computations that round alike in a sampler, which decodes few rows, and in a trainer, which reads many.

Attention of float32 on a CPU runs in float64 (`computing_dtype` says why).

A CPU library sums a matrix product in another order if the input has few rows: below 4 rows on some processors; below 8
to 16 rows on others, if the inner size is 172 or more. Activations take another code path for the last few numbers of a
tensor. So engines pad their inputs with rows of zeros, to a multiple of ROWS. A trainer need not: the last rows of its
inputs belong to a sequence's last token, which no later query attends to.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_exact = True


def compute_exactly(exact: bool) -> None:
    """Set whether this process computes float32 attention on a CPU in float64, the default, or twice as fast in
    float32.
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


ROWS = 16
ROW_WISE = (F.linear, F.silu, F.gelu)  # a decoder's row-wise functions whose rounding depends on the number of rows


def padded(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a row-wise function [rows, K] -> [rows, N] to x [..., K]. Returns [..., N].

    If x is float32 on a CPU, the function gets a multiple of ROWS rows; the additional rows are zeros.
    """
    rows = x.shape[:-1].numel()
    if x.dtype != torch.float32 or x.device.type != "cpu" or not rows % ROWS:
        return function(x)
    wide = F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, -rows % ROWS))
    return function(wide)[:rows].reshape(*x.shape[:-1], -1)


def padded_layers(rows: int, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager in which linear layers and activations, with inputs of `rows` rows, use `padded`."""
    return _PaddedLayers() if rows % ROWS and device.type == "cpu" else nullcontext()


class _PaddedLayers(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in ROW_WISE or not args:
            return func(*args, **(kwargs or {}))
        x, *rest = args
        return padded(lambda rows: func(rows, *rest, **(kwargs or {})), x)
