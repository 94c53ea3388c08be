"""A separate policy for each range of layers (LuKA section 3.3).

The paper's mixed attention uses lined attention in the first and last layers, and clustered attention in between. An
engine gives each part its own cache; this policy only defines the layers of each part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sparse_rl.attention.families import global_layers
from sparse_rl.methods.config import LayeredConfig
from sparse_rl.policies.base import Policy
from sparse_rl.policies.registry import make_policy
from sparse_rl.policies.schedule import PerLayer


class Layered(Policy):
    """A separate policy for each range of layers.

    parts : the policies, in order of layers
    spans : number of layers of each part; taken from the settings until the policy is `bound_to` a model
    """

    config: LayeredConfig
    score_reads = ()

    def __init__(self, config: LayeredConfig, parts: Sequence[Policy] | None = None, layers: int | None = None) -> None:
        super().__init__(config)
        self.parts = [make_policy(part.cache) for part in config.ranges] if parts is None else list(parts)
        self.spans = config.spans(sum(part.layers for part in config.ranges) if layers is None else layers)
        counted = zip(self.spans, self.parts, strict=True)
        self.schedule = PerLayer(parts=tuple((span, part.schedule) for span, part in counted))

    def bound_to(self, model: Any) -> Layered:
        return Layered(self.config, [part.bound_to(model) for part in self.parts], len(global_layers(model.config)))

    def by_layers(self, layers: int) -> list[tuple[Policy, int]]:
        return list(zip(self.parts, self.config.spans(layers), strict=True))

    def most_read(self, prompt: int, fed: int) -> int:
        """Return the mean over layers of the maximum number of entries that a decoding query reads, rounded up."""
        read = [part.most_read(prompt, fed) * span for part, span in zip(self.parts, self.spans, strict=True)]
        return math.ceil(sum(read) / sum(self.spans))
