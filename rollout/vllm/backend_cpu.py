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
    """vLLM's metadata builder on CPUs, with physical lengths, and without AMX instructions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.isa == "amx":  # our code cannot read the packed layout of keys for AMX
            self.isa = "vec"
            self._set_isa_to_layers(self.layer_names)


class EvictingCPUImpl(EvictingImpl, CPUAttentionBackendImpl):
    """vLLM's CPU attention, over the entries that a request holds."""


class EvictingCPUBackend(EvictingNames, CPUAttentionBackend):
    """vLLM's CPU backend with our builder, implementation and cache specification."""

    builder, impl = EvictingCPUBuilder, EvictingCPUImpl
