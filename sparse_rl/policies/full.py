"""Full cache: nothing is evicted. The baseline (RL-Full), and what every engine does before its first compaction."""

from __future__ import annotations

from sparse_rl.policies.base import Policy


class Full(Policy):
    name = "full"

    def __init__(self) -> None:
        pass  # no budget: nothing to check

    def compacts(self, prompt_length: int, seen: int) -> bool:
        return False

    def physical_length(self, prompt_length: int, seen: int, layer: int = 0) -> int:
        return seen

    @property
    def peak_entries(self) -> int | None:
        return None
