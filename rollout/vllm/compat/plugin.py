"""The plugin: registers our parts with vLLM, replaces some of vLLM's functions, undoes side effects on the caller.

*Log-probs that are not finite* end a request in the step that would sample from them; other requests continue. In place
of the token, a worker sends NOT_FINITE, which needs no further copy from the device. The scheduler ends the request
(scheduler.py). The engine then raises NotFiniteError (engine.py); the server answers with status 500.

*Experts*: vLLM's own record of routed experts (`enable_return_routed_experts`) needs prefix caching and vLLM's second
model runner, which eviction excludes; ours uses the routers' `capture_fn`. On a CPU vLLM would pack the experts'
weights when it loads a model, and later updates would be written over the packed copies, without any error.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from rollout.vllm.compat.arguments import KEY, on_cpu
from rollout.vllm.compat.paged import live_state
from rollout.vllm.sampling import NOT_FINITE, SeededSampler
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

    refuse_what_is_not_finite()
    scheduler.end_failed_requests()
    draw_seeded_requests()
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


# ---- log-probs that are not finite -----------------------------------------------------------------------------------


def refuse_what_is_not_finite() -> None:
    """Make vLLM's V1 runner send NOT_FINITE for requests whose log-probs are not finite, in engines of ours."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample_tokens: Any = GPUModelRunner.sample_tokens
    sample = GPUModelRunner._sample

    @wraps(sample_tokens)
    def look_and_sample_tokens(self: Any, grammar_output: Any) -> Any:
        """Check the model's logits before a grammar writes -inf into them."""
        state = self.execute_model_state
        ours = KEY in (self.vllm_config.additional_config or {})
        self.not_finite = not_finite(state.logits) if ours and state is not None and state.logits is not None else None
        return sample_tokens(self, grammar_output)

    @wraps(sample)
    def sample_or_mark(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample(self, *args, **kwargs)
        if self.not_finite is not None:
            output.sampled_token_ids.masked_fill_(self.not_finite[:, None], NOT_FINITE)
        return output

    GPUModelRunner.sample_tokens = look_and_sample_tokens  # type: ignore[assignment, method-assign]
    GPUModelRunner._sample = sample_or_mark  # type: ignore[method-assign]


def not_finite(logits: Tensor) -> Tensor:
    """Return bool [B]: True for a request whose logits [B, V] have NaN, +inf or only -inf, or with a NaN score of the
    policy.
    """
    failed = ~logits.amax(-1).isfinite()
    state = live_state()
    return failed if state is None else failed | state.failed_rows(len(logits))


# ---- a server's seeds, models, experts -------------------------------------------------------------------------------


def draw_seeded_requests() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    init: Any = GPUModelRunner.__init__

    @wraps(init)
    def init_with_sampler(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if KEY in (self.vllm_config.additional_config or {}):
            self.sampler.topk_topp_sampler = SeededSampler(self, self.sampler.topk_topp_sampler)

    GPUModelRunner.__init__ = init_with_sampler  # type: ignore[method-assign]


def keep_transformers_classes() -> None:
    """Stop vLLM's Transformers backend from replacing methods of transformers' classes, by which it compiles models, if
    engines run in this process.
    """
    from vllm import envs
    from vllm.model_executor.models.transformers.base import Base

    if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        Base._decorate_for_torch_compile = lambda self: None  # type: ignore[method-assign]


def capture(runner: Any) -> Tensor | None:
    """Let the routers of a worker's model record their choices. Returns the experts that the tokens of a step take,
    int16 [tokens, layers, K], -1 in layers without experts, at an address into which a CUDA graph can write; None for a
    model without experts.

    Call this after the model is loaded, and before vLLM compiles it or captures CUDA graphs. On a GPU, fused kernels
    that choose experts themselves would not be recorded; `moe_backend: triton` (arguments.py) excludes them.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    layers = [module for module in runner.model.modules() if isinstance(module, MoERunner)]
    if not layers:
        return None
    model, tokens = runner.model_config, runner.vllm_config.scheduler_config.max_num_batched_tokens
    sizes = tokens, model.get_total_num_hidden_layers(), model.get_num_experts_per_tok()
    captured = torch.full(sizes, -1, dtype=torch.int16, device=runner.device)

    def take(layer: int, experts: Tensor) -> None:
        captured[: len(experts), layer] = experts.to(torch.int16)

    for module in layers:
        module.router.set_capture_fn(partial(take, module.layer_id))
    return captured


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
