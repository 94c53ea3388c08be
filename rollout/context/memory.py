"""Bytes that a context takes: its kept entries, the masks for reading it, and its compaction."""

from __future__ import annotations

from typing import Any

from rollout.context import cache, compact
from rollout.context.config import ON_POLICY, PromptCacheConfig
from rollout.context.prompts import MOST_QUESTIONS, REQUESTS
from sparse_rl.attention.families import cache_shape, windows_of
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
    """Return the maximum number of reference queries per kv head of one part, before a random subset is taken. The
    instructions in their texts are not counted.

    group : query heads per kv head
    """
    return group * sum(_asking(config, tokens).values())


def stored_queries(config: PromptCacheConfig, tokens: int, group: int) -> int:
    """Return the maximum number of reference queries per kv head that are stored in all layers until the compaction.

    These are the queries of all parts, after a random subset was taken of each, but no on-policy queries.

    group : query heads per kv head
    """
    if not config.chooses:
        return 0
    parts = len(config.parts(tokens))
    if config.on_policy:
        return parts * group * sum(n for kind, n in _asking(config, tokens).items() if kind not in ON_POLICY)
    return parts * min(reference_queries(config, tokens, group), config.most_queries)


def _asking(config: PromptCacheConfig, tokens: int) -> dict[str, int]:
    """Return kind of reference queries -> number of its tokens in one part of a context."""
    if not config.chooses:
        return {}
    read = _part_tokens(config, tokens)
    study = (len(REQUESTS) + MOST_QUESTIONS) * config.study_samples * config.study_tokens
    numbers = {"self_study": study, "question": config.study_tokens, "window": min(config.window, read)}
    numbers["repeat"] = read - config.first - config.last
    return {kind: numbers.get(kind, read) for kind in config.queries}


def texts_read(config: PromptCacheConfig) -> int:
    """Return the maximum number of texts that are read or written at the same time for reference queries. Each of them
    has a copy of the context's sliding windows.
    """
    study = (len(REQUESTS) + MOST_QUESTIONS) * config.study_samples
    texts = {"self_study": study, "question": 1, "repeat": 1}  # the other kinds are queries of the context itself
    return sum(texts.get(kind, 0) for kind in config.queries) if config.chooses else 0


def _part_tokens(config: PromptCacheConfig, tokens: int) -> int:
    """Return the number of tokens of the longest part of a context, with its first and last tokens."""
    return max(part.end - part.start for part in config.parts(tokens)) + config.first + config.last


def layerwise_bytes(config: PromptCacheConfig, tokens: int, model: Any, itemsize: int) -> int:
    """Return the bytes of a pass that computes on-policy queries: activations of all texts, and the attention's masks.

    This is an estimate, which leaves out the prompts of self-study. It is 0 if no query is on-policy.

    model : the model's configuration
    """
    if not (config.chooses and config.on_policy):
        return 0
    read = sum(n for kind, n in _asking(config, tokens).items() if kind in ON_POLICY)
    heads, (_, kv_heads, head_dim) = model.num_attention_heads, cache_shape(model)
    projected = (3 * heads + 2 * kv_heads) * head_dim  # queries, queries by kv head, output; keys, values
    numbers = 2 * model.hidden_size + max(3 * model.intermediate_size, projected)
    longest = max(_part_tokens(config, tokens) if "repeat" in config.queries else 0, config.study_tokens)
    masks = 12 * min(cache.MOST_LOGITS, heads * longest * (longest + config.kept(tokens)))
    if window := max(windows_of(model)):  # boolean masks of whole texts, and the masks that SDPA makes from them
        masks = max(masks, 9 * longest * (longest + min(window, tokens)))
    return read * numbers * itemsize + masks


def compaction_bytes(config: PromptCacheConfig, tokens: int, group: int, kv_heads: int, head_dim: int) -> int:
    """Return the temporary bytes of a compaction, for the kv heads and the part of the context that are fitted
    together.

    group : query heads per kv head
    """
    if not config.chooses:
        return 0
    queries = min(reference_queries(config, tokens, group), config.most_queries)
    part = _part_tokens(config, tokens)
    if config.policy == "evict" and not config.pursues:  # all heads together, in groups of queries
        some = min(queries, max(1, compact.MOST_LOGITS // (kv_heads * part)))
        return fit_bytes(1, kv_heads, some, part, 0, head_dim)
    heads = kv_heads if queries * kv_heads * part <= compact.MOST_LOGITS else 1
    fitted = -(-config.kept(tokens) // len(config.parts(tokens)))
    pursued = fitted * max(queries, part) + part**2 if config.pursues else 0  # arrays of the pursuit
    return fit_bytes(1, heads, queries, part, fitted, head_dim) + 8 * heads * pursued
