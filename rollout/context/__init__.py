"""A context that is prefilled once, compacted, and continued any number of times (Attention Matching, one-shot).

    context = engine.compact(tokens, PromptCacheConfig(ratio=0.05, queries=["repeat"]))
    rollouts = engine.generate(questions, sampling, context=context)

config.py    what is kept, and by which reference queries
cache.py     Context, the entries that are left; ContextCache, what is decoded behind it
compact.py   from a context's tokens to its Context
budgets.py   how many entries each kv head keeps
files.py     contexts as files
prompts.py   what self-study asks about a context
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparse_rl.lazy import public_names

if TYPE_CHECKING:
    from rollout.context.cache import Context, ContextCache
    from rollout.context.config import PromptCacheConfig
    from rollout.context.files import load_context, save_context

__getattr__ = public_names(__name__)

__all__ = ["Context", "ContextCache", "PromptCacheConfig", "load_context", "save_context"]
