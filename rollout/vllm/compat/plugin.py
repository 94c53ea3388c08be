"""What is registered with vLLM and replaced in it, in each of its processes; what an engine must not leave behind."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from rollout.products import padded
from rollout.vllm.compat import processes
from rollout.vllm.compat.arguments import on_cpu
from rollout.vllm.compat.finite import refuse_what_is_not_finite
from rollout.vllm.compat.seeds import draw_seeded_requests

_registered = False


def register() -> None:
    """Make the backend, the specs and their managers known to vLLM, in this process."""
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
    refuse_input_sessions()
    give_out_clean_blocks()
    KVCacheSpecRegistry._ensure_registered()  # registering first would hide the built-in ones
    managers = (CleanSpec, FullAttentionManager), (EvictingSpec, EvictingManager), (ContextSpec, ContextManager)
    for spec, manager in managers:
        KVCacheSpecRegistry.register(spec, manager, uniform_type_base_spec=FullAttentionSpec)
    if on_cpu():
        # The CPU platform takes no other backend than CPU_ATTN; ours is the stock one where no policy is set.
        register_backend(AttentionBackendEnum.CPU_ATTN, "rollout.vllm.backend_cpu.EvictingCPUBackend")
        keep_weights_in_place()
        run_uncompiled()
    else:
        register_backend(AttentionBackendEnum.CUSTOM, "rollout.vllm.backend_cuda.EvictingBackend")


def give_out_clean_blocks() -> None:
    """Have vLLM clear the blocks of our specifications."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from rollout.vllm.spec import CleanSpec

    needed: Any = KVCacheConfig.needs_kv_cache_zeroing

    def needed_or_ours(self: KVCacheConfig) -> bool:
        return needed.fget(self) or any(isinstance(g.kv_cache_spec, CleanSpec) for g in self.kv_cache_groups)

    KVCacheConfig.needs_kv_cache_zeroing = property(needed_or_ours)  # type: ignore[assignment, method-assign]


def keep_weights_in_place() -> None:
    """Stop the CPU build from packing Linear weights away: updates would not reach the packed copies, silently."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils

    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    utils.cpu_unquantized_gemm = _linear


def run_uncompiled() -> None:
    """The rank of each sampled token, which nobody asks for, is worth no 20 seconds of compilation on a CPU."""
    from vllm.v1.sample import sampler

    compiled = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = getattr(compiled, "_torchdynamo_orig_callable", compiled)


def _linear(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What vLLM calls for every Linear on a CPU."""
    return padded(lambda rows: layer.cpu_linear(rows, weight, bias), x)


@contextmanager
def undisturbed(had_group: bool) -> Iterator[None]:
    """Starting and closing an in-process engine leaves the caller's process as it was.

    had_group : whether there was a process group before the engine was started

    vLLM seeds every random generator, forbids torch.set_num_threads on a CPU, and at its end destroys the process
    group, also one that it did not make; where it cannot start, it leaves the one that it made. The processes that it
    starts look at models first, and would import our plugin from the working directory.
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
        own = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=own):
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
