"""Full cache: nothing is evicted. The baseline (RL-Full), and what every engine does before its first compaction."""

from __future__ import annotations

from typing import Any

from sparse_rl.policies.base import Policy


class Full(Policy):
    name = "full"

    def __init__(self) -> None:
        pass  # no budget: nothing to check

    def compacts(self, prompt_length: Any, seen: Any) -> Any:
        return False

    def physical_length(self, prompt_length: Any, seen: Any, layer: int = 0) -> Any:
        return seen

    @property
    def peak_entries(self) -> int | None:
        return None
