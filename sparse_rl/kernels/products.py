"""Layers whose rounding does not depend on the number of input rows. This matters only on a CPU, in float32.

A CPU library sums a matrix product in another order if the input has few rows: below 4 rows on some processors; below 8
to 16 rows on others, if the inner size is 172 or more. Activations take another code path for the last few numbers of a
tensor. An engine decodes few rows, a trainer reads many, and a trained model amplifies the difference. So engines pad
their inputs with rows of zeros, to a multiple of ROWS. A trainer need not pad: the last rows of its inputs belong to a
sequence's last token, which no later query attends to.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ROWS = 16
ROW_WISE = (F.linear, F.silu)  # a decoder's row-wise functions whose rounding depends on the number of rows


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
