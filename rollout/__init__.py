"""rollout: sampling under eviction, with recording.

    engine = make_engine("hf", model="path/to/model", policy={"policy": "gkv", "budget": 512})
    rollouts = engine.generate(prompts, SamplingConfig(max_tokens=1024, n=8, seed=0))

engine.py   the Engine protocol, SamplingConfig and the Rollout record
hf.py       the reference engine on plain transformers; cache.py its caches, sampling.py its sampler
vllm/       the fast engine, which keeps its own copy of the weights
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.engine import Engine, Rollout, SamplingConfig
from sparse_rl.engines import default_engine
from sparse_rl.models.directory import saved_policy
from sparse_rl.policies import Policy, make_policy, sampled_under

ENGINES = ("hf", "vllm")


def make_engine(
    kind: str, *, model: Any, policy: Policy | Mapping[str, Any] | str | None = None, **options: Any
) -> Engine:
    """An engine by name.

    Parameters
    ----------
    kind : "hf" or "vllm"; `default_engine()` is the one to take where there is no reason for the other
    model : a directory, or for hf also a live module
    policy : a policy, a mapping {"policy": name, parameters...} or a name; None takes the one that the model's
        directory carries (cache_policy.json), else a full cache
    options : dtype="float32", max_batch, progress, and what else the engine takes (see HFEngine, VLLMEngine)

    Raises
    ------
    ValueError
        Unknown engine, policy or parameter; an engine that is not installed or does not take the model.
    """
    if kind not in ENGINES:
        raise ValueError(f"unknown engine {kind!r}; known: {', '.join(ENGINES)}")
    if kind == "vllm" and not isinstance(model, (str, Path)):
        raise ValueError("engine 'vllm' keeps its own weights: give it a model's directory, or use the engine hf")
    engine = _engine(kind)
    accepted = set(inspect.signature(engine.__init__).parameters) - {"self", "model", "policy"}
    if unknown := set(options) - accepted:
        raise ValueError(f"engine {kind!r} has no option {min(unknown)!r}; it takes {', '.join(sorted(accepted))}")
    if policy is None:
        policy = (saved_policy(model) if isinstance(model, (str, Path)) else None) or "full"
    return engine(model, sampled_under(make_policy(policy)), **options)


def _engine(kind: str) -> Any:
    """An engine's class, with its libraries imported."""
    if kind == "hf":
        from rollout.hf import HFEngine

        return HFEngine
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("engine 'vllm' is not installed: pip install \"sparse-rl[vllm]\", or use the engine hf")
    from rollout.vllm.engine import VLLMEngine

    return VLLMEngine


__all__ = ["ENGINES", "Engine", "Rollout", "SamplingConfig", "default_engine", "make_engine"]
