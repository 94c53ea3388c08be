"""Replay attention: the dense reference (reference.py), the SDPA path (replay.py), the FlexAttention path (flex.py,
over tiles.py), which of them this machine may use (parity.py), registration (interface.py).

future.py: what attention a token will still get, for policies that learn it.

Nothing is imported before it is asked for: config.py is read without torch.
"""

from typing import TYPE_CHECKING

from sparse_rl.lazy import public_names

if TYPE_CHECKING:
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

__getattr__ = public_names(
    __name__,
    {
        "ATTENTION": "sparse_rl.attention.interface",
        "FAMILIES": "sparse_rl.attention.interface",
        "FutureTarget": "sparse_rl.attention.learned",
        "KVView": "sparse_rl.attention.interface",
        "LayerTarget": "sparse_rl.attention.learned",
        "LearnedView": "sparse_rl.attention.learned",
        "NO_MASK": "sparse_rl.attention.interface",
        "PATHS": "sparse_rl.attention.replay",
        "ReplayView": "sparse_rl.attention.replay",
        "adopt": "sparse_rl.attention.interface",
        "attention_lse": "sparse_rl.attention.future",
        "cache_shape": "sparse_rl.attention.interface",
        "dense_attention": "sparse_rl.attention.reference",
        "dense_logprobs": "sparse_rl.attention.reference",
        "future_attention_mass": "sparse_rl.attention.future",
        "masked_attention": "sparse_rl.attention.replay",
        "refuse_reentrant_checkpointing": "sparse_rl.attention.interface",
        "replay_logprobs": "sparse_rl.attention.logprobs",
        "sdpa": "sparse_rl.attention.interface",
        "visible_mask": "sparse_rl.attention.replay",
    },
)
