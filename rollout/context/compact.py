"""Compaction of a context (Attention Matching, section 3, appendices C.3 and C.4). The context is prefilled, reference
queries are computed, and for each layer the kept entries are chosen and fitted.

A long context is compacted in parts (section 3.5, appendix C.3). Each part gets reference queries of its own, whose
texts see the context's first tokens, the part and the context's last tokens. With `chunking: kv`, the whole context is
read, and the entries of these tokens are taken from it, at their positions. With `chunking: text`, these tokens are
read alone, at positions that begin at 0, and RoPE then turns the kept keys to the part's place in the context. The
entries of the last tokens are then those of the last part, which they follow; the paper does not say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.context.budgets import competing_counts, planned
from rollout.context.cache import Context, ContextCache, LayerEntries, LayerwiseView, by_kv_head, joined
from rollout.context.cartridge import trained
from rollout.context.config import ON_POLICY, RECORDED, Part, PromptCacheConfig
from rollout.context.reader import MOST_QUESTIONS, REQUESTS, Reader, Stages, conversations, moved, question, summarized
from sparse_rl import clock
from sparse_rl.errors import NotFiniteError, UserError
from sparse_rl.matching import Block, ContextRecord, Fit, choose, match, refit
from sparse_rl.methods.am.match import attention_score
from sparse_rl.methods.am.sections import GROUP
from sparse_rl.policies.cache import at_slots

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
    recorded : the reference queries for a trace; None if they cannot be recorded
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
        return self.whole.nbytes

    @property
    def length(self) -> int:
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
        """Return the scores of the N entries that compete in each kv head, float64 [L, Hkv, N], by the queries that
        are not on-policy.
        """
        blocks = [
            _block(*of_layer, config, self.scaling) for of_layer in zip(self.whole.layers, self.queries, strict=True)
        ]
        return torch.stack([pooled_score(block, config)[0, :, block.competing[0, 0]] for block in blocks])

    def layer(self, config: PromptCacheConfig, place: int, counts: Sequence[int]) -> LayerEntries:
        """Return the entries to keep in layer `place`, padded to the longest head: see `compacted`."""
        entries, queries = self.whole.layers[place], self.queries[place]
        in_groups = config.policy == "evict" and not config.pursues  # of queries, so memory does not grow with heads
        logits = queries.shape[1] * queries.shape[2] * entries.keys.shape[2]
        if len(set(counts)) == 1 and (in_groups or not config.chooses or logits <= MOST_LOGITS):
            return _compacted(entries, queries, counts[0], config, self.scaling)
        return joined([self.head(config, place, head, count) for head, count in enumerate(counts)])

    def head(self, config: PromptCacheConfig, place: int, head: int, count: int) -> LayerEntries:
        if self.texts:
            raise UserError("heads cannot be compacted alone with on-policy queries; set it to false", "on_policy")
        own = slice(head, head + 1)
        selected = LayerEntries(*(x[:, own] for x in self.whole.layers[place]))
        return _compacted(selected, self.queries[place][:, own], count, config, self.scaling)


def prefill(
    tokens: Sequence[int], config: PromptCacheConfig, reader: Reader, stages: Stages
) -> tuple[Context, ContextCache]:
    """Read a context. Returns it, and the cache that captured its queries, if a kind of queries needs them. Raises
    NotFiniteError if its keys or values are not finite.
    """
    with stages.timed("prefill"):
        caches = reader.cache(None, captures=config.chooses and not OWN.isdisjoint(config.queries))
        reader.read([tokens], caches)
        whole = replace(caches.of_policy.as_context(list(tokens), caches.of_windows), model=reader.model)
    for place, entries in enumerate(whole.layers):
        if not bool(entries.keys.isfinite().all() & entries.values.isfinite().all()):
            raise NotFiniteError(
                f"the context's keys or values are not finite in layer {place}: the model's weights, or its "
                "activations in this dtype, are NaN or infinite; use an undamaged checkpoint, or set another dtype"
            )
    return whole, caches.of_policy


def study_places(
    whole: Context,
    prefilled: ContextCache,
    places: Tensor,
    config: PromptCacheConfig,
    reader: Reader,
    stages: Stages,
    release: bool = False,
) -> Studied:
    """Compute the reference queries of the tokens `places`, int64 [n], of a context, which alone all texts see. If
    `release`, the captured queries of the prefill are released layer by layer.
    """
    if len(places) < len(whole.tokens):
        whole = replace(whole, layers=[_sliced(layer, places.to(layer.keys.device)) for layer in whole.layers])
    if not config.chooses:
        return Studied(whole, [entries.keys[:, :, :0] for entries in whole.layers], prefilled.scaling, stages, reader)
    with stages.timed("queries"):
        kinds, caches, on_policy = _queries(config, whole, places, prefilled, reader)
        queries = []
        for layer, entries in enumerate(whole.layers):
            joined_kinds = torch.cat([entries.keys[:, :, :0], *(kind(layer) for kind in kinds)], dim=2)
            queries.append(joined_kinds if on_policy else _drawn(joined_kinds, config))
            for cache in [*caches, *([prefilled] if release else [])]:
                cache.forget(layer)
    own = recorded_queries(config, places, reader.group)
    return Studied(whole, queries, prefilled.scaling, stages, reader, on_policy, own)


# ---- reference queries ----------------------------------------------------------------------------------------------


def _queries(
    config: PromptCacheConfig, whole: Context, places: Tensor, prefilled: ContextCache, reader: Reader
) -> tuple[list[OfLayer], list[ContextCache], list[list[list[int]]]]:
    """Return for each kind of `config.queries` a function from a layer to its reference queries [1, Hkv, number, D], to
    be called in the order of the layers; the caches that the functions read; and the texts of each on-policy kind,
    which has no function.
    """
    kinds: list[OfLayer] = []
    caches: list[ContextCache] = []
    on_policy: list[list[list[int]]] = []
    for kind in config.queries:
        if kind in ON_POLICY:
            texts = _texts(kind, config, whole, places, reader)
            if config.on_policy:
                on_policy.append(texts)
                continue
            of_texts = reader.cache(whole, captures=True)
            reader.read(texts, of_texts)
            caches.append(of_texts.of_policy)
            kinds.append(partial(_of_texts, caches[-1], texts, whole))
        elif kind in ("random", "random_plain"):
            generator = torch.Generator().manual_seed(config.seed)
            own = None if kind == "random_plain" else partial(_of_places, prefilled, whole, places)
            kinds.append(partial(_random, reader, own, whole, len(places), generator))
        else:
            selected = places[-config.window :] if kind == "window" else places
            kinds.append(partial(_of_places, prefilled, whole, selected))
    return kinds, caches, on_policy


def _texts(kind: str, config: PromptCacheConfig, whole: Context, places: Tensor, reader: Reader) -> list[list[int]]:
    if kind == "repeat":
        again = places[config.first : len(places) - config.last].tolist()
        return [[*reader.prompts.repeat, *(whole.tokens[place] for place in again)]]
    if kind == "question":
        return [question(whole, config, reader)]
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

    They are multiplied by the weights of the model's query norm, as in the paper (appendix D), or, without one, get the
    mean norm of the text's queries `own` in each kv head. Without `own` they are not scaled.
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


# ---- the record of reference queries in traces ----------------------------------------------------------------------


def subset(count: int, config: PromptCacheConfig) -> Tensor | None:
    """Return the random subset of `config.most_queries` out of `count` reference queries, int64 [n]; None means all."""
    if count <= config.most_queries:
        return None
    places = torch.randperm(count, generator=torch.Generator().manual_seed(config.seed))[: config.most_queries]
    return places.sort().values


def recorded_queries(config: PromptCacheConfig, places: Tensor, group: int) -> Tensor | None:
    """Return the reference queries of a part of a context whose texts see the tokens `places`, as
    `ContextRecord.sections` takes them: int64 [n, 2]; None if they cannot be recorded.
    """
    if not set(config.queries) <= {*RECORDED}:
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
    """Return the trace sections from which a trainer recomputes the fits of parts, each from a position to one after
    it, to their `recorded_queries`; {} if this is not possible.
    """
    known_queries = [of_part for of_part in queries if of_part is not None]
    if not config.fits or config.fit == "paper" or len(known_queries) < len(parts):
        return {}
    record = ContextRecord(config.ridge, config.pursues, config.fit_biases, config.fit_values)
    return record.sections([*(start for start, _ in parts), parts[-1][1]], known_queries)


def stored_queries(config: PromptCacheConfig, tokens: int, group: int) -> int:
    """Return the maximum number of reference queries per kv head that are stored in all layers until the compaction:
    those of all parts, after a random subset was taken of each, without on-policy queries and instructions.
    """
    if not config.chooses:
        return 0
    parts = config.parts(tokens)
    own = max(part.end - part.start for part in parts)  # tokens of the longest part
    read = own + config.first + config.last
    study = (len(REQUESTS) + MOST_QUESTIONS) * config.study_samples * config.study_tokens
    numbers = {"self_study": study, "question": config.study_tokens, "window": min(config.window, read), "repeat": own}
    kinds = [kind for kind in config.queries if not (config.on_policy and kind in ON_POLICY)]
    count = group * sum(numbers.get(kind, read) for kind in kinds)
    return len(parts) * (count if config.on_policy else min(count, config.most_queries))


# ---- kept entries ---------------------------------------------------------------------------------------------------


def _compacted(
    entries: LayerEntries, queries: Tensor, count: int, config: PromptCacheConfig, scaling: float
) -> LayerEntries:
    """Return the entries to keep of a layer, or of one of its kv heads: the first `config.first` and the last
    `config.last` unchanged, and `count` others.
    """
    block = _block(entries, queries, config, scaling)
    kept = [_sliced(entries, ~block.competing[0, 0])]
    if count:
        index, bias, values = _chosen(block, count, config)
        kept.append(LayerEntries(at_slots(entries.keys, index), values, bias, entries.positions.gather(2, index)))
    return LayerEntries(*(torch.cat(pieces, dim=2) for pieces in zip(*kept, strict=True)))


def _block(entries: LayerEntries, queries: Tensor, config: PromptCacheConfig, scaling: float) -> Block:
    place = torch.arange(entries.keys.shape[2], device=entries.keys.device)
    competing = (place >= config.first) & (place < len(place) - config.last)
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


@clock.part("selection", detail=True)
def _most_attended(block: Block, count: int, config: PromptCacheConfig) -> Tensor:
    order = pooled_score(block, config).sort(dim=-1, descending=True, stable=True)
    return order.indices[..., :count].sort(-1).values


def pooled_score(block: Block, config: PromptCacheConfig) -> Tensor:
    """Return the `attention_score` of N entries in H kv heads, pooled over neighbours that compete, -inf for entries
    that do not: float64 [1, H, N].
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


