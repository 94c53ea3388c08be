"""Compaction of a context (Attention Matching, section 3, appendices C.3 and C.4). The context is prefilled, reference
queries are computed, and for each layer the kept entries are chosen and fitted.

docs/papers/attention_matching.md lists the differences from the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.context.budgets import planned
from rollout.context.cache import Context, ContextCache, LayerEntries, joined
from rollout.context.cartridge import trained
from rollout.context.competition import competing_counts
from rollout.context.config import ON_POLICY, PromptCacheConfig
from rollout.context.conversations import Reader, conversations, question
from rollout.context.layerwise import LayerwiseView, by_kv_head
from rollout.context.record import recorded, recorded_queries, subset
from rollout.context.stages import Stages
from sparse_rl.clock import part
from sparse_rl.errors import NotFiniteError, UserError
from sparse_rl.matching import Block, Fit, choose, match, refit
from sparse_rl.matching.select import attention_score
from sparse_rl.methods.eviction.cache import at_slots

OnStage = Callable[[str], None]
OfLayer = Callable[[int], Tensor]
Counts = Sequence[Sequence[int]]  # a number for each kv head, [layer][kv head]

OWN = {"context", "window", "random"}  # kinds of reference queries that are made from the queries of the prefill
MOST_LOGITS = 2**28  # with more logits, kv heads are fitted one by one, and scores are computed in groups of queries


@dataclass
class Studied:
    """A prefilled context, or a part of it, with its reference queries. Compactions of any size can be made from it.

    whole : the entries that are compacted: those of the whole context, or of its first tokens, the part, and its last
        tokens
    queries : reference queries of each layer, [1, Hkv, number of queries, D]; there are none if the policy does not
        choose entries
    scaling : the factor on q . k
    seconds : durations of the prefill and of the computation of the reference queries
    reader : the engine that read the context
    texts : texts of on-policy queries, for each of their kinds. If there are any, `queries` has the other kinds alone
    recorded : the reference queries for a trace (record.py); None if they cannot be recorded
    """

    whole: Context
    queries: list[Tensor]
    scaling: float
    seconds: Stages
    reader: Reader
    texts: list[list[list[int]]] = field(default_factory=list)
    recorded: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the keys, values and biases of `whole`."""
        return self.whole.nbytes

    @property
    def length(self) -> int:
        """Number of tokens of the context."""
        return len(self.whole.tokens)

    def compacted(self, config: PromptCacheConfig, counts: Counts | None = None) -> Context:
        """Compact the context.

        counts : number of entries that each kv head keeps, [layer][kv head], without the first `config.first` and the
            last `config.last` ones; None means the numbers that `planned` (budgets.py) computes from `config`. With
            `heads: global`, only their sum matters
        """
        if config.policy == "full":
            return replace(self.whole, seconds=dict(self.seconds))
        if config.policy == "cartridge":
            return trained(self.whole, config, self.reader, self.seconds)
        if counts is None:
            heads = self.whole.layers[0].keys.shape[1]
            counts = planned(config, self.length, self.whole.compacted_layers, heads, self.whole.model)
        stages = Stages(self.seconds)
        with stages.timed("compaction"):
            layers = self.entries(config, counts)
        sections = recorded(config, [(config.first, self.length - config.last)], [self.recorded])
        return replace(self.whole, layers=layers, fitted=config.fits, seconds=stages, recorded=sections)

    def entries(self, config: PromptCacheConfig, counts: Counts) -> list[LayerEntries]:
        """Return the entries to keep in each layer. The arguments are those of `compacted`."""
        if config.chooses and config.heads == "global":
            counts = competing_counts(self.scores(config), sum(map(sum, counts)))
        if self.texts and config.chooses:
            return self._layerwise(config, counts)
        return [self.layer(config, place, selected) for place, selected in enumerate(counts)]

    def _layerwise(self, config: PromptCacheConfig, counts: Counts) -> list[LayerEntries]:
        """Compact the layers during one pass over `texts`; see LayerwiseView."""

        def compact(layer: int, captured: Tensor) -> LayerEntries:
            queries = list(self.queries)
            queries[layer] = _drawn(torch.cat([queries[layer], captured], dim=2), config)
            return replace(self, queries=queries, texts=[]).layer(config, layer, counts[layer])

        view = LayerwiseView(self.length, self.texts, compact, self.whole.of_windows)
        self.reader.read_layerwise(view)
        return view.layers

    def scores(self, config: PromptCacheConfig) -> Tensor:
        """Return the scores of the N entries that compete in each kv head, float64 [L, Hkv, N].

        With on-policy queries, the scores are those of the other kinds of queries alone.
        """
        layers = []
        for entries, queries in zip(self.whole.layers, self.queries, strict=True):
            competing = _competing(entries, config)
            block = _block(entries, queries, competing, self.scaling)
            layers.append(pooled_score(block, config)[0, :, competing])
        return torch.stack(layers)

    def layer(self, config: PromptCacheConfig, place: int, counts: Sequence[int]) -> LayerEntries:
        """Return the entries to keep in layer `place`. Heads with fewer entries than others are padded with masked
        entries.

        counts : number of entries of each kv head, without the first `config.first` and the last `config.last` ones
        """
        entries, queries = self.whole.layers[place], self.queries[place]
        in_groups = config.policy == "evict" and not config.pursues  # of queries, so memory does not grow with heads
        logits = queries.shape[1] * queries.shape[2] * entries.keys.shape[2]
        if len(set(counts)) == 1 and (in_groups or not config.chooses or logits <= MOST_LOGITS):
            return _compacted(entries, queries, counts[0], config, self.scaling)
        return joined([self.head(config, place, head, count) for head, count in enumerate(counts)])

    def head(self, config: PromptCacheConfig, place: int, head: int, count: int) -> LayerEntries:
        """Implement `Studied.head` of budgets.py. Raises UserError if there are on-policy queries."""
        if self.texts:
            raise UserError("heads cannot be compacted alone with on-policy queries; set it to false", "on_policy")
        head_slice = slice(head, head + 1)
        selected = LayerEntries(*(x[:, head_slice] for x in self.whole.layers[place]))
        return _compacted(selected, self.queries[place][:, head_slice], count, config, self.scaling)


