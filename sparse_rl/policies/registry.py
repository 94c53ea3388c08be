"""How a cache policy is made, and told apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sparse_rl.methods.config import PolicyConfig
from sparse_rl.policies.base import Policy


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
    made: Policy = policy.part("policy")(policy)
    return made


def fingerprint(policy: Policy) -> str:
    """The policy as one canonical JSON line, for trace files and checkpoints."""
    return json.dumps(policy.config.as_block(), sort_keys=True)
