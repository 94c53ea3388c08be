"""Creates an engine from its name, a model and a policy. Imports only the chosen engine's libraries."""

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
    """Create an engine from its name.

    kind : "hf" or "vllm"; use `default_engine()` if there is no reason to prefer one
    model : directory of a model or of a run; for hf also a live module
    policy : a policy, its configuration, a mapping {"policy": name, parameters...} or a name; None means the policy
        stored in the model's directory (cache_policy.json), or a full cache if none is stored
    options : dtype="float32", max_batch, progress, and other parameters of the engine (see HFEngine, VLLMEngine)

    Raises UserError if the engine, the policy or an option is unknown, if the engine is not installed, or if the engine
    cannot run the model.
    """
    if kind not in ENGINES:
        raise UserError(f"unknown engine {kind!r}; known: {', '.join(ENGINES)}")
    if kind not in SAMPLE_LIVE and not isinstance(model, (str, Path)):
        raise UserError(f"engine {kind!r} keeps its own weights: pass the directory of a model, or use the engine hf")
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
    if kind == "hf":
        from rollout.hf import HFEngine

        return HFEngine
    if importlib.util.find_spec("vllm") is None:
        raise UserError(f"engine 'vllm' is not installed: {INSTALL_VLLM}, or use the engine hf")
    from rollout.vllm.engine import VLLMEngine

    return VLLMEngine
