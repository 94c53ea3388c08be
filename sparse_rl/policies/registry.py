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
"""The class of each cache policy, by the name that recipes give it."""


def make_policy(policy: str | Policy | PolicyConfig | Mapping[str, Any], /, **parameters: Any) -> Policy:
    """A cache policy, made of a description; a policy is returned as it is.

    policy : a name, a mapping {"policy": name, its parameters} (without a name it is a full cache), or the settings
    parameters : further parameters of a name or a mapping, which count before those of the mapping

    Raises
    ------
    UserError
        An unknown policy or parameter, a missing budget, or a value that breaks a parameter's rule.
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
