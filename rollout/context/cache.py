"""Context, the entries that a compaction left of a context; ContextCache, what is decoded behind it.

Every sequence of a batch sees the same entries, with their biases, and behind them its own tokens, all of which stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl.attention.kernels.sdpa import computing_dtype, sdpa
from sparse_rl.errors import UserError
from sparse_rl.trace import NEVER, EvictionTrace

GROW = 128  # slots added at a time while tokens come one by one
MOST_LOGITS = 2**26  # of more, the tokens that are read attend some at a time: their mask is as large


@dataclass(frozen=True)
class LayerEntries:
    """What one layer holds of a context: keys (after RoPE), values [1, Hkv, N, D]; bias float32 [1, Hkv, N], which is
    added to the logits; positions int64 [1, Hkv, N].
    """

    keys: Tensor
    values: Tensor
    bias: Tensor
    positions: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.keys, self.values, self.bias, self.positions))


def joined(heads: Sequence[LayerEntries]) -> LayerEntries:
    """Heads of different lengths as one layer: what pads a head has a bias of -inf, and the position of its first."""
    most, padded = max(head.keys.shape[2] for head in heads), []
    for head in heads:
        count = head.keys.shape[2]
        place = torch.arange(most, device=head.keys.device)
        keys, values, bias, positions = (x[:, :, place.where(place < count, 0)] for x in head)
        padded.append((keys, values, bias.masked_fill(place >= count, float("-inf")), positions))
    return LayerEntries(*(torch.cat(parts, dim=1) for parts in zip(*padded, strict=True)))


@dataclass(frozen=True)
class Context:
    """What a compaction left of a context, which any number of sequences go on from.

    tokens : ids of the whole context
    layers : what is left of them in each layer
    fitted : whether biases and values are others than the tokens had
    seconds : stage -> how long it took, in seconds
    """

    tokens: list[int]
    layers: list[LayerEntries]
    fitted: bool
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and biases."""
        return sum(t.nbytes for layer in self.layers for t in (layer.keys, layer.values, layer.bias))

    @property
    def entries(self) -> int:
        """The most entries that a kv head of any layer has."""
        return max(layer.keys.shape[2] for layer in self.layers)

    def check_shape(self, shape: tuple[int, int, int]) -> None:
        """Raise UserError unless it is of a model of this shape. shape : (L, Hkv, D)"""
        _, kv_heads, _, dim = self.layers[0].keys.shape
        if (own := (len(self.layers), kv_heads, dim)) != shape:
            raise UserError(f"the context is of another model: layers, kv heads and head size are {own}, not {shape}")

    def trace(self, length: int) -> EvictionTrace:
        """The trace of a sequence that goes on from it, of `length` tokens with those of the context.

        Where entries were fitted, it has a section that no trainer replays: the queries that they were fitted to are
        not in the record.
        """
        gone = F.pad(self.evict_at(), (0, length - len(self.tokens)), value=NEVER)
        section = {"compacted_at": torch.tensor([len(self.tokens)], dtype=torch.int32)}
        return EvictionTrace.recorded(gone, section if self.fitted else {})

    def evict_at(self) -> Tensor:
        """When each token of the context was evicted: int32 [L, Hkv, tokens], at the context's end, or NEVER."""
        count = len(self.tokens)
        gone = []
        for layer in self.layers:
            whole = torch.full((layer.keys.shape[1], count), count, dtype=torch.int32)
            gone.append(whole.scatter_(1, layer.positions[0].cpu(), NEVER))
        return torch.stack(gone)


