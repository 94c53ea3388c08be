"""What all cache policies share; each method has a folder of its own in sparse_rl/methods.

    policy = make_policy("gkv", budget=512, window=16, period=128)

schedule.py   when a cache is compacted and how many entries it holds, for everyone who asks
config/       what the settings of all policies have, and the policies by name; both of these without torch
base.py       the contract with an engine: what a policy sees, and what a compaction returns
cache.py      physical caches that shrink: those of the hf engine
registry.py   how a policy is made

docs/extending.md says how to add one, and which tests then cover it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparse_rl.lazy import public_names

if TYPE_CHECKING:
    from sparse_rl.policies.base import Arriving, Chunk, Entries, Kept, Policy
    from sparse_rl.policies.config import PolicyConfig
    from sparse_rl.policies.registry import fingerprint, make_policy
    from sparse_rl.policies.schedule import Schedule

__getattr__ = public_names(
    __name__,
    {
        "Arriving": "sparse_rl.policies.base",
        "Chunk": "sparse_rl.policies.base",
        "Entries": "sparse_rl.policies.base",
        "Kept": "sparse_rl.policies.base",
        "Policy": "sparse_rl.policies.base",
        "PolicyConfig": "sparse_rl.policies.config",
        "Schedule": "sparse_rl.policies.schedule",
        "fingerprint": "sparse_rl.policies.registry",
        "make_policy": "sparse_rl.policies.registry",
    },
)

__all__ = [
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
