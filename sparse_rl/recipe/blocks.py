"""The blocks of a recipe (`data:`, `rollout:`, `lora:`, `launch:`, ...), each one dataclass with its own checks."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparse_rl.config import (
    PositiveInt,
    Text,
)
from sparse_rl.data.config import DataConfig


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """What GRPO measures on held-out problems every so many steps (rewards and entropy of samples), and distillation
    and KVpop also before their first step (KL and cross-entropy; `samples` does not count there).
    """

    data: DataConfig
    every: PositiveInt = 20
    problems: PositiveInt = 32
    samples: PositiveInt = 4


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Evaluate every policy at every budget; an empty list keeps what the cache block says."""

    policy: list[Text] = field(default_factory=list)
    budget: list[PositiveInt] = field(default_factory=list)
