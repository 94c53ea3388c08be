"""Full cache: nothing is evicted. The baseline (RL-Full), and what every engine does before its first compaction."""

from __future__ import annotations

from sparse_rl.policies.base import Policy
from sparse_rl.policies.schedule import NeverEvicts, Schedule


class Full(Policy):
    name = "full"

    def __init__(self) -> None:
        pass  # no budget: nothing to check

    @property
    def schedule(self) -> Schedule:
        return NeverEvicts()
