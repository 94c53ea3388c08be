"""Context, the kept entries of a compacted context, and the caches of sequences that continue it; contexts as files.

Every sequence of a batch attends to the same entries of the context, with their biases, and to its own tokens after
them, which are never evicted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl.attention.interface import KVView
from sparse_rl.attention.views import CacheMap, map_of_caches
from sparse_rl.attention.windows import WindowCache
from sparse_rl.config import NonNegativeInt, Source, coerce
from sparse_rl.errors import NotWrittenError, UserError, reason
from sparse_rl.kernels.exact import computing_dtype, sdpa
from sparse_rl.models.weights import UNKNOWN, Identity
from sparse_rl.policies.cache import cache_bytes
from sparse_rl.trace import NEVER, EvictionTrace
from sparse_rl.trace.files import read_sealed, write_sealed

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
    """Join kv heads with different numbers of entries into one layer. Padding has the bias -inf, and otherwise repeats
    the head's first entry, or is 0 if the head has none.
    """

    def repeated(x: Tensor, count: int) -> Tensor:
        first = x[:, :, :1] if x.shape[2] else x.new_zeros(*x.shape[:2], 1, *x.shape[3:])
        return torch.cat([x, first.repeat_interleave(count, dim=2)], dim=2)

    most, padded = max(head.keys.shape[2] for head in heads), []
    for head in heads:
        missing = most - head.keys.shape[2]
        keys, values, bias, positions = (repeated(x, missing) for x in head)
        bias[:, :, most - missing :] = float("-inf")
        padded.append((keys, values, bias, positions))
    return LayerEntries(*(torch.cat(parts, dim=1) for parts in zip(*padded, strict=True)))


@dataclass(frozen=True)
class Context:
    """A compacted context, which any number of sequences can continue.

    tokens : token ids of the whole context
    layers : kept entries of each layer without a sliding window
    fitted : True if entries differ from those that the model computes as it reads the context: biases and values were
        fitted, or parts of the context were read alone
    seconds : stage of the compaction -> its duration in seconds
    recorded : trace sections from which a trainer can recompute the fits (compact.py); {} if there are none
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

        shape, windows : its (layers without a sliding window, kv heads per layer, head size), and its sliding windows
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
        """Return the trace of a sequence of `length` tokens, including the context, that continues this context, in the
        layers without a sliding window. If `fitted`, the trace gets the sections `compacted_at` and `recorded`. No
        trainer can replay a trace with `compacted_at` alone.
        """
        evict_at = F.pad(self.evict_at(), (0, length - len(self.tokens)), value=NEVER)
        sections = {"compacted_at": torch.tensor([len(self.tokens)], dtype=torch.int32), **self.recorded}
        return EvictionTrace.recorded(evict_at, sections if self.fitted else {})

    def unrecorded(self) -> Context:
        """Return the context with traces that no trainer can replay, as for a model whose experts are not recorded."""
        return replace(self, fitted=True, recorded={})

    def evict_at(self) -> Tensor:
        """Return int32 [L, Hkv, number of tokens]: NEVER for kept tokens, the context's length for all others."""
        count, layers = len(self.tokens), self.layers
        evict_at = torch.full((len(layers), layers[0].keys.shape[1], count), count, dtype=torch.int32)
        for of_layer, layer in zip(evict_at, layers, strict=True):
            of_layer.scatter_(1, layer.positions[0].cpu(), NEVER)
        return evict_at


