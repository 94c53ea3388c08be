"""The policies by name, and what is done with one as a whole: make it, tell it apart, ask whether engines take it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from sparse_rl.errors import did_you_mean
from sparse_rl.policies.base import Policy
from sparse_rl.policies.full import Full
from sparse_rl.policies.h2o import H2O
from sparse_rl.policies.kvpop import KVpop
from sparse_rl.policies.scored_window import CAKE, GKV, RKV, MorphKV, SnapKV
from sparse_rl.policies.streaming import Streaming
from sparse_rl.policies.tova import Tova

POLICIES: dict[str, type[Policy]] = {
    "full": Full,
    "streaming": Streaming,
    "h2o": H2O,
    "tova": Tova,
    "snapkv": SnapKV,
    "morphkv": MorphKV,
    "rkv": RKV,
    "gkv": GKV,
    "cake": CAKE,
}
LEARNED: dict[str, type[Policy]] = {
    "kvpop": KVpop
}  # retrofitted to a model (trainer/kvpop.py); no engine samples so yet


def make_policy(name: str | Policy | Mapping[str, Any], /, **parameters: Any) -> Policy:
    """A policy from its name and parameters, or from a mapping {"policy": name, ...}; a policy is returned as it is.

    Raises
    ------
    ValueError
        Unknown name or parameter (with the nearest valid one), missing budget, or a value out of range: one line.
    """
    if isinstance(name, Policy):
        return name
    if isinstance(name, Mapping):
        block = {**name, **parameters}
        return make_policy(block.pop("policy", "full"), **block)
    known = {**POLICIES, **LEARNED}
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"unknown cache policy {name!r}{did_you_mean(str(name), known)}; known: {', '.join(known)}")
    accepted = [p for p in inspect.signature(known[name].__init__).parameters if p != "self"]
    for key in parameters:
        if key not in accepted:
            takes = f"takes {', '.join(accepted)}" if accepted else "takes no parameters"
            raise ValueError(f"cache policy {name!r} has no parameter {key!r}{did_you_mean(key, accepted)}; it {takes}")
    if "budget" in accepted and "budget" not in parameters:
        raise ValueError(f"cache policy {name!r} needs a budget: the entries to keep per kv head")
    return known[name](**parameters)


def sampled_under(policy: Policy) -> Policy:
    """The policy, if engines can sample under it; else ValueError, in one line."""
    if policy.schedule.before_attending:
        mend = "it decides before a query attends; name another policy, for example full"
        raise ValueError(f"no engine samples under {policy.name} yet: {mend}")
    return policy


def fingerprint(policy: Policy) -> str:
    """The policy as one canonical JSON line, for trace files and checkpoints."""
    return json.dumps({"policy": policy.name, **policy.parameters()}, sort_keys=True)
