"""The cache of the made-up method `cooling` in the hf engine."""

from __future__ import annotations

import torch

from cooling.policy import Cooling
from sparse_rl.policies.cache import EvictingCache


class CoolingCache(EvictingCache):
    policy: Cooling

    def _decode(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        before = zip(self.prompt_lengths, self.seen, strict=True)
        counts = torch.tensor([len(self.policy.times(prompt, seen - 1)) for prompt, seen in before])
        factors = (self.policy.config.factor ** counts.double()).to(query)
        return super()._decode(index, query * factors[:, None, None, None], key, value, scaling)
