"""The evicting backend on CPUs."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from rollout.vllm.backend import EvictingBuilder, EvictingImpl, EvictingNames


class EvictingCPUBuilder(EvictingBuilder, CPUAttentionMetadataBuilder):
    """vLLM's metadata on CPUs, of the physical lengths, and never for AMX."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.isa == "amx":  # its packing of keys is not one that we can read
            self.isa = "vec"
            self._set_isa_to_layers(self.layer_names)


class EvictingCPUImpl(EvictingImpl, CPUAttentionBackendImpl):
    """Attention over what is held, on CPUs."""


class EvictingCPUBackend(EvictingNames, CPUAttentionBackend):
    """vLLM's backend on CPUs with our builder, implementation and cache specification."""

    builder, impl = EvictingCPUBuilder, EvictingCPUImpl
