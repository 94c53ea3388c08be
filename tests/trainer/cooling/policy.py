"""The policy of `cooling`: it keeps the same entries as StreamingLLM, and records the times of the compactions."""

from __future__ import annotations

import torch

from cooling.config import CoolingConfig
from sparse_rl.methods.eviction.streaming import Streaming


class Cooling(Streaming):
    config: CoolingConfig
    entry_memory = {"unused": 0.0}  # for the memory plan

    def times(self, prompt: int, seen: int) -> list[int]:
        """Return the number of tokens seen at each compaction, up to `seen` tokens."""
        times, due = [], self.schedule.first(prompt)
        while due <= seen:
            times.append(due)
            due = self.schedule.next_due(prompt, due)
        return times

    def further(self, prompt: int, length: int) -> dict[str, torch.Tensor]:
        return {
            "cooled_at": torch.tensor(self.times(prompt, length - 2), dtype=torch.int32),
            "cooled_by": torch.tensor([self.config.factor], dtype=torch.float64),
        }
