"""Names of the attention kernels. Needs no torch."""

from __future__ import annotations

from typing import Literal, get_args

AttentionKernel = Literal["gather", "sdpa", "flex", "flex_sorted", "dense"]
ATTENTION_KERNELS: tuple[AttentionKernel, ...] = get_args(AttentionKernel)
"""Names of the attention kernels. Recipes also accept `auto`, which stands for one of them."""
