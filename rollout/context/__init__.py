"""Contexts that are prefilled and compacted once, and then continued any number of times (one-shot Attention Matching).

context = engine.compact(tokens, PromptCacheConfig(ratio=0.05, queries=["repeat"]))
rollouts = engine.generate(questions, sampling, context=context)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparse_rl.lazy import public_names

if TYPE_CHECKING:
    from rollout.context.cache import Context, ContextCache, load_context, save_context
    from rollout.context.config import PromptCacheConfig

__getattr__ = public_names(__name__)

__all__ = ["Context", "ContextCache", "PromptCacheConfig", "load_context", "save_context"]