@dataclass
class StudiedParts:
    """The parts of a context, each with its own reference queries. Compacts them as `Studied` does.

    tokens : token ids of the whole context
    first, last : number of tokens at the context's beginning and end, which all parts share
    seconds : duration of each stage, summed over the parts
    read_whole : the context that was read as a whole; None if each part was read alone
    """

    tokens: list[int]
    first: int
    last: int
    parts: list[tuple[Part, Studied]]
    reader: Reader
    seconds: Stages
    read_whole: Context | None

    @property
    def whole(self) -> Context:
        """All entries of all parts, at their positions in the context."""
        if self.read_whole is not None:
            return self.read_whole
        first, last = self.first, self.last
        of_parts = []
        for _, studied in self.parts:
            count = studied.whole.entries
            order = [*range(first), *range(count - last, count), *range(first, count - last)]
            of_parts.append([_sliced(layer, order) for layer in studied.whole.layers])
        return Context(self.tokens, self._joined(of_parts), True, model=self.parts[0][1].whole.model)

    @property
    def nbytes(self) -> int:
        entries = self.parts[0][1].whole
        return entries.nbytes // entries.entries * len(self.tokens)

    @property
    def length(self) -> int:
        return len(self.tokens)

    def compacted(self, config: PromptCacheConfig, counts: Counts | None = None) -> Context:
        """Compact the context; see `Studied.compacted`. With `heads: global`, the heads compete in each part."""
        if config.policy == "full":
            return replace(self.whole, seconds=dict(self.seconds))
        if config.policy == "cartridge":
            return trained(self.whole, config, self.reader, self.seconds)
        one = self.parts[0][1].whole
        if counts is None:
            counts = planned(config, self.length, one.compacted_layers, one.layers[0].keys.shape[1], one.model)
        stages = Stages(self.seconds)
        with stages.timed("compaction"):
            of_parts = [
                studied.entries(config, [[part.share(count) for count in of_layer] for of_layer in counts])
                for part, studied in self.parts
            ]
            layers = [without_padding(layer) for layer in self._joined(of_parts)]
        if self.read_whole is None:
            return Context(self.tokens, layers, True, stages, model=one.model)
        parts = [(self.first + part.start, self.first + part.end) for part, _ in self.parts]
        sections = recorded(config, parts, [studied.recorded for _, studied in self.parts])
        return replace(self.read_whole, layers=layers, fitted=config.fits, seconds=stages, recorded=sections)

    def scores(self, config: PromptCacheConfig) -> Tensor:
        return torch.cat([studied.scores(config) for _, studied in self.parts], dim=2)

    def head(self, config: PromptCacheConfig, place: int, head: int, count: int) -> LayerEntries:
        of_parts = [[studied.head(config, place, head, part.share(count))] for part, studied in self.parts]
        return self._joined(of_parts)[0]

    def _joined(self, of_parts: Sequence[Sequence[LayerEntries]]) -> list[LayerEntries]:
        """Join the parts' entries of each layer. In each part, and in the result, the first and last ones stand before
        the parts' own.
        """
        edges, layers = self.first + self.last, []
        for of_layer in zip(*of_parts, strict=True):
            moved = [self._moved(x, part.start) for x, (part, _) in zip(of_layer, self.parts, strict=True)]
            first, last = _sliced(moved[0], slice(0, self.first)), _sliced(moved[-1], slice(self.first, edges))
            pieces = [first, last, *(_sliced(entries, slice(edges, None)) for entries in moved)]
            layers.append(LayerEntries(*(torch.cat(tensors, dim=2) for tensors in zip(*pieces, strict=True))))
        return layers

    def _moved(self, entries: LayerEntries, by: int) -> LayerEntries:
        """Return the entries of a part that was read alone, at positions that are greater by `by`."""
        if self.read_whole is not None or not by:
            return entries
        positions, rotary = entries.positions + by, self.reader.engine.model.get_decoder().rotary_emb
        return replace(entries, keys=moved(rotary, entries.keys, entries.positions, positions), positions=positions)


