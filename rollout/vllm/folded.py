"""Attention biases in kernels that do not support biases: an additional coordinate of each key holds its bias.

For a query q, a key k, a value v, the bias b of the key, the factor `scale` on the logits and a constant c:

    q' = [q, c, 0 ...],    k' = [k, b / (c scale), 0 ...],    v' = [v, 0 ...]:    q' . k' scale = q . k scale + b

So the kernels and their cache have wider heads than the model; policies see the model's own heads. With c = 1 / scale,
the additional coordinate of k' is the bias itself, rounded to the cache's dtype. The only other rounding is that of c.
This module does not import vLLM.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from rollout.choice import CPU_HEAD_SIZES
from sparse_rl.errors import UserError

STEP = 8  # kernels on GPUs support head sizes that are multiples of STEP


def wide_head(head_dim: int, on_cpu: bool) -> int:
    """Return the smallest supported head size above `head_dim`. Raises UserError if there is none."""
    if not on_cpu:
        return (head_dim // STEP + 1) * STEP
    wider = [size for size in CPU_HEAD_SIZES if size > head_dim]
    if not wider:
        raise UserError(
            f"this policy stores biases in wider heads, and vLLM on a CPU has no head size above {head_dim}; "
            "choose another policy, or the hf engine",
            "cache.policy",
        )
    return wider[0]


def widened(x: Tensor, width: int, coordinate: float = 0.0) -> Tensor:
    """Return [T, H, width]: the D coordinates of each head of x [T, H, D], then `coordinate`, then zeros."""
    wide = F.pad(x, (0, width - x.shape[-1]))
    if coordinate:
        wide[..., x.shape[-1]] = coordinate
    return wide
