"""Contexts that are prefilled and compacted once, and then continued any number of times (one-shot Attention Matching).

    context = engine.compact(tokens, PromptCacheConfig(ratio=0.05, queries=["repeat"]))
    rollouts = engine.generate(questions, sampling, context=context)

config.py         settings of the choice of kept entries and of the reference queries
cache.py          Context, the kept entries; ContextCache, the cache of sequences that continue a context
compact.py        reference queries and compaction of a context, or of one of its parts
chunks.py         the parts of a long context
layerwise.py      on-policy queries
rotation.py       RoPE of keys that move to another position
conversations.py  texts that the model writes about a context: self-study, questions, summaries
prompts.py        the prompts for these texts
reader.py         the functions of the hf engine that a compaction needs
cartridge.py      training of a compacted context by gradient descent
budgets.py        number of entries that each kv head keeps
competition.py    keys of all kv heads that compete with each other
record.py         the record of a compaction in traces
files.py          contexts as files
memory.py         bytes that a context and its compaction take
stages.py         durations of the stages
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
