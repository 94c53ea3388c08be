"""KVpop: sinks, the window, and the k entries that a learned scorer ranks highest.

A token t = q - w leaves the window as query q arrives and competes, before q attends; what is dropped then gets
evict_at = q. All decay at one rate per kv head, so their order never changes and a dropped token never returns:

    r_t(q) = r_t + (floor(q / n) - floor(t / n)) log gamma        (n = 1 in the papers' main runs)

For n > 1 the papers write floor((q - t) / n), under which a dropped token could come back: a stated departure.
Training decides with `sparse_rl.kernels.running_topk`, all queries at once.
"""

from __future__ import annotations

from sparse_rl.policies.base import Policy
from sparse_rl.policies.config import KVpopPolicyConfig


class KVpop(Policy):
    """Decides before the query attends, so that a kv head decodes with exactly `budget` entries."""

    config: KVpopPolicyConfig
    layered_parameters = True
