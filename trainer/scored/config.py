"""Settings for training a learned policy's scorers during another training. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparse_rl.attention.config import TargetConfig
from sparse_rl.config import Configuration, Positive
from sparse_rl.methods.kvpop.config import BoundaryConfig


@dataclass(frozen=True, kw_only=True)
class ScorersConfig(Configuration):
    """Settings for training the scorers of a learned policy further. Without this block they are not trained.

    The scorers' boundary loss is added to the loss of the model.

    weight : weight of the boundary loss
    learning_rate : maximum learning rate of the scorers, which follows the schedule of the model's learning rate
    target : training target of the scorers, a measure of the future attention to each token
    boundary : settings of the boundary loss
    """

    weight: Positive = 1.0
    learning_rate: Positive = 1e-5
    target: TargetConfig = field(default_factory=TargetConfig)
    boundary: BoundaryConfig = field(default_factory=BoundaryConfig)
