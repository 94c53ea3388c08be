"""A control of the fits: a solver that Attention Matching must not use if a trainer replays the fits."""

from __future__ import annotations

import math

import torch


def least_squares(kept: torch.Tensor, mass: torch.Tensor, bound: float) -> torch.Tensor:
    """Solve argmin |kept w - mass|^2 for the weights w by its normal equations without a ridge, and clamp w. If there
    are hardly more queries than entries, rounding decides the result.
    """
    gram = kept.mT @ kept
    jitter = torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1) * 1e-13)
    solved = torch.cholesky_solve(kept.mT @ mass[..., None], torch.linalg.cholesky(gram + jitter))[..., 0]
    return solved.clamp(math.exp(-bound), math.exp(bound))
