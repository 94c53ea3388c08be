"""Replay attention: a model's forward pass under the cache decisions that a sampler recorded.

families.py    the models that can be replayed;  interface.py  the models' attention function, and the protocol of views
views/         views, which carry traces into a forward pass, and make_view;  kernels/  attention under evict_at
parity.py      check that a kernel is exact on this machine;  choice.py  choice of the kernel
logprobs.py    replay_logprobs, which computes log-probabilities under the traces of rollouts
ahead.py       compilation of a kernel before training
future.py      the future attention of each token;  target.py  the scorers' training target, made of future attention
future_parity.py  check that FlexAttention computes the future attention correctly here
oracle.py      recall: the share of the best cache's tokens that a cache holds
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