def context_bytes(entries: int, layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Return the bytes of a context with `entries` entries per kv head: keys, values, float32 biases, int64
    positions.
    """
    return cache_bytes(entries, layers, kv_heads, head_dim, itemsize) + 12 * layers * kv_heads * entries


class ContextCache(KVView):
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

    def begin_prefill(self, prompt_lengths: Sequence[int], device: torch.device) -> None:
        """Prepare for a forward pass over the next tokens of each row, right-padded to equal length; 0 for a row whose
        prompt has already ended.
        """
        self._starts_at(self.lengths or [0] * len(prompt_lengths), device)
        self.lengths = [held + n for held, n in zip(self._starts, prompt_lengths, strict=True)]

    def begin_decode(self, active: Sequence[bool], device: torch.device) -> None:
        """Prepare for a forward pass over one token per row; rows that are not active are frozen."""
        self.lengths = [n + a for n, a in zip(self.lengths, active, strict=True)]
        self._starts_at([n - 1 for n in self.lengths], device)

    def _starts_at(self, starts: list[int], device: torch.device) -> None:
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

    def as_context(self, tokens: list[int], of_windows: WindowCache | None) -> Context:
        """Return the entries of the only row, which has read `tokens` without a context, as a whole context."""
        layers = []
        for pair in self.own.values():
            keys, values = (x[:, :, : len(tokens)] for x in pair)
            positions = torch.arange(len(tokens), device=keys.device).expand(keys.shape[:3])
            layers.append(LayerEntries(keys, values, torch.zeros(keys.shape[:3], device=keys.device), positions))
        return Context(tokens, layers, False, of_windows=of_windows)

    def captured(self, layer: int) -> Tensor:
        """Return one layer's queries, after RoPE, of all T own tokens so far: [B, Hq, T, D]. Requires `captures`."""
        return torch.cat(self._queries[layer], dim=2)

    def forget(self, layer: int) -> None:
        """Release the captured queries of one layer."""
        self._queries.pop(layer, None)

    def trace(self, row: int, length: int) -> EvictionTrace:
        """Return the trace of a row of `length` tokens, including the context."""
        assert self.context is not None  # sampling always has a context
        return self.context.trace(length)

    def allocated_bytes(self) -> int:
        """Bytes allocated for the keys and values of all rows, plus the bytes of the context."""
        own = sum(t.untyped_storage().nbytes() for pair in self.own.values() for t in pair)
        return own + (0 if self.context is None else self.context.nbytes)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store `key` and `value` [B, Hkv, T, D] of T new tokens per row. Returns the attention output of `query`
        [B, Hq, T, D], after RoPE, to the context's entries and to the row's own tokens up to the query's.
        """
        self.scaling = scaling
        if self.captures:
            self._queries.setdefault(layer, []).append(query)
        at = self._at + torch.arange(key.shape[2], device=key.device)
        keys, values = self._store(layer, key.to(value.dtype), value, at)
        past = None if self.context is None else self.context.layers[layer]
        return attention(query, keys, values, at, past, scaling)

    def _store(self, layer: int, key: Tensor, value: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Store T new tokens at slots `at` [B, T]. Returns keys and values of all own tokens, [B, Hkv, C, D] each."""
        keys, values = self.own.get(layer) or (key[:, :, :0], value[:, :, :0])
        missing = max(self._starts) + key.shape[2] - keys.shape[2]
        if missing > 0:
            extra = missing if key.shape[2] > 1 else GROW
            keys, values = (F.pad(x, (0, 0, 0, extra)) for x in (keys, values))
        rows = torch.arange(len(key), device=key.device)[:, None]
        keys[rows, :, at], values[rows, :, at] = key.transpose(1, 2), value.transpose(1, 2)
        self.own[layer] = keys, values
        return keys, values


def cache_after(context: Context | None, windows: Sequence[int], captures: bool = False) -> CacheMap:
    """Return the cache of sequences that continue a context, or that begin without one, for a model with these sliding
    windows, 0 for a layer without one. captures : see `ContextCache`
    """
    before = None if context is None else context.of_windows
    of_windows = WindowCache(windows) if before is None else before.fork([0])
    return map_of_caches(ContextCache(context, captures), of_windows)


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
    """Return the mask that is added to the logits of queries at the slots `at` [B, T]: the context's N biases, if there
    is one, then 0 or -inf for the C own `slots`: [B, Hkv, T, N + C], or [B, 1, T, C].
    """
    mask = torch.zeros(*at.shape, len(slots), dtype=dtype, device=at.device)
    mask = mask.masked_fill_(slots > at[..., None], float("-inf"))[:, None]
    if past is None:
        return mask
    bias = past.bias.to(dtype)[:, :, None].expand(len(at), -1, at.shape[1], -1)
    return torch.cat([bias, mask.expand(-1, bias.shape[1], -1, -1)], dim=3)


# ---- on-policy reference queries ------------------------------------------------------------------------------------


class LayerwiseView(KVView):
    """The `kv_view` of one forward pass over texts that continue a context, and compact it layer by layer (Attention
    Matching, section 3.1 and appendix C.4).

    In each layer, attention takes the queries, compacts the layer with them, and then attends to the compacted entries.
    A layer needs the queries of all tokens first, so the texts are not read in pieces, but packed into one row. Each
    text begins at the position after the context, and sees the compacted entries and its own tokens, but no other text.

    past : number of tokens of the whole context
    texts : the texts of each kind of reference queries, as token ids
    compact : function (layer, reference queries [1, Hkv, number of queries, D]) -> the entries of the compacted layer;
        layers with a sliding window are not counted
    of_windows : the context's tokens in the layers with a sliding window, which stay as they are

    After the pass, `layers` has the entries of all compacted layers.
    """

    def __init__(
        self,
        past: int,
        texts: Sequence[Sequence[list[int]]],
        compact: Callable[[int, Tensor], LayerEntries],
        of_windows: WindowCache | None = None,
    ) -> None:
        self.past, self.texts, self.compact, self.of_windows = past, texts, compact, of_windows
        self.layers: list[LayerEntries] = []
        flat = [text for kind in texts for text in kind]
        self.ids = [token for tokens in flat for token in tokens]
        self.positions = [past + place for tokens in flat for place in range(len(tokens))]
        self._lengths = [len(tokens) for tokens in flat]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Compact the layer with the texts' queries, [1, Hq, T, D] after RoPE, and return their attention output."""
        queries, keys, values = (x.split(self._lengths, dim=2) for x in (query, key.to(value.dtype), value))
        if self.of_windows is not None and self.of_windows.sizes[layer]:
            of_windows, start = self.of_windows, torch.tensor([self.past], device=key.device)
            of_texts = zip(queries, keys, values, strict=True)
            return torch.cat([of_windows.after(layer, q, k, v, scaling, start) for q, k, v in of_texts], dim=2)
        remaining, kinds = iter(queries), []
        for texts in self.texts:
            kinds.append(by_kv_head(torch.cat([next(remaining) for _ in texts], dim=2), key))
        self.layers.append(self.compact(len(self.layers), torch.cat(kinds, dim=2)))
        outs = []
        for q, k, v in zip(queries, keys, values, strict=True):
            at = torch.arange(q.shape[2], device=q.device)[None]
            outs.append(attention(q, k, v, at, self.layers[-1], scaling))
        return torch.cat(outs, dim=2)


def by_kv_head(query: Tensor, keys: Tensor) -> Tensor:
    """Group the queries of T tokens by the kv head of `keys`: [1, Hq, T, D] -> [1, Hkv, G x T, D]."""
    return query.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)


