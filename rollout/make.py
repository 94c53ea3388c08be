"""make_engine: an engine by its name, a model and a policy. The engines' libraries are imported only when asked for."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.config import ENGINES, SAMPLE_LIVE
from rollout.engine import Engine
from sparse_rl.errors import UserError, listed
from sparse_rl.methods.config import PolicyConfig
from sparse_rl.models.directory import model_directory, saved_policy
from sparse_rl.policies.base import Policy
from sparse_rl.policies.registry import make_policy
from sparse_rl.source import INSTALL_VLLM


def make_engine(
    kind: str, *, model: Any, policy: Policy | PolicyConfig | Mapping[str, Any] | str | None = None, **options: Any
) -> Engine:
    """An engine by name.

    Parameters
    ----------
    kind : "hf" or "vllm"; `default_engine()` is the one to take where there is no reason for the other
    model : the directory of a model or of a run, or for hf also a live module
    policy : a policy, its configuration, a mapping {"policy": name, parameters...} or a name; None takes the one that
        the model's directory carries (cache_policy.json), else a full cache
    options : dtype="float32", max_batch, progress, and what else the engine takes (see HFEngine, VLLMEngine)

    Raises
    ------
    UserError
        Unknown engine, policy or parameter; an engine that is not installed or does not take the model.
    """
    if kind not in ENGINES:
        raise UserError(f"unknown engine {kind!r}; known: {', '.join(ENGINES)}")
    if kind not in SAMPLE_LIVE and not isinstance(model, (str, Path)):
        raise UserError(f"engine {kind!r} keeps its own weights: give it a model's directory, or use the engine hf")
    if isinstance(model, (str, Path)):
        model = model_directory(str(model))
    engine = engine_class(kind)
    accepted = set(inspect.signature(engine.__init__).parameters) - {"self", "model", "policy"}
    if unknown := set(options) - accepted:
        raise UserError(
            f"engine {kind!r} has no option {min(unknown)!r}; it takes {listed(sorted(accepted), min(unknown))}"
        )
    if policy is None:
        policy = (saved_policy(model) if isinstance(model, (str, Path)) else None) or "full"
    return engine(model, make_policy(policy), **options)


def engine_class(kind: str) -> Any:
    """The class of one of ENGINES, with its libraries imported."""
    if kind == "hf":
        from rollout.hf import HFEngine

        return HFEngine
    if importlib.util.find_spec("vllm") is None:
        raise UserError(f"engine 'vllm' is not installed: {INSTALL_VLLM}, or use the engine hf")
    from rollout.vllm.engine import VLLMEngine

    return VLLMEngine
