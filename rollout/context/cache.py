"""Context, the entries that a compaction left of a context; ContextCache, what is decoded behind it.

Every sequence of a batch sees the same entries, with their biases, and behind them its own tokens, all of which stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from sparse_rl.attention.kernels.sdpa import sdpa
from sparse_rl.errors import UserError
from sparse_rl.trace import NEVER

GROW = 128  # slots added at a time


@dataclass(frozen=True)
class LayerEntries:
    """What one layer holds of a context: keys (after RoPE), values [1, Hkv, N, D]; bias float32 [1, Hkv, N], which is
    added to the logits; positions int64 [1, Hkv, N].
    """

    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class Context:
    """
    tokens : of the whole context
    layers : what is left of them
    fitted : whether biases and values are others than the tokens had
    seconds : stage -> how long it took
    """

    tokens: list[int]
    layers: list[LayerEntries]
    fitted: bool
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and biases."""
        return sum(t.nbytes for layer in self.layers for t in (layer.keys, layer.values, layer.bias))

    def evict_at(self) -> torch.Tensor:
        """int32 [L, Hkv, tokens]: what went is seen by nobody behind the context."""
        count = len(self.tokens)
        gone = []
        for layer in self.layers:
            whole = torch.full((layer.keys.shape[1], count), count, dtype=torch.int32)
            gone.append(whole.scatter_(1, layer.positions[0].cpu(), NEVER))
        return torch.stack(gone)


class ContextCache:
    """A `kv_view`, with the methods of an EvictingCache: sequences that go on from one context.

    context : None: there is none, and sequences begin at position 0
    captures : whether the queries of a prefill are kept, in `queries_of`: layer -> [B, Hq, T, D]
    """

    def __init__(self, context: Context | None, captures: bool = False) -> None:
        self.context, self.captures = context, captures
        self.past = 0 if context is None else len(context.tokens)
        self.own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keys, values [B, Hkv, C, D]
        self.queries_of: dict[int, torch.Tensor] = {}
        self.scaling = 0.0  # the factor on q . k, once something was read
        self.lengths: list[int] = []  # own tokens of each row

    @property
    def seen(self) -> list[int]:
        return [self.past + n for n in self.lengths]

    # ---- the engine's side ----------------------------------------------------------------------------------------

    def begin_prefill(self, prompt_lengths: Sequence[int], device: torch.device) -> None:
        """The next forward brings what follows the context, [B, max P], right-padded."""
        self.lengths = list(prompt_lengths)
        self._at: torch.Tensor | None = None  # from the first position on

    def begin_decode(self, active: Sequence[bool], device: torch.device) -> None:
        """The next forward brings one token per row; rows that are not active are frozen."""
        self.lengths = [n + a for n, a in zip(self.lengths, active, strict=True)]
        self._at = torch.tensor(self.lengths, device=device)[:, None] - 1

    def select(self, rows: Sequence[int]) -> None:
        index = torch.tensor(list(rows), device=next(iter(self.own.values()))[0].device)
        self.own = {layer: (keys[index], values[index]) for layer, (keys, values) in self.own.items()}
        self.lengths = [self.lengths[row] for row in rows]

    def fork(self, rows: Sequence[int]) -> ContextCache:
        forked = ContextCache(self.context)
        forked.own, forked.lengths = dict(self.own), list(self.lengths)
        forked.select(rows)
        return forked

    def queries(self, layer: int) -> torch.Tensor:
        raise UserError("behind a compacted context no queries are kept")

    def evict_at(self, row: int, length: int) -> torch.Tensor:
        """int32 [L, Hkv, length] of the context and what follows it."""
        keys = self.own[0][0]
        gone = torch.zeros(len(self.own), keys.shape[1], 0, dtype=torch.int32)
        gone = gone if self.context is None else self.context.evict_at()
        return F.pad(gone, (0, length - gone.shape[-1]), value=NEVER)

    def further(self, row: int, length: int) -> dict[str, torch.Tensor]:
        """Where entries were fitted, a section that no trainer replays: the queries that they were fitted to are not
        in the record.
        """
        if self.context is None or not self.context.fitted:
            return {}
        return {"compacted_at": torch.tensor([self.past], dtype=torch.int32)}

    def allocated_bytes(self) -> int:
        own = sum(t.untyped_storage().nbytes() for pair in self.own.values() for t in pair)
        return own + (0 if self.context is None else self.context.nbytes)

    # ---- the attention's side -------------------------------------------------------------------------------------

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """See `KVView.attend`."""
        batch, heads, count, dim = key.shape
        self.scaling = scaling
        if self.captures:
            self.queries_of[layer] = query
        at = torch.arange(count, device=key.device).expand(batch, -1) if self._at is None else self._at
        keys, values = self._store(layer, key.to(value.dtype), value, at)
        slots = torch.arange(keys.shape[2], device=key.device)
        hidden = (slots > at[..., None])[:, None]  # [B, 1, T, C]
        mask = torch.zeros(hidden.shape, device=key.device).masked_fill_(hidden, float("-inf"))
        mask = mask.expand(-1, heads, -1, -1)
        if self.context is not None:
            past = self.context.layers[layer]
            keys = torch.cat([past.keys.expand(batch, -1, -1, -1), keys], dim=2)
            values = torch.cat([past.values.expand(batch, -1, -1, -1), values], dim=2)
            mask = torch.cat([past.bias[:, :, None].expand(batch, -1, count, -1), mask], dim=3)
        # The G query heads of a group attend as G "queries" to their kv head: nothing is repeated.
        grouped, group = query.reshape(batch, heads, -1, dim), query.shape[1] // heads
        return sdpa(grouped, keys, values, scaling, mask.repeat(1, 1, group, 1)).reshape(query.shape)

    def _store(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, at: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self.own:
            self.own[layer] = key.clone(), value.clone()
            return self.own[layer]
        keys, values = self.own[layer]
        if max(self.lengths) > keys.shape[2]:
            keys, values = (F.pad(x, (0, 0, 0, GROW)) for x in (keys, values))
        rows = torch.arange(len(key), device=key.device)
        keys[rows, :, at[:, 0]], values[rows, :, at[:, 0]] = key[:, :, 0], value[:, :, 0]
        self.own[layer] = keys, values
        return self.own[layer]
