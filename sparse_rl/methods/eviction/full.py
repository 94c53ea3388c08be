"""Full cache, the baseline RL-Full: no entry is evicted."""

from __future__ import annotations

from sparse_rl.methods.config import FullConfig
from sparse_rl.policies.base import Policy


class Full(Policy):
    """Keeps all entries; `compact` is never called."""

    config: FullConfig
