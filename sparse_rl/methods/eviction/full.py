"""Full cache, the baseline RL-Full: no entry is evicted. Under any policy, this holds before the first compaction."""

from __future__ import annotations

from sparse_rl.methods.config import FullConfig
from sparse_rl.policies.base import Policy


class Full(Policy):
    """A policy that keeps all entries; its `compact` is never called."""

    config: FullConfig
