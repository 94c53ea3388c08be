"""The attention backend under eviction: vLLM's own kernels, at physical lengths and slots.

`EvictingBuilder` and `EvictingImpl` are mixed into a stock backend's two parts; here for the CPU, in backend_cuda.py
for FlashAttention and Triton. RoPE positions stay logical. Without a policy all of it is the stock backend.
"""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from rollout.vllm import compat
from rollout.vllm.exact import attend
from rollout.vllm.spec import EvictingSpec
from sparse_rl.policies import fingerprint


class EvictingBuilder:
    """Mixed into a metadata builder: physical lengths and slots instead of logical ones."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        state = compat.live_state()
        if state is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        common = common_attn_metadata
        plan = state.make_plan(
            common.block_table_tensor, common.seq_lens, common.query_start_loc, common.query_start_loc_cpu
        )
        slots = common.slot_mapping.clone()  # may be padded behind
        slots[: len(plan.slots)] = plan.slots
        longest = int(plan.lengths.max()) if plan.lengths.device.type == "cpu" else common.max_seq_len
        physical = common.replace(seq_lens=plan.lengths, slot_mapping=slots, max_seq_len=longest)
        return super().build(common_prefix_len, physical, fast_build)  # type: ignore[misc]


class EvictingImpl:
    """Mixed into an implementation: writes at physical slots, and hands the queries out."""

    config: compat.CacheConfig | None = None  # of the engine whose model was built last in this process

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        EvictingImpl.config = compat.cache_config(get_current_vllm_config())

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        # The slots that vLLM hands over come from the forward context and are logical; those of the metadata are ours.
        if compat.live_state() is not None:
            metadata = get_forward_context().attn_metadata
            if isinstance(metadata, dict):
                slot_mapping = metadata[layer.layer_name].slot_mapping
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        out = super().forward(layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)  # type: ignore[misc]
        state = compat.live_state()
        if state is not None and attn_metadata is not None:
            state.after_layer(layer.layer_name, query)
        return out


def evicting_spec(spec: Any) -> Any:
    """A layer's cache spec under the policy of the engine that is being built."""
    config = EvictingImpl.config
    if config is None or config.policy.peak_entries is None or type(spec) is not FullAttentionSpec:
        return spec
    return EvictingSpec.of(spec, fingerprint(config.policy), config.max_prompt)


class EvictingCPUBuilder(EvictingBuilder, CPUAttentionMetadataBuilder):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.isa == "amx":  # its packing of keys is not one that we can read
            self.isa = "vec"
            self._set_isa_to_layers(self.layer_names)


class ExactCPUImpl(CPUAttentionBackendImpl):
    """The stock implementation, or exact.py's where the engine asks for it."""

    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        **kwargs: Any,
    ) -> Any:
        config = EvictingImpl.config
        if config is None or not config.exact or attn_metadata is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, **kwargs)
        keys, values = compat.key_value_views(kv_cache, layer)
        tokens, m = attn_metadata.num_actual_tokens, attn_metadata
        out = output.view(query.shape)[:tokens]
        attend(query[:tokens], keys, values, m.block_table, m.seq_lens, m.query_start_loc, self.scale, out)
        return output


class EvictingCPUImpl(EvictingImpl, ExactCPUImpl):
    pass


class EvictingCPUBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[EvictingCPUImpl]:
        return EvictingCPUImpl

    @staticmethod
    def get_builder_cls() -> type[EvictingCPUBuilder]:
        return EvictingCPUBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return evicting_spec(spec)
