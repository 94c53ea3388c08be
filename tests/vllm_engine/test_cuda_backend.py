"""The evicting backends for GPUs, tested without a GPU: the choice of a backend, its refusals, and all code but the two
kernels, the K/V write and the attention. With torch in their place, the backends run on the CPU with their real
metadata, views of the cache and our mixins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ties import agrees_with_hf
from tiny import policy_of, random_prompts

from rollout import SamplingConfig
from rollout.vllm.compat import arguments, paged, plugin

LENGTHS = (5, 17, 33, 63, 64, 79, 80, 81, 130, 256, 450)
GREEDY = SamplingConfig(80, temperature=0, ignore_eos=True)


# ---- torch in place of the kernels ----------------------------------------------------------------------------------


def write(key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, *_: Any) -> None:
    """Stand in for reshape_and_cache_flash. Rows beyond the slots, and rows whose slot is -1, are padding."""
    real, size = slot_mapping >= 0, key_cache.shape[1]
    slots = slot_mapping[real]
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache[slots // size, slots % size] = new[: len(slot_mapping)][real]


def attend(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: int,
    seqused_k: Any,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: Any,
    **_: Any,
) -> None:
    """Stand in for flash_attn_varlen_func and unified_attention: causal attention over a paged cache."""
    assert causal
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert max_seqlen_k >= int(seqused_k.max())
    for i, held in enumerate(seqused_k.tolist()):
        rows = slice(*cu_seqlens_q[i : i + 2].tolist())
        if rows.start == rows.stop:  # padding of a graph's batch
            continue
        blocks = block_table[i, : -(-held // k.shape[1])].long()
        query, key, value = (
            t.transpose(0, 1).double() for t in (q[rows], *(c[blocks].flatten(0, 1)[:held] for c in (k, v)))
        )
        mask = torch.arange(held) <= torch.arange(held - query.shape[1], held)[:, None]
        attended = F.scaled_dot_product_attention(query, key, value, mask, scale=softmax_scale, enable_gqa=True)
        out[rows] = attended.transpose(0, 1).to(out.dtype)


@pytest.fixture
def use_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """use_backend("Flash" | "Triton") makes vLLM's CPU platform use that backend with torch's kernels from then on."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends import flash_attn, triton_attn
    from vllm.v1.attention.backends.registry import _ATTN_OVERRIDES, AttentionBackendEnum

    plugin.register()
    monkeypatch.setattr(paged, "keys_are_transposed", lambda: False)
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda **_: 2)
    monkeypatch.setattr(flash_attn, "reshape_and_cache_flash", write, raising=False)
    monkeypatch.setattr(flash_attn, "_FA4_DENSE_ATTENTION_KERNEL", attend)
    monkeypatch.setattr(triton_attn, "triton_reshape_and_cache_flash", write)
    monkeypatch.setattr(triton_attn, "unified_attention", attend)

    def use(kernels: str) -> None:
        path = f"rollout.vllm.compat.backend.Evicting{kernels}Backend"
        monkeypatch.setitem(_ATTN_OVERRIDES, AttentionBackendEnum.CPU_ATTN, path)

    selector._cached_get_attn_backend.cache_clear()
    yield use
    selector._cached_get_attn_backend.cache_clear()


@pytest.mark.parametrize("policy_name", ["gkv", "h2o", "am"])
@pytest.mark.parametrize("kernels", ["Flash", "Triton"])
@pytest.mark.few(2)
def test_backends_with_torchs_kernels_equal_the_reference_engine(
    kernels: str, policy_name: str, use_backend: Callable, open_engine: Callable
) -> None:
    """Prompts are read in chunks; tokens, traces and log-probs equal those of hf and of its replay."""
    use_backend(kernels)
    policy, prompts = policy_of(policy_name, budget=64, window=8, period=16), random_prompts(LENGTHS)
    engine = open_engine(policy, exact=False, max_num_batched_tokens=192)
    rollouts = engine.generate(prompts, GREEDY)
    layers = engine.llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    assert {type(layer.impl).__name__ for layer in layers} == {f"Evicting{kernels}Impl"}
    assert not paged.live_state().caches[0][0].is_contiguous()  # heads inside tokens, as on a GPU
    agrees_with_hf(policy, prompts, GREEDY, {kernels: rollouts})


