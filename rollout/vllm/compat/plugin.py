"""The plugin: registers our parts with vLLM, replaces some of vLLM's functions, undoes side effects on the caller.

*Log-probs that are not finite* end a request in the step that would sample from them; other requests continue. A worker
sends NOT_FINITE in place of the token (runner.py), and the scheduler ends the request (scheduler.py). The engine then
raises NotFiniteError (engine.py); the server answers with status 500.

*Experts*: on a CPU vLLM would pack their weights when it loads a model, and later updates would be written over the
packed copies, without any error.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from rollout.vllm.compat.arguments import on_cpu
from sparse_rl.experts import experts_forward
from sparse_rl.kernels.exact import padded

_registered = False


def register() -> None:
    global _registered
    if _registered:
        return
    _registered = True
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

    from rollout.vllm import scheduler
    from rollout.vllm.scheduler import CleanSpec, ContextManager, ContextSpec, EvictingManager, EvictingSpec

    scheduler.end_failed_requests()
    give_out_clean_blocks()
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # registers the built-in ones, which must come first
    managers = (CleanSpec, FullAttentionManager), (EvictingSpec, EvictingManager), (ContextSpec, ContextManager)
    for spec, manager in managers:
        register_kv_cache_spec(manager, FullAttentionSpec)(spec)
    if on_cpu():
        # The CPU platform supports no other backend. Without a policy of ours, it behaves like the stock one.
        register_backend(AttentionBackendEnum.CPU_ATTN, "rollout.vllm.compat.backend.EvictingCPUBackend")
        keep_weights_in_place()
        keep_experts_in_place()
    else:
        register_backend(AttentionBackendEnum.CUSTOM, "rollout.vllm.compat.backend.EvictingBackend")


# ---- what we change in vLLM ------------------------------------------------------------------------------------------


def give_out_clean_blocks() -> None:
    """Make vLLM clear the blocks of our cache specifications when it allocates them (`CleanSpec`)."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from rollout.vllm.scheduler import CleanSpec

    needed: Any = KVCacheConfig.needs_kv_cache_zeroing

    def needed_or_ours(self: KVCacheConfig) -> bool:
        return needed.fget(self) or any(isinstance(g.kv_cache_spec, CleanSpec) for g in self.kv_cache_groups)

    KVCacheConfig.needs_kv_cache_zeroing = property(needed_or_ours)  # type: ignore[assignment, method-assign]


def keep_weights_in_place() -> None:
    """Stop the CPU build from packing the weights of Linear layers: updates of weights would miss packed copies. A
    product with few rows is computed as one with many, as in the trainer: another kernel would round differently.
    """
    from vllm.model_executor.layers import utils

    dispatch: Any = utils.dispatch_cpu_unquantized_gemm

    @wraps(dispatch)
    def dispatch_in_place(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = lambda x, weight, bias: padded(lambda rows: F.linear(rows, weight, bias), x)
        else:
            dispatch(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch_in_place


# ---- the caller's process --------------------------------------------------------------------------------------------


@contextmanager
def undisturbed(had_group: bool) -> Iterator[None]:
    """Restore the state of the caller's process after an in-process engine is started or closed.

    vLLM seeds every random generator, and disables torch.set_num_threads on a CPU. When it closes, it destroys the
    caller's process group, if there was one (`had_group`); when it fails to start, it leaves its own behind. Without
    PYTHONSAFEPATH, the processes in which it inspects models would import our plugin from the working directory.
    """
    environment = {name: os.environ[name] for name in ("PYTHONSAFEPATH",) if name in os.environ}
    os.environ["PYTHONSAFEPATH"] = "1"
    states = random.getstate(), np.random.get_state()
    set_num_threads, destroy = torch.set_num_threads, distributed.destroy_process_group
    if had_group:
        distributed.destroy_process_group = lambda group=None: None if group is None else destroy(group)
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
        os.environ.update(environment)
        distributed.destroy_process_group = destroy
        torch.set_num_threads = set_num_threads
        random.setstate(states[0])
        np.random.set_state(states[1])


# ---- models, experts -------------------------------------------------------------------------------------------------


def keep_transformers_classes() -> None:
    """Stop vLLM's Transformers backend from replacing methods of transformers' classes, by which it compiles models, if
    engines run in this process.
    """
    from vllm import envs
    from vllm.model_executor.models.transformers.base import Base

    if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        Base._decorate_for_torch_compile = lambda self: None  # type: ignore[method-assign]


def keep_experts_in_place() -> None:
    """Stop the CPU build from packing the weights of experts; compute experts and their weights as the trainer does."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts, X86CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    plain: Any = CPUUnquantizedExperts
    plain.process_weights_after_loading = lambda self, layer: None
    plain._supports_grouped_gemm = classmethod(lambda cls, config: (True, None))
    plain.apply = _apply
    X86CPUUnquantizedExperts._supports_current_device = staticmethod(lambda: False)  # type: ignore[method-assign]
    cpu_router._softmax_topk = _softmax_topk


def _apply(
    self: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    *_: Any,
    **__: Any,
) -> None:
    """Compute experts in place of `CPUUnquantizedExperts.apply`; vLLM defines the signature."""
    assert activation.value == "silu", activation

    def gated(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up

    layer = SimpleNamespace(gate_up_proj=w1, down_proj=w2, _apply_gate=gated)
    output.copy_(experts_forward(layer, hidden_states, topk_ids, topk_weights))


def _softmax_topk(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose experts as transformers does, by the softmax over all experts."""
    weights, chosen = router_logits.softmax(-1, dtype=torch.float).topk(top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, chosen.to(torch.int32)
