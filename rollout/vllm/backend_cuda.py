"""The evicting backends on NVIDIA GPUs: vLLM's FlashAttention, or its Triton kernels where that does not run.

`EvictingBackend` is registered as CUSTOM and only chooses. The backends keep the stock names, by which vLLM tells
kernels apart. Written from vLLM 0.31's source: none of it has been run.
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
    """The metadata of FlashAttention, of the physical lengths."""


class EvictingFlashImpl(EvictingImpl, FlashAttentionImpl):
    """FlashAttention over what is held."""


class EvictingFlashBackend(EvictingNames, FlashAttentionBackend):
    """FlashAttention, with our builder, implementation and cache specification."""

    builder, impl = EvictingFlashBuilder, EvictingFlashImpl

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return super().supports_compute_capability(capability) and get_flash_attn_version() is not None


class EvictingTritonBuilder(EvictingBuilder, TritonAttentionMetadataBuilder):
    """The metadata of vLLM's Triton kernels, of the physical lengths."""


class EvictingTritonImpl(EvictingImpl, TritonAttentionImpl):
    """The Triton kernels of vLLM, over what is held."""


class EvictingTritonBackend(EvictingNames, TritonAttentionBackend):
    """The Triton kernels of vLLM, with our builder, implementation and cache specification."""

    builder, impl = EvictingTritonBuilder, EvictingTritonImpl


class EvictingBackend(AttentionBackend):
    """The first of these backends that takes a layer's configuration.

    vLLM asks a selected backend whether it takes the configuration, and then, at once, for its name: that of the chosen
    one is given, and it alone is used.
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
