"""From a context's tokens to its Context: prefill, reference queries, what stays of each layer (AM, sections 3 and 4).

Departures from the paper: values are fitted with a ridge (sparse_rl/matching/fit.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rollout.cache import at_slots
from rollout.context.cache import Context, ContextCache, LayerEntries
from rollout.context.config import PromptCacheConfig
from sparse_rl.errors import UserError
from sparse_rl.matching import Block, Fit, match
from sparse_rl.matching.select import attention_score

Read = Callable[[Sequence[Sequence[int]], ContextCache], None]  # a forward of texts, right-padded, through a cache
Write = Callable[[Context], list[tuple[list[int], list[int]]]]  # (prompt, what was sampled) of self-study


class Stages(dict[str, float]):
    """Stage -> seconds."""

    @contextmanager
    def timed(self, stage: str) -> Any:
        start = time.perf_counter()
        yield
        self[stage] = self.get(stage, 0.0) + time.perf_counter() - start


@dataclass
class Studied:
    """A context that has been prefilled, and its reference queries: from it compactions of any size are made.

    whole : everything; queries : of each layer [1, Hkv, n, D]; scaling : the factor on q . k
    """

    whole: Context
    queries: list[torch.Tensor]
    scaling: float
    seconds: Stages

    def compacted(self, config: PromptCacheConfig, counts: Sequence[Sequence[int]] | None = None) -> Context:
        """What stays. counts : how many of each layer's kv heads, `first` and `last` apart; None: as the ratio says."""
        every = config.kept(len(self.whole.tokens))
        with self.seconds.timed("compaction"):
            layers = []
            for place, entries in enumerate(self.whole.layers):
                mine = [every] * entries.keys.shape[1] if counts is None else counts[place]
                layers.append(self.layer(config, place, mine))
        return Context(self.whole.tokens, layers, config.policy == "am", self.seconds)

    def layer(self, config: PromptCacheConfig, place: int, counts: Sequence[int]) -> LayerEntries:
        """One layer's entries, `counts` of its kv heads. Shorter heads are padded with entries that nobody sees."""
        entries, queries = self.whole.layers[place], self.queries[place]
        if len(set(counts)) == 1:
            return _compacted(entries, queries, counts[0], config, self.scaling)
        heads = [self.head(config, place, head, count) for head, count in enumerate(counts)]
        return joined(heads)

    def head(self, config: PromptCacheConfig, place: int, head: int, count: int) -> LayerEntries:
        """One kv head's entries."""
        entries, one = self.whole.layers[place], slice(head, head + 1)
        mine = LayerEntries(
            entries.keys[:, one], entries.values[:, one], entries.bias[:, one], entries.positions[:, one]
        )
        return _compacted(mine, self.queries[place][:, one], count, config, self.scaling)


def joined(heads: Sequence[LayerEntries]) -> LayerEntries:
    """Heads of different lengths as one layer: what pads a head has a bias of -inf, and the position of its first."""
    most = max(head.keys.shape[2] for head in heads)
    padded = []
    for head in heads:
        missing = most - head.keys.shape[2]
        first = torch.zeros(missing, dtype=torch.long, device=head.keys.device)
        bias = head.bias.new_full((*head.bias.shape[:2], missing), float("-inf"))
        padded.append(
            (
                torch.cat([head.keys, head.keys[:, :, first]], dim=2),
                torch.cat([head.values, head.values[:, :, first]], dim=2),
                torch.cat([head.bias, bias], dim=2),
                torch.cat([head.positions, head.positions[:, :, first]], dim=2),
            )
        )
    return LayerEntries(*(torch.cat(parts, dim=1) for parts in zip(*padded, strict=True)))


def study(tokens: Sequence[int], config: PromptCacheConfig, read: Read, write: Write) -> Studied:
    """Prefill these tokens, and find the reference queries.

    read : the model's forward
    write : lets the model answer the prompts of self-study behind a context
    """
    tokens, stages = list(tokens), Stages()
    config.kept(len(tokens))  # refuses a context that is too short
    with stages.timed("prefill"):
        prefilled = ContextCache(None, captures=True)
        read([tokens], prefilled)
        positions = torch.arange(len(tokens))
        held = ([x[:, :, : len(tokens)] for x in pair] for pair in prefilled.own.values())
        whole = Context(tokens, [_entries(keys, values, positions) for keys, values in held], False)
    with stages.timed("queries"):
        kinds = _queries(config, whole, prefilled, read, write)
        queries = [_drawn(torch.cat(found, dim=2), config) for found in zip(*kinds, strict=True)]
    return Studied(whole, queries, prefilled.scaling, stages)