# ---- files ----------------------------------------------------------------------------------------------------------
#
# tokens                                     int64 [T], token ids of the whole context
# layers.N.{keys, values, bias, positions}   entries of the N-th layer without a sliding window, as in LayerEntries
# windows.N.{keys, values}                   tokens of layer N, which has a sliding window, as in WindowCache
# recorded.NAME                              trace sections of the fits, if they can be replayed
# metadata                                   fitted, seconds, model (name and fingerprint), windows (JSON)
#
# Version 2 of the format has no sliding windows. Contexts without them are still written in it.

FORMAT = "sparse_rl.context"
FORMAT_VERSION, WITHOUT_WINDOWS = "3", "2"
RECORDED, WINDOWS = "recorded.", "windows."
PARTS = tuple(part.name for part in fields(LayerEntries))


def save_context(path: str | Path, context: Context) -> None:
    """Write a context to one safetensors file. Raises NotWrittenError if the file cannot be written."""
    tensors = {"tokens": torch.tensor(context.tokens)}
    for number, layer in enumerate(context.layers):
        # Cloned, because layers may share memory, which safetensors rejects.
        tensors |= {
            f"layers.{number}.{name}": x.cpu().clone().contiguous() for name, x in zip(PARTS, layer, strict=True)
        }
    tensors |= {RECORDED + name: values.clone().contiguous() for name, values in context.recorded.items()}
    texts = {"fitted": context.fitted, "seconds": context.seconds, "model": asdict(context.model)}
    version = WITHOUT_WINDOWS
    if context.of_windows is not None:
        version, texts["windows"] = FORMAT_VERSION, context.of_windows.sizes
        for number, pair in context.of_windows.layers.items():
            names = (f"{WINDOWS}{number}.{name}" for name in ("keys", "values"))
            tensors |= {name: x.cpu().clone().contiguous() for name, x in zip(names, pair, strict=True)}
    metadata = {name: json.dumps(value) for name, value in texts.items()}
    try:
        write_sealed(path, tensors, format=FORMAT, format_version=version, **metadata)
    except Exception as error:  # safetensors raises its own errors for a full disk and for a missing folder
        raise NotWrittenError(str(path), reason(error)) from error


def load_context(path: str | Path, device: str | torch.device = "cpu") -> Context:
    """Read a context that `save_context` wrote, and move its entries to `device`.

    Raises UserError if the file is missing, damaged, of another kind or of another format version.
    """
    versions = [WITHOUT_WINDOWS, FORMAT_VERSION]
    tensors, metadata = read_sealed(path, "a compacted context", FORMAT, versions, "compact the context")
    try:
        return _context({name: x.to(device) for name, x in tensors.items()}, metadata)
    except (LookupError, ValueError, RecursionError) as error:  # a file from another program
        raise UserError(f"{path} is not a compacted context: {reason(error)}") from error


def _context(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Context:
    def read(name: str, hint: Any) -> Any:
        return coerce(json.loads(metadata[name]), hint, name, Source(), promote=False)

    ids = tensors["tokens"].tolist()
    numbers = range(len({name.split(".")[1] for name in tensors if name.startswith("layers.")}))
    layers = [LayerEntries(*(tensors[f"layers.{number}.{name}"] for name in PARTS)) for number in numbers]
    of_windows = None
    if "windows" in metadata:
        of_windows = WindowCache(read("windows", list[NonNegativeInt]))
        of_windows.seen = [len(ids)]
        for number in (layer for layer, size in enumerate(of_windows.sizes) if size):
            of_windows.layers[number] = tensors[f"{WINDOWS}{number}.keys"], tensors[f"{WINDOWS}{number}.values"]
    recorded = {name.removeprefix(RECORDED): x.cpu() for name, x in tensors.items() if name.startswith(RECORDED)}
    facts = read("fitted", bool), read("seconds", dict[str, float]), recorded, read("model", Identity)
    return Context(ids, layers, *facts, of_windows)
