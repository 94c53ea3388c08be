"""Settings for training a learned policy's scorers during another training. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparse_rl.attention.config import TargetConfig
from sparse_rl.config import Configuration, Positive
from sparse_rl.methods.kvpop.config import BoundaryConfig


@dataclass(frozen=True, kw_only=True)
class ScorersConfig(Configuration):
    """Continue to train a learned policy's scorers by adding their boundary loss. Without this block they stay fixed.

    weight : weight of the boundary loss
    learning_rate : learning rate of the scorers, on the model's schedule
    target : future attention that the scorers learn to predict
    boundary : the scorers' loss
    """

    weight: Positive = 1.0
    learning_rate: Positive = 1e-5
    target: TargetConfig = field(default_factory=TargetConfig)
    boundary: BoundaryConfig = field(default_factory=BoundaryConfig)
