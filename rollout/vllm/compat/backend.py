"""vLLM's attention backends, changed for eviction by three mixins: builder, implementation and backend.

A request's physical length and slots are those of the entries that it holds; its logical length and positions count all
its tokens. The backend receives physical lengths and slots, and passes the queries to the cache state (state.py). RoPE
positions stay logical. With the option `exact`, float32 attention on a CPU is computed as in the trainer.

The backends on NVIDIA GPUs are FlashAttention, or vLLM's Triton kernels if FlashAttention cannot run. Both keep their
stock names, because vLLM distinguishes kernels by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from rollout.vllm.compat import arguments, paged
from rollout.vllm.memory import wide_head
from rollout.vllm.scheduler import CleanSpec, ContextSpec, EvictingSpec, refuse_spec
from rollout.vllm.state import Fixed
from sparse_rl.policies.schedule import NEVER


class EvictingBuilder:
    """Mixin for a metadata builder: replaces logical lengths and slots by physical ones, at fixed addresses, which a
    CUDA graph of a whole decode step reads.
    """

    supports_update_block_table = False  # an update would put logical slots into our metadata

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scheduler, device = self.vllm_config.scheduler_config, self.device  # type: ignore[attr-defined]
        self.fixed = Fixed(scheduler.max_num_seqs)
        self.slots = torch.zeros(scheduler.max_num_batched_tokens, dtype=torch.long, device=device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Allow CUDA graphs of whole forward passes only with `full_graphs`; otherwise Python runs in every layer."""
        config = arguments.cache_config(vllm_config)
        whole = config is not None and config.full_graphs
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if whole else AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        state = paged.live_state()
        if state is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        common = common_attn_metadata
        seen, starts = common.seq_lens, [common.query_start_loc, common.query_start_loc_cpu]
        rows = len(seen)
        if int(starts[1][-1]) < rows:  # padding of a graph is treated as requests with one token, in the null block
            starts = [torch.arange(rows + 1, dtype=torch.int32, device=start.device) for start in starts]
            seen = seen.clamp(min=1)
        plan = state.make_plan(common.block_table_tensor, seen, *starts)
        state.stay(plan, self.fixed)
        lengths = self.fixed.copy("lengths", plan.lengths.int(), rows)
        slots = self.slots[: len(common.slot_mapping)].copy_(common.slot_mapping)  # may be padded at the end
        slots[: len(plan.slots)] = plan.slots
        longest = state.longest(common.max_seq_len, common.max_query_len)
        physical = common.replace(seq_lens=lengths, slot_mapping=slots, max_seq_len=longest)
        return super().build(common_prefix_len, physical, fast_build)  # type: ignore[misc]


class EvictingImpl:
    """Mixin for an attention implementation: writes to physical slots, and passes the queries to the cache state."""

    config: arguments.CacheConfig | None = None  # settings of the engine whose model was built last in this process
    longest = NEVER  # maximum number of tokens in a sequence of this engine
    head_size: int
    wide = 0  # the head size of the cache if its heads also store biases (`paged.widened`), else 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        EvictingImpl.config = config = arguments.cache_config(vllm_config)
        EvictingImpl.longest = vllm_config.model_config.max_model_len
        if config is not None and (config.physical or config.exact):
            arguments.refuse_layer(self, config)
        if config is not None and config.physical:
            arguments.refuse_unsupported(vllm_config, config.full_graphs)
            if config.folds:
                # the stock implementations use their head size to separate keys from values
                self.head_size = self.wide = wide_head(self.head_size, arguments.on_cpu())

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        # vLLM passes the forward context's slots, which are logical; the metadata holds our physical slots
        metadata: Any = get_forward_context().attn_metadata
        state = paged.live_state()
        if state is not None and metadata is not None:
            if state.arrive(layer.layer_name, key, value):
                return
            slot_mapping = metadata[layer.layer_name].slot_mapping
        if self.wide:
            key, value = (paged.widened(heads, self.wide) for heads in (key, value))
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]

    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        m, config, state, stock = attn_metadata, EvictingImpl.config, paged.live_state(), super().forward  # type: ignore[misc]
        if m is None:
            return stock(layer, query, key, value, kv_cache, m, output, *args, **kwargs)
        scale: float = self.scale  # type: ignore[attr-defined]
        if config is not None and config.exact:
            keys, values = paged.key_value_views(kv_cache, transposed=True)
            q, out = (x[: m.num_actual_tokens] for x in (query, output.view(query.shape)))
            bias = None if state is None else state.bias(layer.layer_name)
            paged.attend(q, keys, values, m.block_table, m.seq_lens, m.query_start_loc, scale, out, bias)
        elif self.wide:
            coordinates = zip((query, key, value), (1 / scale, 0.0, 0.0), strict=True)
            wide_heads = [paged.widened(heads, self.wide, coordinate) for heads, coordinate in coordinates]
            out = stock(layer, *wide_heads, kv_cache, m, torch.zeros_like(wide_heads[0]), *args, **kwargs)
            output.view(query.shape).copy_(out.view(wide_heads[0].shape)[..., : query.shape[-1]])
        else:
            output = stock(layer, query, key, value, kv_cache, m, output, *args, **kwargs)
        if state is not None:
            state.after_layer(layer.layer_name, query)
        return output