@dataclass
class Prefilled:
    """A context that was read as a whole, with the cache that captured its queries, if a kind of queries needs them."""

    whole: Context
    cache: ContextCache


def prefill(tokens: Sequence[int], config: PromptCacheConfig, reader: Reader, stages: Stages) -> Prefilled:
    """Read a context. Raises NotFiniteError if its keys or values are not finite."""
    with stages.timed("prefill"):
        cache = reader.cache(None, captures=config.chooses and not OWN.isdisjoint(config.queries))
        reader.read([tokens], cache)
        whole = replace(cache.as_context(list(tokens)), model=reader.model)
    for place, entries in enumerate(whole.layers):
        if not bool(entries.keys.isfinite().all() & entries.values.isfinite().all()):
            raise NotFiniteError(
                f"the context's keys or values are not finite in layer {place}: the model's weights, or its "
                "activations in this dtype, are NaN or infinite; use an undamaged checkpoint, or set another dtype"
            )
    return Prefilled(whole, cache)


def study_places(
    prefilled: Prefilled,
    places: Tensor,
    config: PromptCacheConfig,
    reader: Reader,
    on_stage: OnStage,
    stages: Stages,
    release: bool = False,
) -> Studied:
    """Compute the reference queries of the tokens `places`, int64 [n], of a context. All texts see these tokens alone.

    release : True releases the captured queries of the prefill layer by layer
    """
    whole, scaling = prefilled.whole, prefilled.cache.scaling
    if len(places) < len(whole.tokens):
        whole = replace(whole, layers=[_at_places(layer, places) for layer in whole.layers])
    if not config.chooses:
        return Studied(whole, [entries.keys[:, :, :0] for entries in whole.layers], scaling, stages, reader)
    with stages.timed("queries"):
        kinds, caches, on_policy = _queries(config, whole, places, prefilled.cache, reader, on_stage)
        queries = []
        for layer, entries in enumerate(whole.layers):
            joined_kinds = torch.cat([entries.keys[:, :, :0], *(kind(layer) for kind in kinds)], dim=2)
            queries.append(joined_kinds if on_policy else _drawn(joined_kinds, config))
            for cache in [*caches, *([prefilled.cache] if release else [])]:
                cache.forget(layer)
    own = recorded_queries(config, places, reader.group)
    return Studied(whole, queries, scaling, stages, reader, on_policy, own)


