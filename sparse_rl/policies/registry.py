"""Functions that make a cache policy from a description, and the fingerprint of a policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sparse_rl.methods.config import PolicyConfig
from sparse_rl.policies.base import Policy


def make_policy(policy: str | Policy | PolicyConfig | Mapping[str, Any], /, **parameters: Any) -> Policy:
    """Make a cache policy from a description; a policy object is returned unchanged.

    policy : a name; or the settings; or a mapping {"policy": name, its parameters}, where no name means a full cache
    parameters : further parameters for a name or a mapping; they override the parameters in the mapping

    Raises UserError for an unknown policy or parameter, a missing budget, or a value that breaks a parameter's rule.
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, PolicyConfig):
        block = policy if isinstance(policy, Mapping) else {"policy": policy}
        policy = PolicyConfig.from_block({"policy": "full", **block, **parameters})
    instance: Policy = policy.part("policy")(policy)
    return instance


def fingerprint(policy: Policy) -> str:
    """Return the policy as one canonical JSON line, for trace files and checkpoints."""
    return json.dumps(policy.config.as_block(), sort_keys=True)