def _sliced(entries: LayerEntries, selected: slice | list[int] | Tensor) -> LayerEntries:
    return LayerEntries(*(x[:, :, selected] for x in entries))


def without_padding(entries: LayerEntries) -> LayerEntries:
    """Remove masked entries, so that the padding of a layer follows its longest kv head alone."""
    real = entries.bias[0] > float("-inf")
    if bool(real.all()):
        return entries
    heads = range(real.shape[0])
    return joined([LayerEntries(*(x[:, head : head + 1, real[head]] for x in entries)) for head in heads])


def study(tokens: Sequence[int], config: PromptCacheConfig, reader: Reader) -> Studied | StudiedParts:
    """Read a context and compute its reference queries, other than on-policy queries, part by part."""
    tokens, stages = list(tokens), Stages()
    config.kept(len(tokens))  # raises UserError if the context is too short
    if config.summary is not None:
        with stages.timed("summary"):
            tokens, config = summarized(tokens, config, reader)
    split = config.parts(len(tokens)) if config.chooses else []
    apart = config.by_text and len(split) > 1
    if not apart:
        whole, cache = prefill(tokens, config, reader, stages)
    if len(split) <= 1:
        return study_places(whole, cache, torch.arange(len(tokens)), config, reader, stages, release=True)
    parts = []
    for part in split:
        own = [*range(config.first), *range(config.first + part.start, config.first + part.end)]
        places = torch.tensor([*own, *range(len(tokens) - config.last, len(tokens))])
        if apart:
            text = [tokens[place] for place in places.tolist()]
            (whole, cache), places = prefill(text, config, reader, stages), torch.arange(len(text))
        release = apart or part is split[-1]
        parts.append((part, study_places(whole, cache, places, config, reader, stages, release)))
    return StudiedParts(tokens, config.first, config.last, parts, reader, stages, None if apart else whole)