def _at_places(entries: LayerEntries, places: Tensor) -> LayerEntries:
    return LayerEntries(*(x[:, :, places.to(x.device)] for x in entries))


# ---- reference queries ----------------------------------------------------------------------------------------------


def _queries(
    config: PromptCacheConfig,
    whole: Context,
    places: Tensor,
    prefilled: ContextCache,
    reader: Reader,
    on_stage: OnStage,
) -> tuple[list[OfLayer], list[ContextCache], list[list[list[int]]]]:
    """Prepare the reference queries of each kind in `config.queries`.

    Returns one function for each kind, the caches of texts that these functions read, and the texts of each kind whose
    queries are on-policy, which has no function. Each function maps a layer to the layer's reference queries
    [1, Hkv, number of queries, D], and must be called in the order of the layers.
    """
    kinds: list[OfLayer] = []
    caches: list[ContextCache] = []
    on_policy: list[list[list[int]]] = []
    for kind in config.queries:
        if kind in ON_POLICY:
            texts = _texts(kind, config, whole, places, reader, on_stage)
            if config.on_policy:
                on_policy.append(texts)
                continue
            caches.append(reader.cache(whole, captures=True))
            reader.read(texts, caches[-1])
            kinds.append(partial(_of_texts, caches[-1], texts, whole))
        elif kind in ("random", "random_plain"):
            generator = torch.Generator().manual_seed(config.seed)
            own = None if kind == "random_plain" else partial(_of_places, prefilled, whole, places)
            kinds.append(partial(_random, reader, own, whole, len(places), generator))
        else:
            selected = places[-config.window :] if kind == "window" else places
            kinds.append(partial(_of_places, prefilled, whole, selected))
    return kinds, caches, on_policy


def _texts(
    kind: str, config: PromptCacheConfig, whole: Context, places: Tensor, reader: Reader, on_stage: OnStage
) -> list[list[int]]:
    """Return the texts of a kind of queries, as token ids that continue the context."""
    if kind == "repeat":
        on_stage("queries, second reading of the context")
        again = places[config.first : len(places) - config.last].tolist()
        return [[*reader.prompts.repeat, *(whole.tokens[place] for place in again)]]
    if kind == "question":
        on_stage("queries, a question")
        return [question(whole, config, reader)]
    on_stage("queries, self-study")
    return [conversation.tokens for conversation in conversations(whole, config, reader)]


def _of_places(cache: ContextCache, whole: Context, places: Tensor, layer: int) -> Tensor:
    """Return the captured queries of the context's tokens `places` in one layer: [1, Hkv, G x number of tokens, D]."""
    captured = cache.captured(layer)
    return by_kv_head(captured[:, :, places.to(captured.device)], whole.layers[layer].keys)


def _of_texts(cache: ContextCache, texts: list[list[int]], whole: Context, layer: int) -> Tensor:
    """Return the captured queries of all tokens of texts, the rows of a cache, in one layer: [1, Hkv, number, D]."""
    rows = zip(cache.captured(layer), texts, strict=True)
    return by_kv_head(torch.cat([q[None, :, : len(text)] for q, text in rows], dim=2), whole.layers[layer].keys)


