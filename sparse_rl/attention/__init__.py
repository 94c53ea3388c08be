"""Replay attention: a model's forward under what a sampler did to its cache.

families.py    which models can be replayed;  interface.py  the attention function that they run under, and its views
views/         from traces to what a forward carries: make_view;  kernels/  what computes attention under evict_at
parity.py      whether a kernel is exact on this machine;  choice.py  which one is taken
logprobs.py    replay_logprobs, the invariant that all serves
ahead.py       a kernel compiled before training
future.py      what attention a token will still get, for policies that learn it;  target.py  as scorers foresee it
future_parity.py  whether FlexAttention computes that here
oracle.py      how much of what the best cache would hold is held
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
