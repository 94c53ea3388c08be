"""Compaction of a context (Attention Matching, section 3, appendices C.3 and C.4). The context is prefilled, reference
queries are computed, and for each layer the kept entries are chosen and fitted.

docs/papers/attention_matching.md lists the differences from the paper.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.context.budgets import planned
from rollout.context.cache import Context, ContextCache, LayerEntries, joined
from rollout.context.config import PromptCacheConfig
from rollout.context.layerwise import LayerwiseView, Text, by_kv_head
from sparse_rl.clock import part
from sparse_rl.errors import NotFiniteError, UserError
from sparse_rl.matching import Block, Fit, choose, match, refit
from sparse_rl.matching.select import attention_score
from sparse_rl.methods.eviction.cache import at_slots
from sparse_rl.models.identity import Identity

OnStage = Callable[[str], None]
OfLayer = Callable[[int], Tensor]

OWN = {"context", "random", "window"}  # kinds of reference queries that are made from the queries of the prefill
MOST_LOGITS = 2**28  # with more logits, kv heads are fitted one by one, and scores are computed in groups of queries


class Reader(Protocol):
    """The functions of an engine that a compaction needs."""

    @property
    def model(self) -> Identity:
        """The engine's model."""
        ...

    def read(self, texts: Sequence[Sequence[int]], cache: ContextCache) -> None:
        """Run texts through the model, as rows of a batch, with a cache."""
        ...

    def read_layerwise(self, view: LayerwiseView) -> None:
        """Run the tokens `view.ids` at the positions `view.positions` through the model, as one row, with `view`."""
        ...

    def write(self, whole: Context) -> list[tuple[list[int], list[int]]]:
        """Let the model answer the prompts of self-study after a context. Returns (prompt, answer) pairs."""
        ...

    def moved(self, keys: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Return keys [1, Hkv, N, D], which RoPE has turned to the positions `old`, turned to the positions `new`.

        Positions are int64 [1, Hkv, N]. Raises UserError for models of whose RoPE this is not possible.
        """
        ...


class Stages(dict[str, float]):
    """Duration of each stage of a compaction, in seconds."""

    @contextmanager
    def timed(self, stage: str) -> Any:
        start = time.perf_counter()
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # otherwise kernels that are still running would count for the next stage
        self[stage] = time.perf_counter() - start


@dataclass
class Studied:
    """A prefilled context with its reference queries, from which compactions of any size can be made.

    whole : the whole context
    queries : reference queries of each layer, [1, Hkv, number of queries, D]; there are none if the policy does not
        choose entries
    scaling : the factor on q . k
    seconds : durations of the prefill and of the computation of the reference queries
    texts : texts of on-policy queries, for each of their kinds. If there are any, `queries` has the other kinds alone
    reader : reads these texts; None if there are none
    """

    whole: Context
    queries: list[Tensor]
    scaling: float
    seconds: Stages
    texts: list[list[Text]] = field(default_factory=list)
    reader: Reader | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole context's keys, values and biases."""
        return self.whole.nbytes

    def compacted(self, config: PromptCacheConfig, counts: Sequence[Sequence[int]] | None = None) -> Context:
        """Compact the context.

        counts : number of entries that each kv head keeps, [layer][kv head], without the first `config.first` and the
            last `config.last` ones; None means the numbers that `planned` (budgets.py) computes from `config`
        """
        if config.policy == "full":
            return replace(self.whole, seconds=dict(self.seconds))
        if counts is None:
            heads = self.whole.layers[0].keys.shape[1]
            counts = planned(config, len(self.whole.tokens), len(self.whole.layers), heads, self.whole.model)
        stages = Stages(self.seconds)
        with stages.timed("compaction"):
            if self.texts and config.chooses:
                layers = self._layerwise(config, counts)
            else:
                layers = [self.layer(config, place, selected) for place, selected in enumerate(counts)]
        return Context(self.whole.tokens, layers, config.policy == "am", stages, self.whole.model)

    def _layerwise(self, config: PromptCacheConfig, counts: Sequence[Sequence[int]]) -> list[LayerEntries]:
        """Compact the layers during one pass over `texts`; see LayerwiseView."""
        assert self.reader is not None

        def compact(layer: int, captured: Tensor) -> LayerEntries:
            queries = list(self.queries)
            queries[layer] = _drawn(torch.cat([queries[layer], captured], dim=2), config)
            return replace(self, queries=queries, texts=[]).layer(config, layer, counts[layer])

        view = LayerwiseView(len(self.whole.tokens), self.texts, compact)
        self.reader.read_layerwise(view)
        return view.layers

    def layer(self, config: PromptCacheConfig, place: int, counts: Sequence[int]) -> LayerEntries:
        """Return the entries to keep in layer `place`. Heads with fewer entries than others are padded with masked
        entries.

        counts : number of entries of each kv head, without the first `config.first` and the last `config.last` ones
        """
        entries, queries = self.whole.layers[place], self.queries[place]
        logits = queries.shape[1] * queries.shape[2] * min(entries.keys.shape[2], config.chunk)
        if len(set(counts)) == 1 and (not config.in_parts or logits <= MOST_LOGITS):
            return _compacted(entries, queries, counts[0], config, self.scaling)
        return joined([self.head(config, place, head, count) for head, count in enumerate(counts)])

    def head(self, config: PromptCacheConfig, place: int, head: int, count: int) -> LayerEntries:
        """Implement `Studied.head` of budgets.py. Raises UserError if there are on-policy queries."""
        if self.texts:
            raise UserError("heads cannot be compacted alone with on-policy queries; set it to false", "on_policy")
        head_slice = slice(head, head + 1)
        selected = LayerEntries(*(x[:, head_slice] for x in self.whole.layers[place]))
        return _compacted(selected, self.queries[place][:, head_slice], count, config, self.scaling)


def study(tokens: Sequence[int], config: PromptCacheConfig, reader: Reader, on_stage: OnStage) -> Studied:
    """Prefill a context and compute its reference queries, other than on-policy queries.

    on_stage : called with the name of each stage when it begins
    """
    tokens, stages = list(tokens), Stages()
    config.kept(len(tokens))  # raises UserError if the context is too short
    on_stage("prefill")
    with stages.timed("prefill"):
        prefilled = ContextCache(None, captures=config.chooses and not OWN.isdisjoint(config.queries))
        reader.read([tokens], prefilled)
        positions = torch.arange(len(tokens))
        held = ([x[:, :, : len(tokens)] for x in pair] for pair in prefilled.own.values())
        whole = Context(tokens, [_entries(keys, values, positions) for keys, values in held], False, model=reader.model)
    for place, entries in enumerate(whole.layers):
        if not bool(entries.keys.isfinite().all() & entries.values.isfinite().all()):
            raise NotFiniteError(
                f"the context's keys or values are not finite in layer {place}: the model's weights, or its "
                "activations in this dtype, are NaN or infinite; use an undamaged checkpoint, or set another dtype"
            )
    if not config.chooses:
        return Studied(whole, [entries.keys[:, :, :0] for entries in whole.layers], prefilled.scaling, stages)
    with stages.timed("queries"):
        kinds, caches, texts = _queries(config, whole, prefilled, reader, on_stage)
        queries = []
        for layer, entries in enumerate(whole.layers):
            joined_kinds = torch.cat([entries.keys[:, :, :0], *(kind(layer) for kind in kinds)], dim=2)
            queries.append(joined_kinds if texts else _drawn(joined_kinds, config))
            for cache in caches:
                cache.forget(layer)
    return Studied(whole, queries, prefilled.scaling, stages, texts, reader if texts else None)


def _entries(keys: Tensor, values: Tensor, positions: Tensor) -> LayerEntries:
    bias = torch.zeros(keys.shape[:3], device=keys.device)
    return LayerEntries(keys, values, bias, positions.to(keys.device).expand(keys.shape[:3]))


# ---- reference queries ----------------------------------------------------------------------------------------------


def _queries(
    config: PromptCacheConfig, whole: Context, prefilled: ContextCache, reader: Reader, on_stage: OnStage
) -> tuple[list[OfLayer], list[ContextCache], list[list[Text]]]:
    """Prepare the reference queries of each kind in `config.queries`.

    Returns one function for each kind, the caches that these functions read, and the texts of each kind whose queries
    are on-policy, which has no function. Each function maps a layer to the layer's reference queries
    [1, Hkv, number of queries, D], and must be called in the order of the layers.
    """
    kinds: list[OfLayer] = []
    texts: list[list[Text]] = []
    caches = [prefilled]
    for kind in config.queries:
        if kind == "repeat" and config.on_policy:
            texts.append([Text(whole.tokens)])
        elif kind == "repeat":
            on_stage("queries, second reading of the context")
            caches.append(ContextCache(whole, captures=True))
            reader.read([whole.tokens], caches[-1])
            kinds.append(partial(_captured, caches[-1], whole))
        elif kind == "self_study":
            on_stage("queries, self-study")
            written = reader.write(whole)
            if not written:
                raise UserError("self_study needs prompts that ask about the context", "queries")
            if config.on_policy:
                texts.append([Text([*prompt, *answer], len(prompt)) for prompt, answer in written])
                continue
            caches.append(ContextCache(whole, captures=True))
            reader.read([[*prompt, *answer] for prompt, answer in written], caches[-1])
            kinds.append(partial(_studied, caches[-1], whole, written))
        elif kind == "random":
            kinds.append(partial(_random, prefilled, whole, torch.Generator().manual_seed(config.seed)))
        else:
            kinds.append(partial(_captured, prefilled, whole, window=config.window if kind == "window" else None))
    return kinds, caches, texts


def _captured(cache: ContextCache, whole: Context, layer: int, window: int | None = None) -> Tensor:
    """Return the captured queries of a context's tokens, or of its last `window` tokens, in one layer: [1, Hkv, G x
    number of tokens, D].
    """
    count = len(whole.tokens)
    span = slice(0 if window is None else max(0, count - window), count)
    return by_kv_head(cache.captured(layer)[:, :, span], whole.layers[layer].keys)


def _random(cache: ContextCache, whole: Context, generator: torch.Generator, layer: int) -> Tensor:
    """Return one normally distributed query for each query of the context. In each kv head, the random queries have the
    mean norm of the context's queries. The paper applies the head's q-norm instead (appendix D).
    """
    queries = _captured(cache, whole, layer)
    drawn = torch.randn(queries.shape, generator=generator).to(queries)
    norm = queries.norm(dim=-1, keepdim=True).mean(2, keepdim=True)
    return drawn / drawn.norm(dim=-1, keepdim=True) * norm


def _studied(cache: ContextCache, whole: Context, written: list[tuple[list[int], list[int]]], layer: int) -> Tensor:
    """Return the captured queries of the answers of self-study in one layer: [1, Hkv, number of queries, D].

    written : (prompt, answer) of each row of the cache
    """
    rows = zip(cache.captured(layer), written, strict=True)
    answers = [q[None, :, len(prompt) : len(prompt) + len(answer)] for q, (prompt, answer) in rows]
    return by_kv_head(torch.cat(answers, dim=2), whole.layers[layer].keys)


def _drawn(queries: Tensor, config: PromptCacheConfig) -> Tensor:
    """Return a random subset of at most `config.most_queries` reference queries, the same indices in every kv head."""
    count = queries.shape[2]
    if count <= config.most_queries:
        return queries
    places = torch.randperm(count, generator=torch.Generator().manual_seed(config.seed))[: config.most_queries]
    return queries[:, :, places.sort().values.to(queries.device)]


# ---- kept entries ---------------------------------------------------------------------------------------------------


def _compacted(
    entries: LayerEntries, queries: Tensor, count: int, config: PromptCacheConfig, scaling: float
) -> LayerEntries:
    """Return the entries to keep: the first `config.first` and the last `config.last` unchanged, and `count` others.

    If `config.in_parts`, the tokens in between compete in equal parts of at most `config.chunk` tokens, each with an
    equal share of `count`. `entries` are all entries of one layer, or of one of its kv heads.
    """
    tokens = entries.keys.shape[2]
    parts = config.parts(tokens)
    place = torch.arange(tokens, device=entries.keys.device)
    competing = (place >= config.first) & (place < tokens - config.last)
    kept = [LayerEntries(*(x[:, :, ~competing] for x in entries))]
    for span in parts:
        # `first` and `last` join the first and the last part, so that a single part is the whole context.
        start = config.first + span.start if span is not parts[0] else 0
        selected = slice(start, config.first + span.end if span is not parts[-1] else tokens)
        if share := span.share(count):
            held = LayerEntries(*(x[:, :, selected] for x in entries))
            block = Block(held.keys, held.values, queries, held.bias, competing[selected].expand(1, 1, -1), scaling)
            index, bias, values = _chosen(block, share, config)
            kept.append(LayerEntries(at_slots(held.keys, index), values, bias, held.positions.gather(2, index)))
    return LayerEntries(*(torch.cat(pieces, dim=2) for pieces in zip(*kept, strict=True)))


def _chosen(block: Block, count: int, config: PromptCacheConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Choose `count` entries of a block to keep. Returns their indices, biases and values, as `match` does."""
    fit = Fit(config.select, config.aggregate, config.ridge, config.fit == "paper")
    if config.policy == "am" and config.pool == 1:
        return match(block, count, fit)
    index = choose(block, count, fit) if config.pursues else _most_attended(block, count, config)
    if config.policy == "am":
        return index, *refit(block, index, fit)
    return index, block.bias.gather(2, index), at_slots(block.values, index)


@part("selection", detail=True)
def _most_attended(block: Block, count: int, config: PromptCacheConfig) -> Tensor:
    """Return the indices of the `count` entries with the highest pooled scores, as `match` does."""
    score = _score(block, config.aggregate)
    if bool(score.isnan().any()):
        raise NotFiniteError("a NaN score for an entry of the context")
    inside = block.competing[0, 0]
    smoothed = F.avg_pool1d(score[0, :, inside], config.pool, 1, config.pool // 2, count_include_pad=False)
    score = torch.full_like(score, float("-inf")).masked_scatter(inside, smoothed)
    return score.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(-1).values


def _score(block: Block, aggregate: str) -> Tensor:
    """Return the `attention_score` of N entries in H kv heads, [1, H, N]. It is computed in groups of queries."""
    some = block.queries.split(max(1, MOST_LOGITS // block.bias.numel()), dim=2)
    scores = [attention_score(replace(block, queries=queries).logits(), aggregate) for queries in some]
    if len(scores) == 1:
        return scores[0]
    if aggregate == "max":
        return torch.stack(scores).amax(0)
    power = 2 if aggregate == "rms" else 1
    sums = sum(score**power * queries.shape[2] for score, queries in zip(scores, some, strict=True))
    return (sums / block.queries.shape[2]) ** (1 / power)
