"""How the scorers of a learned policy go on learning beside another training. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparse_rl.attention.config import TargetConfig
from sparse_rl.config import Configuration, Positive
from sparse_rl.methods.kvpop.config import BoundaryConfig


@dataclass(frozen=True, kw_only=True)
class ScorersConfig(Configuration):
    """A learned policy's scorers go on learning, by their boundary loss beside the training's own; else they stay.

    weight : of the boundary loss
    learning_rate : theirs, on the schedule of the model's
    target : what they are to foresee
    boundary : their loss
    """

    weight: Positive = 1.0
    learning_rate: Positive = 1e-5
    target: TargetConfig = field(default_factory=TargetConfig)
    boundary: BoundaryConfig = field(default_factory=BoundaryConfig)
