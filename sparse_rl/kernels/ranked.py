"""Scores as distinct integers, so that a top-k gives the same result on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def ranked(scores: Tensor, positions: Tensor) -> Tensor:
    """Return distinct ranks, int64 [...]: an entry with a higher score has a greater rank.

    If scores are equal, the entry at the earlier position has the greater rank.

    scores, positions : float32 [...], and int64 [...], below 2**31
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the bits of negative floats sort in reverse
    return (ordered.long() << 32) - positions
