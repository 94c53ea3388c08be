"""Scores as whole numbers that no two entries share, so that a top-k is the same everywhere."""

from __future__ import annotations

import torch


def ranked(scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64, the greater the higher the float32 score, and of equal scores the earlier the position."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # a negative float grows as its bits shrink
    return (ordered.long() << 32) - positions