def _random(
    reader: Reader, own: OfLayer | None, whole: Context, tokens: int, generator: torch.Generator, layer: int
) -> Tensor:
    """Return one normally distributed query for each query of a text in one layer: [1, Hkv, G x tokens, D].

    The queries are multiplied by the weights of the model's query norm, as in the paper (appendix D). For a model
    without query norm, they get the mean norm of the text's queries in each kv head.

    own : function that returns the text's queries in a layer; None means that the queries are not scaled
    """
    keys = whole.layers[layer].keys
    drawn = torch.randn((1, keys.shape[1], reader.group * tokens, keys.shape[3]), generator=generator).to(keys)
    if own is None:
        return drawn
    weight = reader.query_norm(layer)
    if weight is not None:
        return drawn * weight.to(drawn)
    norm = own(layer).norm(dim=-1, keepdim=True).mean(2, keepdim=True)
    return drawn / drawn.norm(dim=-1, keepdim=True) * norm


def _drawn(queries: Tensor, config: PromptCacheConfig) -> Tensor:
    """Return a random subset of at most `config.most_queries` reference queries, the same indices in every kv head."""
    drawn = subset(queries.shape[2], config)
    return queries if drawn is None else queries[:, :, drawn.to(queries.device)]


# ---- kept entries ---------------------------------------------------------------------------------------------------


def _compacted(
    entries: LayerEntries, queries: Tensor, count: int, config: PromptCacheConfig, scaling: float
) -> LayerEntries:
    """Return the entries to keep: the first `config.first` and the last `config.last` unchanged, and `count` others.

    `entries` are all entries of one layer, or of one of its kv heads.
    """
    competing = _competing(entries, config)
    kept = [LayerEntries(*(x[:, :, ~competing] for x in entries))]
    if count:
        block = _block(entries, queries, competing, scaling)
        index, bias, values = _chosen(block, count, config)
        kept.append(LayerEntries(at_slots(entries.keys, index), values, bias, entries.positions.gather(2, index)))
    return LayerEntries(*(torch.cat(pieces, dim=2) for pieces in zip(*kept, strict=True)))


def _competing(entries: LayerEntries, config: PromptCacheConfig) -> Tensor:
    """Return bool [N], True for the entries that compete: all but the first and the last ones."""
    place = torch.arange(entries.keys.shape[2], device=entries.keys.device)
    return (place >= config.first) & (place < len(place) - config.last)


def _block(entries: LayerEntries, queries: Tensor, competing: Tensor, scaling: float) -> Block:
    return Block(entries.keys, entries.values, queries, entries.bias, competing.expand(1, 1, -1), scaling)


def _chosen(block: Block, count: int, config: PromptCacheConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Choose `count` entries of a block to keep. Returns their indices, biases and values, as `match` does."""
    fit = Fit(
        config.select, config.aggregate, config.ridge, config.fit == "paper", config.fit_biases, config.fit_values
    )
    if config.fits and config.pool == 1:
        return match(block, count, fit)
    index = choose(block, count, fit) if config.pursues else _most_attended(block, count, config)
    if config.fits:
        bias, values = refit(block, index, fit)
        if not bool(values.isfinite().all()):
            raise NotFiniteError("a fitted value is not finite")
        return index, bias, values
    return index, block.bias.gather(2, index), at_slots(block.values, index)


@part("selection", detail=True)
def _most_attended(block: Block, count: int, config: PromptCacheConfig) -> Tensor:
    """Return the indices of the `count` entries with the highest pooled scores, as `match` does."""
    order = pooled_score(block, config).sort(dim=-1, descending=True, stable=True)
    return order.indices[..., :count].sort(-1).values


def pooled_score(block: Block, config: PromptCacheConfig) -> Tensor:
    """Return the `attention_score` of N entries in H kv heads, pooled over neighbours that compete: float64 [1, H, N].

    Entries that do not compete get -inf. Raises NotFiniteError for a NaN score.
    """
    score = _score(block, config.aggregate)
    if bool(score.isnan().any()):
        raise NotFiniteError("a NaN score for an entry of the context")
    inside, pool = block.competing[0, 0], config.pool
    own = score[0, :, inside]
    if config.pooling == "max":
        smoothed = F.max_pool1d(own, pool, 1, pool // 2)
    else:
        smoothed = F.avg_pool1d(own, pool, 1, pool // 2, count_include_pad=False)
    return torch.full_like(score, float("-inf")).masked_scatter(inside, smoothed)


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
