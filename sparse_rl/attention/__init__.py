"""Replay attention: a model's forward pass under the cache decisions that a sampler recorded."""

from typing import TYPE_CHECKING

from sparse_rl.lazy import public_names

if TYPE_CHECKING:
    from sparse_rl.attention.config import ATTENTION_KERNELS
    from sparse_rl.attention.families import cache_shape
    from sparse_rl.attention.interface import NO_MASK, adopt
    from sparse_rl.attention.logprobs import replay_logprobs
    from sparse_rl.attention.views import make_view
    from sparse_rl.kernels.exact import compute_exactly
    from sparse_rl.kernels.future import future_attention_mass

__all__ = [
    "ATTENTION_KERNELS",
    "NO_MASK",
    "adopt",
    "cache_shape",
    "compute_exactly",
    "future_attention_mass",
    "make_view",
    "replay_logprobs",
]

__getattr__ = public_names(__name__)
