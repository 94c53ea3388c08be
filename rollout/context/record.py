"""The record of a context's compaction in the traces of its continuations (sparse_rl/matching/compacted.py).

Only queries of the context's own tokens, of the kinds context and window, can be recorded: a trainer that replays a
trace reads the context again, and so has these queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout.context.config import PromptCacheConfig
from sparse_rl.matching import ContextRecord
from sparse_rl.matching.compacted import GROUP

RECORDED = {"context", "window"}  # kinds of reference queries that can be recorded


def subset(count: int, config: PromptCacheConfig) -> Tensor | None:
    """Return the random subset of `config.most_queries` out of `count` reference queries, ascending, int64 [n].

    None means that all are used.
    """
    if count <= config.most_queries:
        return None
    places = torch.randperm(count, generator=torch.Generator().manual_seed(config.seed))[: config.most_queries]
    return places.sort().values


def recorded_queries(config: PromptCacheConfig, places: Tensor, group: int) -> Tensor | None:
    """Return the reference queries of a part of a context, as `ContextRecord.sections` takes them: int64 [n, 2].

    places : int64, positions of the tokens that the part's texts see
    group : number of query heads per kv head

    None means that the queries cannot be recorded.
    """
    if not RECORDED.issuperset(config.queries):
        return None
    tokens = [places[-config.window :] if kind == "window" else places for kind in config.queries]
    drawn = subset(group * sum(map(len, tokens)), config)
    if drawn is None:
        joined = torch.cat(tokens)
        return torch.stack([joined, torch.full_like(joined, GROUP)], dim=1)
    # The order of compact.py: kind by kind, and for each kind query head by query head.
    heads = torch.arange(group)
    pairs = [torch.stack([of_kind.repeat(group), heads.repeat_interleave(len(of_kind))], dim=1) for of_kind in tokens]
    return torch.cat(pairs)[drawn]


def recorded(
    config: PromptCacheConfig, parts: Sequence[tuple[int, int]], queries: Sequence[Tensor | None]
) -> dict[str, Tensor]:
    """Return the trace sections from which a trainer recomputes the fits, {} if this is not possible.

    parts : positions of the first token of each part, and of the first token after it
    queries : for each part, the result of `recorded_queries`
    """
    known_queries = [of_part for of_part in queries if of_part is not None]
    if not config.fits or config.fit == "paper" or len(known_queries) < len(parts):
        return {}
    record = ContextRecord(config.ridge, config.pursues, config.fit_biases, config.fit_values)
    return record.sections([*(start for start, _ in parts), parts[-1][1]], known_queries)