# ---- the choice of a backend ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "version", "dtype", "head_size", "chosen"),
    [
        ((9, 0), 3, torch.bfloat16, 128, "EvictingFlashBackend"),
        ((8, 0), 2, torch.float16, 64, "EvictingFlashBackend"),
        ((9, 0), 3, torch.float32, 128, "EvictingTritonBackend"),
        ((7, 5), 2, torch.float16, 128, "EvictingTritonBackend"),
        ((8, 0), None, torch.bfloat16, 128, "EvictingTritonBackend"),
        ((8, 0), 2, torch.bfloat16, 100, "EvictingTritonBackend"),
        ((8, 0), 2, torch.bfloat16, 20, None),
    ],
)
def test_the_backend_is_chosen_by_gpu_dtype_and_head_size(
    capability: tuple, version: int | None, dtype: Any, head_size: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention for 16-bit dtypes if GPU (`version`) and head size allow it, else Triton, else a refusal."""
    from vllm.platforms.interface import DeviceCapability
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from rollout.vllm.compat import backend as backends

    monkeypatch.setattr(backends, "get_flash_attn_version", lambda: version)
    selector_config = AttentionSelectorConfig(head_size, dtype, "auto", None, use_kv_connector=True)
    backend = backends.EvictingBackend
    device = DeviceCapability(*capability)
    reasons = backend.validate_configuration(device_capability=device, **selector_config._asdict())
    assert (reasons == []) is (chosen is not None)
    if chosen:
        assert resolve_obj_by_qualname(".".join(backend.full_cls_name())).__name__ == chosen


@pytest.mark.parametrize("kernels", ["Flash", "Triton"])
def test_vllm_uses_no_unsupported_feature_by_default(kernels: str) -> None:
    """No graph of a whole forward pass, no cascade attention, no logical slots; and vLLM calls our K/V write."""
    from vllm.v1.attention.backend import AttentionCGSupport

    from rollout.vllm.compat import backend as backends

    backend = getattr(backends, f"Evicting{kernels}Backend")
    builder = backend.get_builder_cls()
    config = SimpleNamespace(additional_config={}, kv_transfer_config=None)
    assert builder.get_cudagraph_support(config, None) is AttentionCGSupport.NEVER
    assert not builder.supports_update_block_table
    assert not backend.forward_includes_kv_cache_update
    assert backend.get_impl_cls().do_kv_cache_update is backends.EvictingImpl.do_kv_cache_update
    assert backend.get_name() in ("FLASH_ATTN", "TRITON_ATTN")


@pytest.mark.parametrize("full_graphs", [False, True])
def test_vllm_accepts_the_arguments_for_a_gpu(full_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The K/V write is outside of graphs, unless whole decode steps are graphs. A full cache is left to vLLM."""
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, KVTransferConfig
    from vllm.v1.attention.backend import AttentionCGSupport

    from rollout.vllm.compat.backend import EvictingFlashBuilder
    from rollout.vllm.connector import EvictionConnector

    monkeypatch.setattr(arguments, "on_cpu", lambda: False)
    evicting = arguments.engine_arguments(policy_of("gkv", budget=64), dtype="bfloat16", full_graphs=full_graphs)
    assert evicting["attention_backend"] == "CUSTOM"
    assert not evicting["async_scheduling"]
    compilation = CompilationConfig(**evicting["compilation_config"])
    assert compilation.cudagraph_mode is CUDAGraphMode["FULL_AND_PIECEWISE" if full_graphs else "PIECEWISE"]
    assert not compilation.pass_config.fuse_rope_kvcache
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.set_splitting_ops_for_v1("allgather_reducescatter")
    assert "vllm::unified_kv_cache_update" in compilation.splitting_ops
    transfer = KVTransferConfig(**evicting["kv_transfer_config"])
    vllm_config = configuration(
        compilation_config=compilation, kv_transfer_config=transfer, additional_config=evicting["additional_config"]
    )
    support = EvictingFlashBuilder.get_cudagraph_support(vllm_config, None)
    assert support is AttentionCGSupport["UNIFORM_SINGLE_TOKEN_DECODE" if full_graphs else "NEVER"]
    extra = transfer.kv_connector_extra_config
    assert EvictionConnector.requires_piecewise_for_cudagraph(extra) is not full_graphs
    assert compilation.resolve_cudagraph_mode_and_sizes(support, "ours") is compilation.cudagraph_mode
    arguments.refuse_unsupported(vllm_config, full_graphs)
    full = arguments.engine_arguments(policy_of("full"), dtype="bfloat16")
    assert not {"attention_backend", "compilation_config", "kv_transfer_config"} & set(full)


# ---- refusals -------------------------------------------------------------------------------------------------------


PARALLEL = ("tensor_parallel", "pipeline_parallel", "decode_context_parallel", "prefill_context_parallel")


def configuration(**changes: Any) -> Any:
    """Return a vLLM configuration with which eviction works on a GPU; `changes` replace fields by dotted name."""
    from vllm.config import CompilationConfig

    compilation = CompilationConfig(cudagraph_mode="PIECEWISE", splitting_ops=["vllm::unified_kv_cache_update"])
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            use_mla=False, is_hybrid=False, is_encoder_decoder=False, get_total_num_kv_heads=lambda: 8
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=False, cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            **dict.fromkeys((f"{kind}_size" for kind in PARALLEL), 1),
            use_ubatching=False,
            enable_expert_parallel=False,
            worker_cls="rollout.vllm.worker.PolicyWorker",
        ),
        scheduler_config=SimpleNamespace(async_scheduling=False, scheduler_reserve_full_isl=True),
        kv_transfer_config=SimpleNamespace(kv_connector="EvictionConnector"),
        speculative_config=None,
        watermark_config=None,
        compilation_config=compilation,
    )
    for name, value in changes.items():
        part, _, key = name.partition(".")
        setattr(getattr(config, part) if key else config, key or part, value)
    return config


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cache_config.enable_prefix_caching", True, "prefix caching"),
        ("cache_config.cache_dtype", "fp8", "quantized cache"),
        ("cache_config.cache_dtype", "ultraquant_4bit", "quantized cache"),
        ("watermark_config", object(), "a watermark"),
        ("speculative_config", object(), "speculative decoding"),
        ("scheduler_config.async_scheduling", True, "asynchronous scheduling"),
        ("scheduler_config.scheduler_reserve_full_isl", False, "scheduler-reserve-full-isl"),
        ("parallel_config.pipeline_parallel_size", 2, "pipeline parallelism"),
        ("parallel_config.decode_context_parallel_size", 2, "context parallelism"),
        ("parallel_config.prefill_context_parallel_size", 2, "context parallelism"),
        ("parallel_config.use_ubatching", True, "micro-batches"),
        ("parallel_config.worker_cls", "vllm.v1.worker.gpu_worker.Worker", "its worker; set --worker-cls rollout"),
        ("parallel_config.tensor_parallel_size", 16, "kv heads"),
        ("model_config.use_mla", True, "MLA"),
        ("model_config.is_hybrid", True, "hybrid"),
        ("model_config.is_encoder_decoder", True, "encoder-decoder"),
        ("kv_transfer_config", None, "EvictionConnector"),
        ("kv_transfer_config.kv_connector", "MultiConnector", "EvictionConnector"),
        ("compilation_config.cudagraph_mode", "FULL_AND_PIECEWISE", "whole forwards"),
        ("compilation_config.splitting_ops", ["vllm::unified_attention_with_output"], "K/V write inside CUDA graphs"),
    ],
)
def test_unsupported_configurations_are_refused(name: str, value: Any, message: str) -> None:
    """`configuration()` is accepted. With one field changed, the error names the feature."""
    from vllm.config import CUDAGraphMode

    arguments.refuse_unsupported(configuration())
    value = CUDAGraphMode[value] if name.endswith("cudagraph_mode") else value
    with pytest.raises(ValueError, match=f"vLLM cannot evict .*{message}"):
        arguments.refuse_unsupported(configuration(**{name: value}))


