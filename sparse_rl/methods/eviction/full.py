"""Full cache: nothing is evicted. The baseline (RL-Full), and what every engine does before its first compaction."""

from __future__ import annotations

from sparse_rl.methods.config import FullConfig
from sparse_rl.policies.base import Policy


class Full(Policy):
    """Keeps everything; it is never asked to compact."""

    config: FullConfig
