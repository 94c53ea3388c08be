"""Code that all cache policies share; each method has its own folder in sparse_rl/methods.

Schedules (schedule.py) and settings (config.py) need no torch. base.py is the contract between a policy and an engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparse_rl.lazy import public_names

if TYPE_CHECKING:
    from sparse_rl.policies.base import Arriving, Chunk, Entries, Kept, Policy
    from sparse_rl.policies.config import PolicyConfig
    from sparse_rl.policies.make import fingerprint, make_policy
    from sparse_rl.policies.schedule import Schedule

__getattr__ = public_names(__name__)

__all__ = ["Arriving", "Chunk", "Entries", "Kept", "Policy", "PolicyConfig", "Schedule", "fingerprint", "make_policy"]
