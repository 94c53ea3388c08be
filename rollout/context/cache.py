"""Context, the kept entries of a compacted context; ContextCache, the cache of sequences that continue it.

Every sequence of a batch attends to the same entries of the context, with their biases, and to its own tokens after
them, which are never evicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl.attention.kernels.sdpa import computing_dtype, sdpa
from sparse_rl.attention.windows.cache import WindowCache, WindowedCache
from sparse_rl.errors import UserError
from sparse_rl.models.identity import UNKNOWN, Identity
from sparse_rl.trace import NEVER, EvictionTrace

GROW = 128  # number of slots added at a time while tokens are decoded one by one
MOST_LOGITS = 2**26  # with more logits, the queries are split into groups, because the mask is as large as the logits


@dataclass(frozen=True)
class LayerEntries:
    """Entries of one layer of a context: N entries for each of Hkv kv heads of size D.

    Keys (after RoPE) and values are [1, Hkv, N, D]. The bias, float32 [1, Hkv, N], is added to the attention logits.
    Positions are int64 [1, Hkv, N].
    """

    keys: Tensor
    values: Tensor
    bias: Tensor
    positions: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.keys, self.values, self.bias, self.positions))


def joined(heads: Sequence[LayerEntries]) -> LayerEntries:
    """Join kv heads with different numbers of entries into one layer.

    Padding has the bias -inf, and otherwise repeats the head's first entry, or is 0 if the head has none.
    """
    most, padded = max(head.keys.shape[2] for head in heads), []
    for head in heads:
        missing = most - head.keys.shape[2]
        keys, values, bias, positions = (_repeated(x, missing) for x in head)
        bias[:, :, most - missing :] = float("-inf")
        padded.append((keys, values, bias, positions))
    return LayerEntries(*(torch.cat(parts, dim=1) for parts in zip(*padded, strict=True)))


def _repeated(x: Tensor, count: int) -> Tensor:
    """Append `count` copies of the first entry of x [1, Hkv, N, ...], or zeros if N is 0."""
    first = x[:, :, :1] if x.shape[2] else x.new_zeros(*x.shape[:2], 1, *x.shape[3:])
    return torch.cat([x, first.repeat_interleave(count, dim=2)], dim=2)


@dataclass(frozen=True)
class Context:
    """A compacted context, which any number of sequences can continue.

    tokens : token ids of the whole context
    layers : kept entries of each layer without a sliding window
    fitted : True if entries differ from those that the model computes as it reads the context: biases and values were
        fitted, or parts of the context were read alone
    seconds : stage of the compaction -> its duration in seconds
    recorded : trace sections from which a trainer can recompute the fits (record.py); {} if there are none
    model : the model that made the context
    of_windows : the last tokens, in the layers with a sliding window, which no compaction changes; None without them
    """

    tokens: list[int]
    layers: list[LayerEntries]
    fitted: bool
    seconds: dict[str, float] = field(default_factory=dict)
    recorded: Mapping[str, Tensor] = field(default_factory=dict)
    model: Identity = UNKNOWN
    of_windows: WindowCache | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and biases of the entries, without sliding windows."""
        return sum(t.nbytes for layer in self.layers for t in (layer.keys, layer.values, layer.bias))

    @property
    def entries(self) -> int:
        """Maximum number of entries of a kv head in any layer."""
        return max(layer.keys.shape[2] for layer in self.layers)

    @property
    def compacted_layers(self) -> list[int]:
        """Indices in the model of the layers of `layers`, which have no sliding window."""
        if self.of_windows is None:
            return list(range(len(self.layers)))
        return [layer for layer, window in enumerate(self.of_windows.sizes) if not window]

    def check_model(self, shape: tuple[int, int, int], windows: Sequence[int], model: Identity) -> None:
        """Raise UserError if the context was not made by this model.

        shape : (layers without a sliding window, kv heads per layer, head size) of the model
        windows : the sliding window of each layer of the model, 0 for a layer without one
        model : the model; weights whose fingerprint is unknown are not compared
        """
        _, kv_heads, _, dim = self.layers[0].keys.shape
        if (own := (len(self.layers), kv_heads, dim)) != shape:
            raise UserError(f"the context is of another model: layers, kv heads and head size are {own}, not {shape}")
        sizes = [0] * len(self.layers) if self.of_windows is None else self.of_windows.sizes
        if sizes != list(windows):
            raise UserError(f"the context is of another model: sliding windows are {sizes}, not {list(windows)}")
        self.model.check(model, "the context")

    def trace(self, length: int) -> EvictionTrace:
        """Return the trace of a sequence of `length` tokens, including the context, that continues this context. The
        trace has no layers with a sliding window.

        If `fitted`, the trace gets the section `compacted_at`, and the sections `recorded`. No trainer can replay a
        trace with `compacted_at` alone.
        """
        evictions = F.pad(self.evict_at(), (0, length - len(self.tokens)), value=NEVER)
        sections = {"compacted_at": torch.tensor([len(self.tokens)], dtype=torch.int32), **self.recorded}
        return EvictionTrace.recorded(evictions, sections if self.fitted else {})

    def unrecorded(self) -> Context:
        """Return the context with traces that no trainer can replay, as for a model whose experts are not recorded."""
        return replace(self, fitted=True, recorded={})

    def evict_at(self) -> Tensor:
        """Return the eviction positions of the context's tokens: int32 [L, Hkv, number of tokens].

        The position is NEVER for kept tokens, and the context's length for all others.
        """
        count = len(self.tokens)
        evictions = []
        for layer in self.layers:
            whole = torch.full((layer.keys.shape[1], count), count, dtype=torch.int32)
            evictions.append(whole.scatter_(1, layer.positions[0].cpu(), NEVER))
        return torch.stack(evictions)


