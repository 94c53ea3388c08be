"""Scores as whole numbers that no two entries share, so that a top-k is the same everywhere."""

from __future__ import annotations

import torch
from torch import Tensor


def ranked(scores: Tensor, positions: Tensor) -> Tensor:
    """Ranks int64 [...]: the higher the score, and of equal scores the earlier the position, the greater the rank.

    scores : float32 [...]; positions : int64 [...], below 2**31
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # a negative float grows as its bits shrink
    return (ordered.long() << 32) - positions
