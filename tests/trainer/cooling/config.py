"""The settings of the made-up method `cooling`, which name the other parts of this method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparse_rl.config import Probability
from sparse_rl.policies.config import StreamingConfig


@dataclass(frozen=True, kw_only=True)
class CoolingConfig(StreamingConfig):
    """factor : number by which queries are multiplied, once more after each compaction"""

    name: ClassVar[str] = "cooling"
    policy_class: ClassVar[str] = "cooling.policy:Cooling"
    cache_class: ClassVar[str] = "cooling.cache:CoolingCache"
    view_class: ClassVar[str] = "cooling.view:CoolingView"
    sections: ClassVar[str | None] = "cooling.sections"
    factor: Probability = 0.8
