"""Registers our parts with vLLM and replaces some of vLLM's functions; undoes vLLM's side effects on the caller."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from rollout.vllm.compat import processes
from rollout.vllm.compat.arguments import on_cpu
from rollout.vllm.compat.experts import keep_experts_in_place
from rollout.vllm.compat.finite import refuse_what_is_not_finite
from rollout.vllm.compat.models import correct_models
from rollout.vllm.compat.seeds import draw_seeded_requests
from sparse_rl.kernels.products import padded

_registered = False


def register() -> None:
    """Install our parts in vLLM, in this process."""
    global _registered
    if _registered:
        return
    _registered = True
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from rollout.vllm.compat.clients import refuse_input_sessions
    from rollout.vllm.context_spec import ContextManager, ContextSpec
    from rollout.vllm.spec import CleanSpec, EvictingManager, EvictingSpec

    processes.watch_from_the_start()
    refuse_what_is_not_finite()
    draw_seeded_requests()
    correct_models()
    refuse_input_sessions()
    give_out_clean_blocks()
    KVCacheSpecRegistry._ensure_registered()  # if our specifications came first, the built-in ones would be missing
    managers = (CleanSpec, FullAttentionManager), (EvictingSpec, EvictingManager), (ContextSpec, ContextManager)
    for spec, manager in managers:
        KVCacheSpecRegistry.register(spec, manager, uniform_type_base_spec=FullAttentionSpec)
    if on_cpu():
        # The CPU platform supports no other backend. Without a policy of ours, it behaves like the stock one.
        register_backend(AttentionBackendEnum.CPU_ATTN, "rollout.vllm.backend_cpu.EvictingCPUBackend")
        keep_weights_in_place()
        keep_experts_in_place()
        run_uncompiled()
    else:
        register_backend(AttentionBackendEnum.CUSTOM, "rollout.vllm.backend_cuda.EvictingBackend")


def give_out_clean_blocks() -> None:
    """Make vLLM clear the blocks of our cache specifications when it allocates them (`CleanSpec`)."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from rollout.vllm.spec import CleanSpec

    needed: Any = KVCacheConfig.needs_kv_cache_zeroing

    def needed_or_ours(self: KVCacheConfig) -> bool:
        return needed.fget(self) or any(isinstance(g.kv_cache_spec, CleanSpec) for g in self.kv_cache_groups)

    KVCacheConfig.needs_kv_cache_zeroing = property(needed_or_ours)  # type: ignore[assignment, method-assign]


def keep_weights_in_place() -> None:
    """Stop the CPU build from packing the weights of Linear layers: updates of weights would miss packed copies."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils

    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    utils.cpu_unquantized_gemm = _linear


def run_uncompiled() -> None:
    """Do not compile the ranking of sampled tokens on a CPU: compiling takes 20 seconds, and the ranks are not used."""
    from vllm.v1.sample import sampler

    compiled = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = getattr(compiled, "_torchdynamo_orig_callable", compiled)


def _linear(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a Linear layer on a CPU, with padded rows (sparse_rl/kernels/products.py)."""
    return padded(lambda rows: layer.cpu_linear(rows, weight, bias), x)


@contextmanager
def undisturbed(had_group: bool) -> Iterator[None]:
    """Restore the state of the caller's process after an in-process engine is started or closed.

    had_group : True if there was a process group before the engine was started

    vLLM seeds every random generator, and disables torch.set_num_threads on a CPU. When vLLM closes, it destroys the
    caller's process group; when it fails to start, it leaves its own group behind. vLLM inspects models in separate
    processes; without PYTHONSAFEPATH, these processes would import our plugin from the working directory.
    """
    safe_path = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    states = random.getstate(), np.random.get_state()
    set_num_threads, destroy = torch.set_num_threads, distributed.destroy_process_group

    def destroy_theirs(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    if had_group:
        distributed.destroy_process_group = destroy_theirs
    try:
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=devices):
            yield
    except BaseException:
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        raise
    finally:
        os.environ.pop("PYTHONSAFEPATH")
        if safe_path is not None:
            os.environ["PYTHONSAFEPATH"] = safe_path
        distributed.destroy_process_group = destroy
        torch.set_num_threads = set_num_threads
        random.setstate(states[0])
        np.random.set_state(states[1])
