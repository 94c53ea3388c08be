"""The replay of the made-up method `cooling`, and a loss of its own: the mean square of a layer's attention output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from sparse_rl.attention.interface import TraceView
from sparse_rl.attention.views import ReplayView

WEIGHT = 0.5


class CoolingView(TraceView):
    replays: ClassVar = frozenset({"evict_at", "cooled_at", "cooled_by"})
    requires: ClassVar = replays

    def prepare(self, batch: Mapping[str, torch.Tensor]) -> None:
        self.evictions = ReplayView({"evict_at": batch["evict_at"]}, self.device, self.kernel, self.through)
        queries = torch.arange(batch["evict_at"].shape[-1], dtype=torch.int32)
        counts = torch.searchsorted(batch["cooled_at"], queries.repeat(len(batch["cooled_at"]), 1), right=True)
        self.factors = (batch["cooled_by"][0] ** counts.double()).to(self.device)[:, None, :, None]
        self.losses: dict[int, torch.Tensor] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        out = self.evictions.attend(layer, query * self.factors.to(query), key, value, scaling)
        self.losses.setdefault(layer, WEIGHT * out.float().square().mean())
        return out