class ContextCache:
    """The cache of B sequences that continue one context. Implements `Cache` (sparse_rl/policies/cache.py).

    context : the context; None means that there is none, and sequences begin at position 0
    captures : True to store the queries of all tokens, which `captured` then returns
    """

    piece: int | None = 1024

    def __init__(self, context: Context | None, captures: bool = False) -> None:
        self.context, self.captures = context, captures
        self.past = 0 if context is None else len(context.tokens)
        self.own: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys, values of own tokens: [B, Hkv, C, D] each
        self._queries: dict[int, list[Tensor]] = {}
        self.scaling = 0.0  # the factor on q . k, set by the first forward pass
        self.lengths: list[int] = []  # number of each row's own tokens, without the context

    @property
    def seen(self) -> list[int]:
        """Number of tokens that each row has seen, including the context."""
        return [self.past + n for n in self.lengths]

    # ---- the engine's side ----------------------------------------------------------------------------------------

    def begin_prefill(self, prompt_lengths: Sequence[int], device: torch.device) -> None:
        """Prepare for a forward pass over the next tokens of each row, right-padded to equal length.

        prompt_lengths : number of tokens of each row in this pass; 0 for a row whose prompt has already ended

        A long prompt may be read in several passes.
        """
        self._starts_at(self.lengths or [0] * len(prompt_lengths), device)
        self.lengths = [held + n for held, n in zip(self._starts, prompt_lengths, strict=True)]

    def begin_decode(self, active: Sequence[bool], device: torch.device) -> None:
        """Prepare for a forward pass over one token per row; rows that are not active are frozen."""
        self.lengths = [n + a for n, a in zip(self.lengths, active, strict=True)]
        self._starts_at([n - 1 for n in self.lengths], device)

    def _starts_at(self, starts: list[int], device: torch.device) -> None:
        """Set the slot in each row at which the tokens of the next forward pass begin."""
        self._starts, self._at = starts, torch.tensor(starts, device=device)[:, None]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row may be repeated."""
        index = torch.tensor(list(rows), device=next(iter(self.own.values()))[0].device)
        self.own = {layer: (keys[index], values[index]) for layer, (keys, values) in self.own.items()}
        self.lengths = [self.lengths[row] for row in rows]

    def fork(self, rows: Sequence[int]) -> ContextCache:
        """Return a separate cache with these rows, in this order, after the same context; see `select`."""
        forked = ContextCache(self.context)
        forked.own, forked.lengths = dict(self.own), list(self.lengths)
        forked.select(rows)
        return forked

    def as_context(self, tokens: list[int]) -> Context:
        """Return the entries of the only row, which has read `tokens` without a context, as a whole context."""
        layers = []
        for pair in self.own.values():
            keys, values = (x[:, :, : len(tokens)] for x in pair)
            positions = torch.arange(len(tokens), device=keys.device).expand(keys.shape[:3])
            layers.append(LayerEntries(keys, values, torch.zeros(keys.shape[:3], device=keys.device), positions))
        return Context(tokens, layers, False)

    def captured(self, layer: int) -> Tensor:
        """Return one layer's queries, after RoPE, of all T own tokens so far: [B, Hq, T, D]. Requires `captures`."""
        return torch.cat(self._queries[layer], dim=2)

    def forget(self, layer: int) -> None:
        """Release the captured queries of one layer."""
        self._queries.pop(layer, None)

    def queries(self, layer: int) -> Tensor:
        """Raise UserError: unlike an EvictingCache, this cache does not keep the last queries [B, Hq, W, D]."""
        raise UserError("the cache of a compacted context keeps no last queries")

    def trace(self, row: int, length: int) -> EvictionTrace:
        """Return the trace of a row of `length` tokens, including the context. The trace is the same for all rows."""
        assert self.context is not None  # sampling always has a context
        return self.context.trace(length)

    def allocated_bytes(self) -> int:
        """Bytes allocated for the keys and values of all rows, plus the bytes of the context."""
        own = sum(t.untyped_storage().nbytes() for pair in self.own.values() for t in pair)
        return own + (0 if self.context is None else self.context.nbytes)

    # ---- the attention's side -------------------------------------------------------------------------------------

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store the keys and values of T new tokens per row, and compute their attention.

        Each query attends to the context's entries and to the row's own tokens up to the query's token.

        query : [B, Hq, T, D], after RoPE
        key, value : [B, Hkv, T, D], keys after RoPE
        scaling : the factor on q . k

        Returns the attention output, [B, Hq, T, D].
        """
        self.scaling = scaling
        if self.captures:
            self._queries.setdefault(layer, []).append(query)
        at = self._at + torch.arange(key.shape[2], device=key.device)
        keys, values = self._store(layer, key.to(value.dtype), value, at)
        past = None if self.context is None else self.context.layers[layer]
        return attention(query, keys, values, at, past, scaling)

    def _store(self, layer: int, key: Tensor, value: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, Hkv, T, D] of T new tokens at slots `at` [B, T].

        Returns the keys and the values of all own tokens in this layer, [B, Hkv, C, D] each, for C slots.
        """
        keys, values = self.own.get(layer) or (key[:, :, :0], value[:, :, :0])
        missing = max(self._starts) + key.shape[2] - keys.shape[2]
        if missing > 0:
            extra = missing if key.shape[2] > 1 else GROW
            keys, values = (F.pad(x, (0, 0, 0, extra)) for x in (keys, values))
        rows = torch.arange(len(key), device=key.device)[:, None]
        keys[rows, :, at], values[rows, :, at] = key.transpose(1, 2), value.transpose(1, 2)
        self.own[layer] = keys, values
        return keys, values


