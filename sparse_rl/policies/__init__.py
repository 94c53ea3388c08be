"""Cache policies: which entries a cache keeps.

    policy = make_policy("gkv", budget=512, window=16, period=128)

schedule.py   when a cache is compacted and how many entries it holds, for everyone who asks
config/       the settings of each policy, with defaults and rules; both of these without torch
base.py       the contract with an engine: what a policy sees, and what a compaction returns
registry.py   the policies by name

docs/extending.md says how to add one, and which tests then cover it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparse_rl.lazy import public_names

if TYPE_CHECKING:
    from sparse_rl.policies.base import Arriving, Chunk, Entries, Kept, Policy
    from sparse_rl.policies.config import PolicyConfig
    from sparse_rl.policies.registry import POLICIES, fingerprint, make_policy
    from sparse_rl.policies.schedule import Schedule

__getattr__ = public_names(__name__)

__all__ = [
    "POLICIES",
    "Arriving",
    "Chunk",
    "Entries",
    "Kept",
    "Policy",
    "PolicyConfig",
    "Schedule",
    "fingerprint",
    "make_policy",
]
