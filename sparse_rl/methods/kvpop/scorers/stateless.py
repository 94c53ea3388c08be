"""Scorers whose score r_t = f([k_t; v_t]) depends only on a token's own key and value, so it is known on arrival."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from sparse_rl.methods.kvpop.scorers.base import Scorer, per_head, project
from sparse_rl.methods.kvpop.scorers.config import LinearConfig, MLPConfig


class Linear(Scorer):
    """Scores tokens by the linear function r = a . [k; v]. A constant would cancel in every comparison."""

    def __init__(self, config: LinearConfig, *, heads: int, dim: int) -> None:
        super().__init__(config, heads=heads, dim=dim)
        self.out = per_head(heads, 2 * dim, 1)

    def score(self, x: Tensor, window: int) -> Tensor:
        return project(x, self.out)[..., 0]


class MLP(Scorer):
    """Scores tokens by r = a . SiLU(W [k; v] + b), a network with `hidden` hidden units per kv head."""

    def __init__(self, config: MLPConfig, *, heads: int, dim: int) -> None:
        super().__init__(config, heads=heads, dim=dim)
        width = config.hidden or 2 * dim
        self.inner = per_head(heads, 2 * dim, width, scale=(2 * dim) ** -0.5)
        self.bias = per_head(heads, 1, width)
        self.out = per_head(heads, width, 1)

    def score(self, x: Tensor, window: int) -> Tensor:
        return project(F.silu(project(x, self.inner) + self.bias.float()), self.out)[..., 0]
