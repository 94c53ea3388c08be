"""The policies by name; how one is made, and told apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sparse_rl.policies.am import AM
from sparse_rl.policies.base import Policy
from sparse_rl.policies.clustered import Clustered
from sparse_rl.policies.config import LayeredConfig, PolicyConfig
from sparse_rl.policies.dms import DMS
from sparse_rl.policies.full import Full
from sparse_rl.policies.h2o import H2O
from sparse_rl.policies.kvpop import KVpop
from sparse_rl.policies.layered import Layered
from sparse_rl.policies.lined import Lined
from sparse_rl.policies.scored_window import CAKE, GKV, RKV, MorphKV, SnapKV
from sparse_rl.policies.streaming import Streaming
from sparse_rl.policies.tova import Tova

POLICIES: dict[str, type[Policy]] = {
    "full": Full,
    "streaming": Streaming,
    "h2o": H2O,
    "lined": Lined,
    "tova": Tova,
    "snapkv": SnapKV,
    "morphkv": MorphKV,
    "rkv": RKV,
    "gkv": GKV,
    "cake": CAKE,
    "am": AM,
    "kvpop": KVpop,  # this and the next are retrofitted to a model (trainer/kvpop/)
    "dms": DMS,
    "clustered": Clustered,
    "layered": Layered,
}


def make_policy(policy: str | Policy | PolicyConfig | Mapping[str, Any], /, **parameters: Any) -> Policy:
    """A policy from its name and parameters, a mapping {"policy": name, ...}, or its settings; a policy as it is.

    A mapping without a name is a full cache.

    Raises
    ------
    UserError
        See `PolicyConfig.from_block`.
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, PolicyConfig):
        block = policy if isinstance(policy, Mapping) else {"policy": policy}
        policy = PolicyConfig.from_block({"policy": "full", **block, **parameters})
    if isinstance(policy, LayeredConfig):
        return Layered(policy, [make_policy(part.cache) for part in policy.ranges])
    return POLICIES[policy.name](policy)


def fingerprint(policy: Policy) -> str:
    """The policy as one canonical JSON line, for trace files and checkpoints."""
    return json.dumps(policy.config.as_block(), sort_keys=True)