class ContextCache:
    """The `Cache` (sparse_rl/policies/cache.py) of B sequences that go on from one context.

    context : None: there is none, and sequences begin at position 0
    captures : whether the queries of what is read are kept, for `captured`
    """

    piece: int | None = 1024

    def __init__(self, context: Context | None, captures: bool = False) -> None:
        self.context, self.captures = context, captures
        self.past = 0 if context is None else len(context.tokens)
        self.own: dict[int, tuple[Tensor, Tensor]] = {}  # keys, values [B, Hkv, C, D]
        self._queries: dict[int, list[Tensor]] = {}
        self.scaling = 0.0  # the factor on q . k, once something was read
        self.lengths: list[int] = []  # own tokens of each row

    @property
    def seen(self) -> list[int]:
        """Tokens that each row has seen, those of the context included."""
        return [self.past + n for n in self.lengths]

    # ---- the engine's side ----------------------------------------------------------------------------------------

    def begin_prefill(self, prompt_lengths: Sequence[int], device: torch.device) -> None:
        """The next forward brings what follows the context, or what rows hold behind it: [B, max P], right-padded.

        Of a long prompt pieces may be brought one after another; a row that has ended brings padding, and its length 0.
        """
        self._starts_at(self.lengths or [0] * len(prompt_lengths), device)
        self.lengths = [held + n for held, n in zip(self._starts, prompt_lengths, strict=True)]

    def begin_decode(self, active: Sequence[bool], device: torch.device) -> None:
        """The next forward brings one token per row; rows that are not active are frozen."""
        self.lengths = [n + a for n, a in zip(self.lengths, active, strict=True)]
        self._starts_at([n - 1 for n in self.lengths], device)

    def _starts_at(self, starts: list[int], device: torch.device) -> None:
        """Where the own tokens that the next forward brings stand in each row."""
        self._starts, self._at = starts, torch.tensor(starts, device=device)[:, None]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row may be taken several times."""
        index = torch.tensor(list(rows), device=next(iter(self.own.values()))[0].device)
        self.own = {layer: (keys[index], values[index]) for layer, (keys, values) in self.own.items()}
        self.lengths = [self.lengths[row] for row in rows]

    def fork(self, rows: Sequence[int]) -> ContextCache:
        """A cache of its own with these rows, in this order, behind the same context; see `select`."""
        forked = ContextCache(self.context)
        forked.own, forked.lengths = dict(self.own), list(self.lengths)
        forked.select(rows)
        return forked

    def captured(self, layer: int) -> Tensor:
        """The queries of one layer of all that was read, after RoPE: [B, Hq, T, D]. Only where it `captures`."""
        return torch.cat(self._queries[layer], dim=2)

    def forget(self, layer: int) -> None:
        """Let the captured queries of one layer go."""
        self._queries.pop(layer, None)

    def queries(self, layer: int) -> Tensor:
        """Raises UserError: the last queries [B, Hq, W, D], which an EvictingCache has, are not kept here."""
        raise UserError("behind a compacted context no queries are kept")

    def trace(self, row: int, length: int) -> EvictionTrace:
        """The same of any row: see `Context.trace`."""
        assert self.context is not None  # without one, nothing is sampled
        return self.context.trace(length)

    def allocated_bytes(self) -> int:
        """Bytes of keys and values that are really allocated for all rows, and those of the context."""
        own = sum(t.untyped_storage().nbytes() for pair in self.own.values() for t in pair)
        return own + (0 if self.context is None else self.context.nbytes)

    # ---- the attention's side -------------------------------------------------------------------------------------

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store what comes, and attend to the context's entries and to own tokens up to each query: [B, Hq, T, D].

        query : [B, Hq, T, D]; key, value : [B, Hkv, T, D]; queries and keys after RoPE; scaling : the factor on q . k
        """
        batch, heads, count, _ = key.shape
        self.scaling = scaling
        if self.captures:
            self._queries.setdefault(layer, []).append(query)
        at = self._at + torch.arange(count, device=key.device)
        keys, values = self._store(layer, key.to(value.dtype), value, at)
        past = None if self.context is None else self.context.layers[layer]
        slots = torch.arange(keys.shape[2], device=key.device)
        if past is not None:
            keys = torch.cat([past.keys.expand(batch, -1, -1, -1), keys], dim=2)
            values = torch.cat([past.values.expand(batch, -1, -1, -1), values], dim=2)
        # The G query heads of a group attend as G "queries" to their kv head: nothing is repeated but the mask.
        grouped = query.unflatten(1, (heads, -1))
        at_once = max(1, MOST_LOGITS // (batch * query.shape[1] * keys.shape[2]))
        outs = []
        for mine, places in zip(grouped.split(at_once, dim=3), at.split(at_once, dim=1), strict=True):
            mask = _mask(places, slots, past, computing_dtype(query, values)).repeat(1, 1, mine.shape[2], 1)
            out = sdpa(mine.flatten(2, 3), keys, values, scaling, mask)
            outs.append(out.unflatten(2, mine.shape[2:4]))
        return torch.cat(outs, dim=3).flatten(1, 2)

    def _store(self, layer: int, key: Tensor, value: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """All that is held once key and value [B, Hkv, T, D] stand at slots `at` [B, T]."""
        keys, values = self.own.get(layer) or (key[:, :, :0], value[:, :, :0])
        missing = max(self._starts) + key.shape[2] - keys.shape[2]
        if missing > 0:
            more = missing if key.shape[2] > 1 else GROW
            keys, values = (F.pad(x, (0, 0, 0, more)) for x in (keys, values))
        rows = torch.arange(len(key), device=key.device)[:, None]
        keys[rows, :, at], values[rows, :, at] = key.transpose(1, 2), value.transpose(1, 2)
        self.own[layer] = keys, values
        return keys, values


def _mask(at: Tensor, slots: Tensor, past: LayerEntries | None, dtype: torch.dtype) -> Tensor:
    """What is added to the logits of own tokens at slots `at` [B, T], for a context's entries and for own slots:
    [B, 1 or Hkv, T, N + C].
    """
    mask = torch.zeros(*at.shape, len(slots), dtype=dtype, device=at.device)
    mask = mask.masked_fill_(slots > at[..., None], float("-inf"))[:, None]
    if past is None:
        return mask
    bias = past.bias.to(dtype)[:, :, None].expand(len(at), -1, at.shape[1], -1)
    return torch.cat([bias, mask.expand(-1, bias.shape[1], -1, -1)], dim=3)
