"""Biases in kernels that add none: one more coordinate of each head. Without vLLM.

    q' = [q, c, 0 ...],    k' = [k, b / (c scale), 0 ...],    v' = [v, 0 ...]:    q' . k' scale = q . k scale + b

So the kernels, and the cache that they read, get heads that are wider than the model's; policies see the model's own.
With c = 1 / scale, a bias that is rounded to the cache's dtype is held as it is, but for the rounding of c.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from rollout.choice import CPU_HEAD_SIZES
from sparse_rl.errors import UserError

STEP = 8  # of the head sizes that kernels on GPUs take


def wide_head(head_dim: int, on_cpu: bool) -> int:
    """The least head size that has room for a bias. Raises UserError where a kernel takes none."""
    if not on_cpu:
        return (head_dim // STEP + 1) * STEP
    wider = [size for size in CPU_HEAD_SIZES if size > head_dim]
    if not wider:
        raise UserError(f"vLLM on a CPU has no head size beyond {head_dim}, where biases would go", "cache.policy")
    return wider[0]


def widened(x: Tensor, width: int, coordinate: float = 0.0) -> Tensor:
    """Heads with further coordinates, [T, H, width]: `coordinate` right behind the model's own, then zeros.

    x : [T, H, D]
    """
    wide = F.pad(x, (0, width - x.shape[-1]))
    if coordinate:
        wide[..., x.shape[-1]] = coordinate
    return wide
