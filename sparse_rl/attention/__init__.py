"""Replay attention: the dense reference (reference.py), the SDPA path (replay.py), the FlexAttention path (flex.py,
over tiles.py), which of them this machine may use (parity.py), registration (interface.py).

future.py: what attention a token will still get, for policies that learn it.
"""

from sparse_rl.attention.future import attention_lse, future_attention_mass
from sparse_rl.attention.interface import (
    ATTENTION,
    FAMILIES,
    NO_MASK,
    KVView,
    adopt,
    cache_shape,
    refuse_reentrant_checkpointing,
    sdpa,
)
from sparse_rl.attention.learned import FutureTarget, LayerTarget, LearnedView
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.attention.reference import dense_attention, dense_logprobs
from sparse_rl.attention.replay import PATHS, ReplayView, masked_attention, visible_mask

__all__ = [
    "ATTENTION",
    "FAMILIES",
    "NO_MASK",
    "PATHS",
    "FutureTarget",
    "KVView",
    "LayerTarget",
    "LearnedView",
    "ReplayView",
    "adopt",
    "attention_lse",
    "cache_shape",
    "dense_attention",
    "dense_logprobs",
    "future_attention_mass",
    "masked_attention",
    "refuse_reentrant_checkpointing",
    "replay_logprobs",
    "sdpa",
    "visible_mask",
]
