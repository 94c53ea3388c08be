"""Bytes that a context takes: its kept entries, the masks for reading it, and its compaction."""

from __future__ import annotations

from rollout.context import cache, compact
from rollout.context.config import PromptCacheConfig
from rollout.context.prompts import STUDY_PROMPTS
from sparse_rl.matching.block import fit_bytes
from sparse_rl.policies.cache import cache_bytes


def context_bytes(entries: int, layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Return the bytes of a context with `entries` entries per kv head: keys, values, float32 biases, int64
    positions.
    """
    return cache_bytes(entries, layers, kv_heads, head_dim, itemsize) + 12 * layers * kv_heads * entries


def reading_bytes(tokens: int, heads: int) -> int:
    """Return the bytes of the attention masks for one piece of a context when the model reads it a second time."""
    return 12 * min(cache.MOST_LOGITS, heads * min(cache.ContextCache.piece or tokens, tokens) * 2 * tokens)


def reference_queries(config: PromptCacheConfig, tokens: int, group: int) -> int:
    """Return the maximum number of reference queries per kv head, before a random subset is taken.

    group : query heads per kv head
    """
    study = len(STUDY_PROMPTS) * config.study_samples * config.study_tokens
    read = {"self_study": study, "window": min(config.window, tokens)}
    return group * sum(read.get(kind, tokens) for kind in config.queries) if config.chooses else 0


def compaction_bytes(config: PromptCacheConfig, tokens: int, group: int, kv_heads: int, head_dim: int) -> int:
    """Return the temporary bytes of a compaction, for the kv heads and the part of the context that are fitted
    together.

    group : query heads per kv head
    """
    if not config.chooses:
        return 0
    queries = min(reference_queries(config, tokens, group), config.most_queries)
    if not config.in_parts:  # all heads and tokens together, in groups of queries
        some = min(queries, max(1, compact.MOST_LOGITS // (kv_heads * tokens)))
        return fit_bytes(1, kv_heads, some, tokens, 0, head_dim)
    parts = -(-config.between(tokens) // config.chunk)
    part = tokens if parts == 1 else -(-config.between(tokens) // parts) + config.first + config.last
    heads = kv_heads if queries * kv_heads * min(tokens, config.chunk) <= compact.MOST_LOGITS else 1
    fitted = -(-config.kept(tokens) // parts)
    pursued = fitted * max(queries, part) + part**2 if config.pursues else 0  # arrays of the pursuit
    return fit_bytes(1, heads, queries, part, fitted, head_dim) + 8 * heads * pursued