def test_breakable_graphs_are_refused_and_eager_execution_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs
    from vllm.config import CUDAGraphMode

    monkeypatch.setattr(envs, "VLLM_USE_BREAKABLE_CUDAGRAPH", True, raising=False)
    with pytest.raises(ValueError, match="breakable CUDA graphs"):
        arguments.refuse_unsupported(configuration())
    eager = {"compilation_config.cudagraph_mode": CUDAGraphMode.NONE, "compilation_config.splitting_ops": []}
    arguments.refuse_unsupported(configuration(**eager))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sliding_window", (127, 0), "a sliding window"),
        ("sliding_window", 127, "a sliding window"),
        ("alibi_slopes", torch.ones(4), "ALiBi"),
        ("sinks", torch.ones(4), "attention sinks"),
        ("logits_soft_cap", 50.0, "soft-capped logits"),
        ("kv_sharing_target_layer_name", "model.layers.0", "keys and values of another layer"),
        ("attn_type", "encoder_only", "encoder_only attention"),
    ],
)
def test_unsupported_layers_are_refused(name: str, value: Any, message: str) -> None:
    supported = {"sliding_window": (-1, -1), "logits_soft_cap": 0, "attn_type": "decoder"}
    supported |= dict.fromkeys(("alibi_slopes", "sinks", "kv_sharing_target_layer_name"))
    refused = SimpleNamespace(**{**supported, name: value})
    for physical, prefix in ((True, "vLLM cannot evict from a layer with"), (False, "does not support")):
        config: Any = SimpleNamespace(physical=physical)
        arguments.refuse_layer(SimpleNamespace(**supported), config)
        with pytest.raises(ValueError, match=f"{prefix} {message}"):
            arguments.refuse_layer(refused, config)


