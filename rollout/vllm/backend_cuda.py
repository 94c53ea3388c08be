"""The evicting backends on NVIDIA GPUs: vLLM's FlashAttention, or its Triton kernels if FlashAttention cannot run.

Both backends keep their stock names, because vLLM distinguishes kernels by name. This file was written from the source
of vLLM 0.31, and has never been run.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.v1.attention.backend import AttentionBackend
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

from rollout.vllm.backend import EvictingBuilder, EvictingImpl, EvictingNames


class EvictingFlashBuilder(EvictingBuilder, FlashAttentionMetadataBuilder):
    """FlashAttention's metadata builder, with physical lengths."""


class EvictingFlashImpl(EvictingImpl, FlashAttentionImpl):
    """FlashAttention over the entries that a request holds."""


class EvictingFlashBackend(EvictingNames, FlashAttentionBackend):
    """FlashAttention, with our builder, implementation and cache specification."""

    builder, impl = EvictingFlashBuilder, EvictingFlashImpl

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return super().supports_compute_capability(capability) and get_flash_attn_version() is not None


class EvictingTritonBuilder(EvictingBuilder, TritonAttentionMetadataBuilder):
    """The metadata builder of vLLM's Triton kernels, with physical lengths."""


class EvictingTritonImpl(EvictingImpl, TritonAttentionImpl):
    """vLLM's Triton attention kernels over the entries that a request holds."""


class EvictingTritonBackend(EvictingNames, TritonAttentionBackend):
    """vLLM's Triton kernels, with our builder, implementation and cache specification."""

    builder, impl = EvictingTritonBuilder, EvictingTritonImpl


class EvictingBackend(AttentionBackend):
    """The backend registered as CUSTOM: chooses EvictingFlashBackend if that accepts a layer's configuration, else
    EvictingTritonBackend.

    vLLM validates the configuration, then asks for the backend's name. We return the name of the chosen backend.
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
