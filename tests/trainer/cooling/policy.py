"""The policy of `cooling`: it keeps the same entries as StreamingLLM, and records the times of the compactions."""

from __future__ import annotations

import torch

from cooling.config import CoolingConfig
from sparse_rl.policies.rules import Streaming


class Cooling(Streaming):
    config: CoolingConfig
    entry_memory = {"unused": 0.0}  # for the memory plan

    def times(self, prompt: int, seen: int) -> list[int]:
        """Return the number of tokens seen at each compaction, up to `seen` tokens."""
        return [count for count in range(prompt, seen + 1) if self.schedule.due(prompt, count)]

    def further(self, prompt: int, length: int) -> dict[str, torch.Tensor]:
        return {
            "cooled_at": torch.tensor(self.times(prompt, length - 2), dtype=torch.int32),
            "cooled_by": torch.tensor([self.config.factor], dtype=torch.float64),
        }