def test_unsupported_caches_are_refused() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, SlidingWindowSpec

    from rollout.vllm import scheduler
    from rollout.vllm.scheduler import EvictingSpec
    from sparse_rl.policies.schedule import Schedule

    fields = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    scheduler.refuse_spec(FullAttentionSpec(**fields))
    for spec, message in (
        (SlidingWindowSpec(**fields, sliding_window=128), "SlidingWindowSpec"),
        (FullAttentionSpec(**fields, head_size_v=32), "FullAttentionSpec"),
        (FullAttentionSpec(**fields, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR), "quantized cache"),
    ):
        with pytest.raises(ValueError, match=message):
            scheduler.refuse_spec(spec)

    our_group = SimpleNamespace(kv_cache_spec=EvictingSpec(**fields, schedule=Schedule(64)))
    vllm_group = SimpleNamespace(kv_cache_spec=FullAttentionSpec(**fields))
    whole_blocks, split_blocks = torch.empty(8, 2, 16, 128), torch.empty(16, 2, 8, 128)
    scheduler.refuse_cache(SimpleNamespace(kv_cache_groups=[our_group], num_blocks=8), {"a": whole_blocks})
    with pytest.raises(ValueError, match="split blocks; set block_size to the kernel's 8"):
        scheduler.refuse_cache(SimpleNamespace(kv_cache_groups=[our_group], num_blocks=8), {"a": split_blocks})
    for groups in ([vllm_group], [our_group, vllm_group], []):
        with pytest.raises(ValueError, match="attention backend is not ours"):
            scheduler.refuse_cache(SimpleNamespace(kv_cache_groups=groups, num_blocks=8))
