"""rollout: sampling under eviction, with recording.

    engine = make_engine("hf", model="path/to/model", policy={"policy": "gkv", "budget": 512})
    rollouts = engine.generate(prompts, SamplingConfig(max_tokens=1024, n=8, seed=0))

engine.py   the Engine protocol, SamplingConfig and the Rollout record
hf.py       the reference engine on plain transformers; cache.py its caches, sampling.py its sampler
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.engine import Engine, Rollout, SamplingConfig
from sparse_rl.models import saved_policy
from sparse_rl.policies import Policy, make_policy

ENGINES = ("hf",)


def make_engine(
    kind: str, *, model: Any, policy: Policy | Mapping[str, Any] | str | None = None, **options: Any
) -> Engine:
    """An engine by name.

    Parameters
    ----------
    kind : "hf"
    model : a directory, or for hf also a live module
    policy : a policy, a mapping {"policy": name, parameters...} or a name; None takes the one that the model's
        directory carries (cache_policy.json), else a full cache
    options : dtype="float32", and what the engine takes (hf: device, max_batch, progress)

    Raises
    ------
    ValueError
        Unknown engine, policy or parameter.
    """
    if kind not in ENGINES:
        raise ValueError(f"unknown engine {kind!r}; known: {', '.join(ENGINES)}")
    from rollout.hf import HFEngine

    accepted = set(inspect.signature(HFEngine.__init__).parameters) - {"self", "model", "policy"}
    if unknown := set(options) - accepted:
        raise ValueError(f"engine {kind!r} has no option {min(unknown)!r}; it takes {', '.join(sorted(accepted))}")
    if policy is None:
        policy = (saved_policy(model) if isinstance(model, (str, Path)) else None) or "full"
    return HFEngine(model, make_policy(policy), **options)


__all__ = ["ENGINES", "Engine", "Rollout", "SamplingConfig", "make_engine"]
