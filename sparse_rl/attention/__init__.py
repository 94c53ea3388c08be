"""Replay attention: a model's forward pass under the cache decisions that a sampler recorded.

interface.py has the attention function that models run with. views/ has the views, which carry traces into a forward
pass. kernels/ computes attention under evict_at; choice.py and parity.py choose a kernel that is exact on this machine.
future.py, target.py and oracle.py compute future attention, the scorers' training target, and recall.
"""

from typing import TYPE_CHECKING

from sparse_rl.lazy import public_names

if TYPE_CHECKING:
    from sparse_rl.attention.config import ATTENTION_KERNELS
    from sparse_rl.attention.families import cache_shape
    from sparse_rl.attention.future import future_attention_mass
    from sparse_rl.attention.interface import NO_MASK, adopt
    from sparse_rl.attention.kernels.sdpa import compute_exactly
    from sparse_rl.attention.logprobs import dense_logprobs, replay_logprobs
    from sparse_rl.attention.views.factory import make_view

__all__ = [
    "ATTENTION_KERNELS",
    "NO_MASK",
    "adopt",
    "cache_shape",
    "compute_exactly",
    "dense_logprobs",
    "future_attention_mass",
    "make_view",
    "replay_logprobs",
]

__getattr__ = public_names(__name__)