class EvictingNames:
    builder: ClassVar[type]
    impl: ClassVar[type]

    @classmethod
    def get_builder_cls(cls) -> type:
        return cls.builder

    @classmethod
    def get_impl_cls(cls) -> type:
        return cls.impl

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        config = EvictingImpl.config
        if config is None:
            return spec
        if not config.physical:
            return CleanSpec.of(spec) if type(spec) is FullAttentionSpec else spec
        refuse_spec(spec)
        if config.folds:
            wide = wide_head(spec.head_size, arguments.on_cpu())
            spec = replace(spec, head_size=wide, head_size_v=wide)
        if config.contexts is not None:
            return ContextSpec.of(spec, most=config.most)
        schedule, longest = config.policy.schedule, EvictingImpl.longest
        return EvictingSpec.of(spec, schedule=schedule, max_prompt=config.max_prompt, longest=longest)


class EvictingCPUBuilder(EvictingBuilder, CPUAttentionMetadataBuilder):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.isa == "amx":  # our code cannot read the packed layout of keys for AMX
            self.isa = "vec"
            self._set_isa_to_layers(self.layer_names)


class EvictingCPUImpl(EvictingImpl, CPUAttentionBackendImpl): ...


class EvictingCPUBackend(EvictingNames, CPUAttentionBackend):
    builder, impl = EvictingCPUBuilder, EvictingCPUImpl


class EvictingFlashBuilder(EvictingBuilder, FlashAttentionMetadataBuilder): ...


class EvictingFlashImpl(EvictingImpl, FlashAttentionImpl): ...


class EvictingFlashBackend(EvictingNames, FlashAttentionBackend):
    builder, impl = EvictingFlashBuilder, EvictingFlashImpl

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return super().supports_compute_capability(capability) and get_flash_attn_version() is not None


class EvictingTritonBuilder(EvictingBuilder, TritonAttentionMetadataBuilder): ...


class EvictingTritonImpl(EvictingImpl, TritonAttentionImpl): ...


class EvictingTritonBackend(EvictingNames, TritonAttentionBackend):
    builder, impl = EvictingTritonBuilder, EvictingTritonImpl


class EvictingBackend(AttentionBackend):
    """The backend registered as CUSTOM: EvictingFlashBackend if that accepts a layer's configuration, which vLLM
    validates before it asks for the backend's name, else EvictingTritonBackend.
    """

    chosen: ClassVar[type[AttentionBackend]]

    @classmethod
    def validate_configuration(cls, **configuration: Any) -> list[str]:  # type: ignore[override]
        for backend in (EvictingFlashBackend, EvictingTritonBackend):
            cls.chosen = backend
            reasons = backend.validate_configuration(**configuration)
            if not reasons:
                break
        return reasons

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        return cls.chosen.full_cls_name()
