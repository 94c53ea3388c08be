"""Checks for settings and defaults of vLLM that would break eviction or its record. Each raises a one-line error."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from rollout.choice import CPU_HEAD_SIZES
from rollout.vllm.compat.arguments import CONNECTORS, CacheConfig, cache_config, on_cpu
from sparse_rl.attention.families import cache_shape, check_replayable, family_only_hf
from sparse_rl.errors import UserError
from sparse_rl.policies.base import Policy


def refuse_engine(policy: Policy, config: Any, sleep_mode: bool = False, otherwise: str = "") -> None:
    """Raise UserError for a policy, a model configuration or an allocator with which vLLM cannot sample.

    otherwise : end of the message, an alternative for the user
    """
    if policy.config.only_hf:
        raise UserError(f"{policy.name}: {policy.config.only_hf}{otherwise}", "cache.policy")
    if why := family_only_hf(config):
        raise UserError(f"{why}{otherwise}", "model")
    head_dim = cache_shape(config)[2]
    if on_cpu() and head_dim not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        raise UserError(f"vLLM on a CPU cannot run head size {head_dim} (it supports {sizes}){otherwise}")
    refuse_expandable_segments(policy, sleep_mode, otherwise)


def refuse_expandable_segments(policy: Policy, sleep_mode: bool, otherwise: str = "") -> None:
    """Raise UserError if PyTorch's allocator uses expandable segments, which vLLM does not support with a connector.

    Policies that do not evict need no connector. In sleep mode the cache has an allocator of its own.
    """
    chosen = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if chosen and policy.schedule.evicts and not sleep_mode and not on_cpu():
        raise UserError(
            "vLLM cannot evict under PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; unset the variable, "
            f"or turn sleep mode on{otherwise}"
        )


def refuse_unsupported(vllm_config: Any, full_graphs: bool = False) -> None:
    """Raise UserError for settings that break eviction or its record, including settings of a plain `vllm serve`."""
    from vllm import envs
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import is_quantized_kv_cache

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    scheduler, compilation = vllm_config.scheduler_config, vllm_config.compilation_config
    connector = getattr(vllm_config.kv_transfer_config, "kv_connector", "")
    context_parallel = max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size)
    graphs = compilation.cudagraph_mode != CUDAGraphMode.NONE
    wrong = {
        "on this platform: NVIDIA GPUs and CPUs only": not (current_platform.is_cuda() or current_platform.is_cpu()),
        "without its connector; set kv_connector to EvictionConnector": connector not in dict(CONNECTORS),
        "with prefix caching; set --no-enable-prefix-caching": cache.enable_prefix_caching,
        "with speculative decoding; turn it off": vllm_config.speculative_config is not None,
        "with asynchronous scheduling; set --no-async-scheduling": scheduler.async_scheduling,
        "without --scheduler-reserve-full-isl; set this flag": not scheduler.scheduler_reserve_full_isl,
        "with pipeline parallelism; set pipeline_parallel_size to 1": parallel.pipeline_parallel_size > 1,
        "with context parallelism; turn it off": context_parallel > 1,
        "with micro-batches; turn dual batch overlap off": parallel.use_ubatching,
        "with expert parallelism; set --no-enable-expert-parallel": parallel.enable_expert_parallel,
        "with more tensor-parallel ranks than kv heads, or heads that do not divide among them": (
            model.get_total_num_kv_heads() % parallel.tensor_parallel_size != 0
        ),
        "with latent (MLA), hybrid or encoder-decoder attention": (
            model.use_mla or model.is_hybrid or model.is_encoder_decoder
        ),
        "with a quantized cache; set --kv-cache-dtype auto": is_quantized_kv_cache(cache.cache_dtype),
        "with CUDA graphs of whole forwards; set cudagraph_mode to PIECEWISE": (
            graphs and compilation.cudagraph_mode.has_full_cudagraphs() and not full_graphs
        ),
        "with the K/V write inside CUDA graphs; leave splitting_ops and use_inductor_graph_partition alone": (
            graphs and "vllm::unified_kv_cache_update" not in (compilation.splitting_ops or ())
        ),
        "with breakable CUDA graphs; set VLLM_USE_BREAKABLE_CUDAGRAPH=0": graphs and envs.VLLM_USE_BREAKABLE_CUDAGRAPH,
    }
    for feature, is_set in wrong.items():
        if is_set:
            raise UserError(f"vLLM cannot evict {feature}")


def refuse_configuration(vllm_config: Any) -> None:
    """Raise UserError for settings that the engine's processes would refuse with a traceback.

    The model's configuration is checked again, because `--hf-overrides` may have changed it.
    """
    config = cache_config(vllm_config)
    if config is None or not (config.physical or config.exact):
        return
    if config.physical:
        refuse_unsupported(vllm_config, config.full_graphs)
    model = vllm_config.model_config
    check_replayable(model.hf_text_config, model.model)
    if why := family_only_hf(model.hf_text_config):
        raise UserError(why, "model")
    if vllm_config.cache_config.sliding_window is not None:
        raise UserError(_layer(config, "a sliding window"))
    if not getattr(model.hf_text_config, "is_causal", True):
        raise UserError(_layer(config, "attention to later tokens"))


def refuse_layer(impl: Any, config: CacheConfig) -> None:
    """Raise UserError for a layer with a feature that policies or the trainer's attention (exact.py) do not support."""
    wrong = {
        "a sliding window": impl.sliding_window not in (-1, (-1, -1)),
        "ALiBi": impl.alibi_slopes is not None,
        "attention sinks": impl.sinks is not None,
        "soft-capped logits": bool(impl.logits_soft_cap),
        "keys and values of another layer": impl.kv_sharing_target_layer_name is not None,
        f"{impl.attn_type} attention": impl.attn_type != "decoder",
    }
    for feature, is_set in wrong.items():
        if is_set:
            raise UserError(_layer(config, feature))


def _layer(config: CacheConfig, feature: str) -> str:
    if config.physical:
        return f"vLLM cannot evict from a layer with {feature}; use a full cache"
    return f"float32 on a CPU uses the trainer's attention, which does not support {feature}; set another dtype"


def refuse_spec(spec: Any) -> None:
    """Raise UserError for a layer that is not full attention: other caches may drop or pack entries."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    if type(spec) is not FullAttentionSpec or spec.head_size_v != spec.head_size:
        raise UserError(f"vLLM cannot evict from layers with a {type(spec).__name__}; use a full cache")
    if spec.kv_quant_mode != KVQuantMode.NONE:
        raise UserError("vLLM cannot evict from a quantized cache; set --kv-cache-dtype auto")


def refuse_cache(kv_cache_config: Any, kv_caches: dict[str, Tensor] | None = None) -> None:
    """Raise UserError for a cache with layers that are not BoundedSpec layers, or with blocks that a kernel splits."""
    from rollout.vllm.spec import BoundedSpec

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1 or not isinstance(specs[0], BoundedSpec):
        raise UserError("vLLM cannot evict: the attention backend is not ours; set --attention-backend CUSTOM")
    for cache in (kv_caches or {}).values():
        if (cache.shape[0], cache.shape[2]) != (kv_cache_config.num_blocks, specs[0].block_size):
            raise UserError(f"vLLM cannot evict from split blocks; set block_size to the kernel's {cache.shape[2]}")
