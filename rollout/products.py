"""Layers whose rounding does not depend on how many rows they have: on a CPU, in float32.

A CPU library sums a product over few rows in another order than one over many. "Few" depends on the processor and the
inner size: under 4 rows on some, under 8 to 16 on others where the inner size is 172 or more. And an activation takes
another path for the last few numbers. An engine decodes few rows, a trainer reads many, and a trained model amplifies
the difference. So engines pad what they compute with rows of zeros, to a multiple of ROWS. A trainer need not: only a
sequence's last token, which no query sees, stands at the end of its batch.
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
ROW_WISE = (F.linear, F.silu)  # what a decoder computes of each row apart, and rounds by the number of rows


def padded(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of x [..., K], made of a multiple of ROWS rows where x is float32 on a CPU: [..., N].

    function : from [rows, K] to [rows, N], each row by itself
    """
    rows = x.shape[:-1].numel()
    if x.dtype != torch.float32 or x.device.type != "cpu" or not rows % ROWS:
        return function(x)
    wide = F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, -rows % ROWS))
    return function(wide)[:rows].reshape(*x.shape[:-1], -1)


def padded_layers(rows: int, device: torch.device) -> AbstractContextManager[Any]:
    """A context in which Linear modules and activations over `rows` rows are `padded`."""
    return _PaddedLayers() if rows % ROWS and device.type == "cpu" else nullcontext()


class _PaddedLayers(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in ROW_WISE or not args:
            return func(*args, **(kwargs or {}))
        x, *rest = args
        return padded(lambda rows: func(rows, *rest, **(kwargs or {})), x)
