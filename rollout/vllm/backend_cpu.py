"""The evicting backend on CPUs. In float32 it computes attention as the trainer does (exact.py), where asked to."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from rollout.vllm.backend import EvictingBuilder, EvictingImpl, evicting_spec
from rollout.vllm.compat.paged import key_value_views, live_state
from rollout.vllm.exact import attend


class EvictingCPUBuilder(EvictingBuilder, CPUAttentionMetadataBuilder):
    """vLLM's metadata on CPUs, of the physical lengths, and never for AMX."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.isa == "amx":  # its packing of keys is not one that we can read
            self.isa = "vec"
            self._set_isa_to_layers(self.layer_names)


class ExactCPUImpl(CPUAttentionBackendImpl):
    """The stock implementation, or exact.py's where the engine asks for it."""

    def forward(  # type: ignore[override]
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
        keys, values = key_value_views(kv_cache, transposed=True)
        tokens, m = attn_metadata.num_actual_tokens, attn_metadata
        out = output.view(query.shape)[:tokens]
        state = live_state()
        bias = None if state is None else state.bias(layer.layer_name)
        attend(query[:tokens], keys, values, m.block_table, m.seq_lens, m.query_start_loc, self.scale, out, bias)
        return output


class EvictingCPUImpl(EvictingImpl, ExactCPUImpl):
    """Attention over what is held on CPUs: what EvictingImpl adds to the stock or the exact one."""


class EvictingCPUBackend(CPUAttentionBackend):
    """vLLM's backend on CPUs with our builder, implementation and cache specification."""

    @staticmethod
    def get_impl_cls() -> type[EvictingCPUImpl]:
        return EvictingCPUImpl

    @staticmethod
    def get_builder_cls() -> type[EvictingCPUBuilder]:
        return EvictingCPUBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return evicting_spec(spec)
