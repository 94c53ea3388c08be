"""Cache policies: which entries a cache keeps.

    policy = make_policy("gkv", budget=512, window=16, period=128)

schedule.py   when a cache is compacted and how many entries it holds, for everyone who asks
config/       the settings of each policy, with defaults and rules; both of these without torch
base.py       the contract with an engine: what a policy sees, and what a compaction returns
registry.py   the policies by name

To add one:
1. its settings: a dataclass in config/ and one line in CONFIGS; the recipe, the command line and the errors follow.
   A budget that grows is a subclass of `Schedule` (schedule.py) with a `left`, and a `first`, of its own;
2. a file here with a subclass of `Policy` that says `config: ItsConfig` and writes `score` (base.py says what it sees);
   at its top the paper and the equation;
3. declare `last_queries`, `every_query` or `entry_memory` if it needs the last queries, all, or memory per entry, and
   `score_reads` or `observe_reads` if it looks at other than keys;
4. one line in POLICIES (registry.py): the replay-exactness matrix and the invariance tests then cover it;
5. a slow per-token reference of its equation in tests/policies/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparse_rl.lazy import public_names

if TYPE_CHECKING:
    from sparse_rl.policies.base import Arriving, Chunk, Entries, Kept, Policy
    from sparse_rl.policies.config import PolicyConfig
    from sparse_rl.policies.registry import POLICIES, fingerprint, make_policy
    from sparse_rl.policies.schedule import Schedule

__getattr__ = public_names(
    __name__,
    {
        "POLICIES": "sparse_rl.policies.registry",
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