class WindowedContextCache(WindowedCache):
    """A ContextCache beside the sliding windows of the other layers."""

    def as_context(self, tokens: list[int]) -> Context:
        """See `ContextCache.as_context`."""
        return replace(self.inner.as_context(tokens), of_windows=self.of_windows)


def cache_after(context: Context | None, windows: Sequence[int], captures: bool = False) -> Any:
    """Return the cache of sequences that continue a context, or that begin without one.

    windows : the sliding window of each layer of the model, 0 for a layer without one
    captures : see `ContextCache`
    """
    cache = ContextCache(context, captures)
    if not any(windows):
        return cache
    before = None if context is None else context.of_windows
    return WindowedContextCache(cache, WindowCache(windows) if before is None else before.fork([0]))


def attention(
    query: Tensor, keys: Tensor, values: Tensor, at: Tensor, past: LayerEntries | None, scaling: float
) -> Tensor:
    """Return the attention output [B, Hq, T, D] of T queries per row to a context and to the row's own tokens.

    query : [B, Hq, T, D], after RoPE
    keys, values : [B, Hkv, C, D], of all own tokens
    at : [B, T], slots of the queries; a query sees the own tokens up to its slot
    past : the context's entries in this layer; None means that there is no context
    scaling : the factor on q . k
    """
    batch, heads = keys.shape[:2]
    slots = torch.arange(keys.shape[2], device=keys.device)
    if past is not None:
        keys = torch.cat([past.keys.expand(batch, -1, -1, -1), keys], dim=2)
        values = torch.cat([past.values.expand(batch, -1, -1, -1), values], dim=2)
    # The G query heads of a kv head become further queries of one head, so that only the mask is repeated.
    grouped = query.unflatten(1, (heads, -1))
    at_once = max(1, MOST_LOGITS // (batch * query.shape[1] * keys.shape[2]))
    outs = []
    for some_queries, places in zip(grouped.split(at_once, dim=3), at.split(at_once, dim=1), strict=True):
        mask = _mask(places, slots, past, computing_dtype(query, values)).repeat(1, 1, some_queries.shape[2], 1)
        out = sdpa(some_queries.flatten(2, 3), keys, values, scaling, mask)
        outs.append(out.unflatten(2, some_queries.shape[2:4]))
    return torch.cat(outs, dim=3).flatten(1, 2)


def _mask(at: Tensor, slots: Tensor, past: LayerEntries | None, dtype: torch.dtype) -> Tensor:
    """Return the mask that is added to the logits of queries: the context's biases, then 0 or -inf for own slots.

    at : [B, T], slots of the T queries of each row
    slots : [C], all slots for own tokens; a query sees the slots up to its own
    past : the context's N entries in this layer; None means that there is no context

    Returns [B, Hkv, T, N + C], or [B, 1, T, C] without a context.
    """
    mask = torch.zeros(*at.shape, len(slots), dtype=dtype, device=at.device)
    mask = mask.masked_fill_(slots > at[..., None], float("-inf"))[:, None]
    if past is None:
        return mask
    bias = past.bias.to(dtype)[:, :, None].expand(len(at), -1, at.shape[1], -1)
    return torch.cat([bias, mask.expand(-1, bias.shape[1], -1, -1)], dim=3)
