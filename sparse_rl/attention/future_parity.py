"""Choice of the kernel that computes the training target of KVpop's scorers: FlexAttention or torch.

FlexAttention is used on a GPU if it passes a check there, torch otherwise. The check compares FlexAttention with the
torch kernel of future.py in float64. The logs of the future attention may differ by at most 1e-3.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from sparse_rl.attention.future import Kernel, attention_lse, future_attention_mass
from sparse_rl.attention.parity import LENGTH, LSE, Errors, Parity, distance, judged, random_evictions

Shape = tuple[int, int, int]  # query heads, kv heads, head dim


def target_kernel(device: torch.device, dtype: torch.dtype, shape: Shape) -> Kernel:
    """Choose the kernel for this shape. On a GPU, the first call compiles FlexAttention and checks it."""
    if device.type != "cuda":
        return "torch"
    return "flex" if check_target(device, dtype, shape).failure is None else "torch"


@cache
def check_target(device: torch.device, dtype: torch.dtype, shape: Shape, length: int = LENGTH) -> Parity:
    """Compare FlexAttention's log of the future attention with the torch kernel's. The result is cached in the process.

    The inputs are two rows; the second has two documents and padding. The comparison runs with the log-sum-exp of a
    sparse attention, and again with the log-sum-exp of the dense attention.
    """
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(0)
    query, key = (2 * torch.randn(2, h, length, dim, generator=generator).to(device, dtype) for h in (heads, kv_heads))
    evict_at = random_evictions(1, kv_heads, length, max(1, length // 8), generator).expand(2, -1, -1).to(device)
    ends = torch.full((2, length), length, device=device)
    ends[1, : length // 3], ends[1, length // 3 :], ends[1, -(length // 6) :] = length // 3, length - length // 6, 0

    def compared() -> Errors:
        errors = {}
        for name, seen in (("sparse", evict_at), ("dense", None)):
            ours = _target(query, key, seen, ends, "flex")
            wanted = _target(query.double(), key.double(), seen, ends, "torch")
            unattended = (ours == wanted) & wanted.isinf()  # no query counts for these tokens
            errors[name] = distance(ours.masked_fill(unattended, 0), wanted.masked_fill(unattended, 0)), LSE
        return errors

    return judged("flex", device, compared)


def _target(query: Tensor, key: Tensor, evict_at: Tensor | None, ends: Tensor, kernel: Kernel) -> Tensor:
    options: dict[str, Any] = {"scaling": query.shape[-1] ** -0.5, "ends": ends, "kernel": kernel}
    lse = attention_lse(query, key, evict_at=evict_at, **options)
    return future_attention_mass(query, key, window=query.shape[2] // 16, log_sum_exp=lse, **options)
