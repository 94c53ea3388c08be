"""Cache policies: which entries a cache keeps.

    policy = make_policy("gkv", budget=512, window=16, period=128)

To add one:
1. write a file here with a subclass of `Policy` that sets `name` and writes `score` (base.py says what it sees);
2. cite the paper and the equation at its top;
3. declare `last_queries`, `every_query` or `initial_state` if it needs the last queries, all, or memory per entry, and
   `score_reads` or `observe_reads` if it looks at other than keys;
4. add one line to POLICIES: the replay-exactness matrix and the invariance tests then cover it;
5. add a slow per-token reference of its equation to tests/policies/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparse_rl.lazy import public_names

if TYPE_CHECKING:
    from sparse_rl.policies.base import Entries, Kept, Policy
    from sparse_rl.policies.kvpop import KVpop
    from sparse_rl.policies.registry import LEARNED, POLICIES, fingerprint, make_policy, sampled_under
    from sparse_rl.policies.schedule import Schedule

__getattr__ = public_names(
    __name__,
    {
        **dict.fromkeys(("Entries", "Kept", "Policy"), "sparse_rl.policies.base"),
        **dict.fromkeys(
            ("LEARNED", "POLICIES", "fingerprint", "make_policy", "sampled_under"), "sparse_rl.policies.registry"
        ),
        "KVpop": "sparse_rl.policies.kvpop",
        "Schedule": "sparse_rl.policies.schedule",
    },
)

__all__ = [
    "LEARNED",
    "POLICIES",
    "Entries",
    "KVpop",
    "Kept",
    "Policy",
    "Schedule",
    "fingerprint",
    "make_policy",
    "sampled_under",
]
