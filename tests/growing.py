"""A policy for tests only, in no registry, whose budget grows with the tokens seen. Its schedule overrides two
methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sparse_rl.methods.config import EvictingConfig
from sparse_rl.policies.base import Entries, Policy
from sparse_rl.policies.schedule import Schedule


@dataclass(frozen=True)
class GrowingSchedule(Schedule):
    """Schedule that keeps `budget` entries, and one more for every `share` tokens seen."""

    share: int = 4

    def left(self, prompt: Any, seen: Any) -> Any:
        return self.budget + seen // self.share

    def first(self, prompt: Any) -> Any:
        # the least n with n - n // share >= budget + period
        least = (self.share * (self.budget + self.period) - 1) // (self.share - 1)
        return least + (prompt > least) * (prompt - least)


class GrowingConfig(EvictingConfig):
    name = "growing"

    @property
    def schedule(self) -> Schedule:
        return GrowingSchedule(self.budget, self.period)


class Growing(Policy):
    """Policy that keeps the entries to which the last query attends most, as MorphKV does."""

    @property
    def last_queries(self) -> int:
        return 1

    def score(self, layer: int, entries: Entries) -> torch.Tensor:
        return entries.window_attention(1).amax(dim=2)[:, :, 0]
