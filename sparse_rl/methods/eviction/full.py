"""Full cache: nothing is evicted. The baseline (RL-Full), and what every engine does before its first compaction."""

from __future__ import annotations

from sparse_rl.policies.base import Policy
from sparse_rl.policies.config import FullConfig


class Full(Policy):
    """Keeps everything; it is never asked to compact."""

    config: FullConfig