def _entries(keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> LayerEntries:
    bias = torch.zeros(keys.shape[:3], device=keys.device)
    return LayerEntries(keys, values, bias, positions.to(keys.device).expand(keys.shape[:3]))


# ---- reference queries ----------------------------------------------------------------------------------------------


def _queries(
    config: PromptCacheConfig, whole: Context, prefilled: ContextCache, read: Read, write: Write
) -> list[list[torch.Tensor]]:
    """Of each kind, of each layer: [1, Hkv, n, D]."""
    own = _captured(prefilled, whole)
    found = []
    for kind in config.queries:
        if kind == "context":
            found.append(own)
        elif kind == "repeat":
            again = ContextCache(whole, captures=True)
            read([whole.tokens], again)
            found.append(_captured(again, whole))
        elif kind == "random":
            generator = torch.Generator().manual_seed(config.seed)
            found.append([_random_like(q, generator) for q in own])
        else:
            found.append(_studied(whole, write(whole), read))
    return found


def _captured(cache: ContextCache, whole: Context) -> list[torch.Tensor]:
    """The queries that a context's tokens had as a cache read them: of each layer [1, Hkv, G tokens, D]."""
    queries = (cache.queries_of[layer][:, :, : len(whole.tokens)] for layer in range(len(whole.layers)))
    return [_by_kv_head(query, entries) for query, entries in zip(queries, whole.layers, strict=True)]


def _by_kv_head(query: torch.Tensor, entries: LayerEntries) -> torch.Tensor:
    """[1, Hq, T, D] -> [1, Hkv, G T, D]."""
    return query.unflatten(1, (entries.keys.shape[1], -1)).flatten(2, 3)


def _random_like(queries: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Normal queries, as many, each scaled to the mean norm of a kv head's (appendix D)."""
    drawn = torch.randn(queries.shape, generator=generator).to(queries)
    norm = queries.norm(dim=-1, keepdim=True).mean(2, keepdim=True)
    return drawn / drawn.norm(dim=-1, keepdim=True) * norm


def _studied(whole: Context, written: list[tuple[list[int], list[int]]], read: Read) -> list[torch.Tensor]:
    """The queries of what was sampled behind the context: of each layer [1, Hkv, n, D]."""
    if not written:
        raise UserError("self_study needs prompts that ask about the context", "queries")
    cache = ContextCache(whole, captures=True)
    read([[*prompt, *answer] for prompt, answer in written], cache)
    found = []
    for layer, entries in enumerate(whole.layers):
        rows = zip(cache.queries_of[layer], written, strict=True)
        answers = [q[None, :, len(prompt) : len(prompt) + len(answer)] for q, (prompt, answer) in rows]
        found.append(_by_kv_head(torch.cat(answers, dim=2), entries))
    return found


def _drawn(queries: torch.Tensor, config: PromptCacheConfig) -> torch.Tensor:
    """At most `most_queries` of [1, Hkv, n, D], the same places in every kv head."""
    count = queries.shape[2]
    if count <= config.most_queries:
        return queries
    places = torch.randperm(count, generator=torch.Generator().manual_seed(config.seed))[: config.most_queries]
    return queries[:, :, places.sort().values.to(queries.device)]


# ---- what stays -----------------------------------------------------------------------------------------------------


def _compacted(
    entries: LayerEntries, queries: torch.Tensor, count: int, config: PromptCacheConfig, scaling: float
) -> LayerEntries:
    """One layer's entries: `first` and `last` as they were, and `count` of those between them."""
    tokens = entries.keys.shape[2]
    place = torch.arange(tokens, device=entries.keys.device)
    competing = ((place >= config.first) & (place < tokens - config.last)).expand(1, 1, -1)
    block = Block(entries.keys, entries.values, queries, entries.bias, competing, scaling)
    if config.policy == "am":
        fit = Fit(config.select, config.aggregate, config.ridge, config.fit == "paper")
        index, bias, values = match(block, count, fit)
    else:
        score = attention_score(block.logits(), config.aggregate).masked_fill(~competing, float("-inf"))
        index = score.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(-1).values
        bias, values = entries.bias.gather(2, index), at_slots(entries.values, index)
    fixed = place[~competing[0, 0]].expand(*index.shape[:2], -1)
    stays = torch.cat([fixed, index], dim=2)
    return LayerEntries(
        keys=at_slots(entries.keys, stays),
        values=torch.cat([at_slots(entries.values, fixed), values], dim=2),
        bias=torch.cat([entries.bias.gather(2, fixed), bias], dim=2),
        positions=stays,
    )
