"""What all cache policies share; each method has a folder of its own in sparse_rl/methods.

    policy = make_policy("gkv", budget=512, window=16, period=128)

schedule.py   when a cache is compacted and how many entries it holds, for everyone who asks
config.py     what the settings of all policies have; both of these without torch
base.py       the contract with an engine;  entries.py  what a policy is given, and returns
cache.py      what a cache of the hf engine is, and its bytes
registry.py   how a policy is made

docs/extending.md says how to add one, and which tests then cover it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparse_rl.lazy import public_names

if TYPE_CHECKING:
    from sparse_rl.policies.base import Policy
    from sparse_rl.policies.config import PolicyConfig
    from sparse_rl.policies.entries import Arriving, Chunk, Entries, Kept
    from sparse_rl.policies.registry import fingerprint, make_policy
    from sparse_rl.policies.schedule import Schedule

__getattr__ = public_names(__name__)

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
