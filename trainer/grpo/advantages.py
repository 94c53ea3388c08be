"""Changes to TRL's advantages in sparse training. Works on tensors only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def varied_groups(rewards: Tensor, weights: Tensor, size: int) -> Tensor:
    """Return a mask of the groups of `size` rows that have reward variance: bool [groups].

    rewards : float [rows, functions], of all ranks; NaN if a function returned no reward
    weights : float [functions]

    Uses the rewards, not the advantages, because the mean of equal rewards may round to a different number.
    """
    total = (rewards * weights.to(rewards.device)).nansum(1)
    scored = ~rewards.isnan().all(1)
    low = total.masked_fill(~scored, float("inf")).view(-1, size).amin(1)
    high = total.masked_fill(~scored, float("-inf")).view(-1, size).amax(1)
    return high > low


def over_varied_groups(advantages: Tensor, varied: Tensor, size: int, rank: int, drop: bool) -> Tensor:
    """Return a rank's advantages [rows], exactly 0 in groups without reward variance.

    drop : True also excludes these groups from the loss's mean over rows
    """
    start = rank * len(advantages)
    rows = varied.repeat_interleave(size)[start : start + len(advantages)]
    advantages = advantages.masked_fill(~rows, 0.0)
    share = float(varied.float().mean())
    return advantages / share if drop and share > 0 else advantages


def without_truncated(advantages: Tensor, finish_reasons: Sequence[str]) -> Tensor:
    """Return advantages that are 0 for truncated outputs (G-KV). Their reward still counts in the group's baseline."""
    truncated = torch.tensor([reason == "length" for reason in finish_reasons])
    return advantages.masked_fill(truncated.to(advantages.device), 0.0)
