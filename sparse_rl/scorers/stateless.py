"""Scorers that look at one token: r_t = f([k_t; v_t]), known as it is inserted."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparse_rl.scorers.base import Scorer, per_head, project


class Linear(Scorer):
    """r = a . [k; v]. A constant would cancel in every comparison, so there is none."""

    def __init__(self, *, heads: int, dim: int, gamma: float | None = None) -> None:
        super().__init__(heads=heads, dim=dim, gamma=gamma)
        self.out = per_head(heads, 2 * dim, 1)

    def score(self, x: torch.Tensor, window: int) -> torch.Tensor:
        return project(x, self.out)[..., 0]


class MLP(Scorer):
    """r = a . SiLU(W [k; v] + b), `hidden` units per kv head; 2 dim by default, ours."""

    def __init__(self, *, heads: int, dim: int, hidden: int | None = None, gamma: float | None = None) -> None:
        super().__init__(heads=heads, dim=dim, gamma=gamma)
        if hidden is not None and (isinstance(hidden, bool) or not isinstance(hidden, int) or hidden < 1):
            raise ValueError(f"scorer 'mlp': hidden must be a whole number >= 1, got {hidden!r}")
        width = hidden or 2 * dim
        self.inner = per_head(heads, 2 * dim, width, scale=(2 * dim) ** -0.5)
        self.bias = per_head(heads, 1, width)
        self.out = per_head(heads, width, 1)

    def score(self, x: torch.Tensor, window: int) -> torch.Tensor:
        return project(F.silu(project(x, self.inner) + self.bias.float()), self.out)[..., 0]
