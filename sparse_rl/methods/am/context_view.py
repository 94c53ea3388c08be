"""Replay of completions after a context that was compacted once by Attention Matching (rollout/context).

The context's tokens attend causally to each other, because the context was read with a full cache. At its end, the
sampler's function (sparse_rl/matching) recomputes the biases and values of the kept entries, part by part, from the
recorded reference queries. All later tokens attend to these entries and, causally, to each other.

Rows differ in the length of their contexts, and kv heads in their number of kept entries, so each part of each row is
fitted alone; heads that keep the same number of entries are fitted together. Sizes in shapes are those of view.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl.attention.interface import TraceView
from sparse_rl.matching import Block, ContextRecord, Fit, refit
from sparse_rl.matching.compacted import SECTIONS, FittedPart, fitted_parts
from sparse_rl.methods.am.segments import Held, attend, placed, saved, segments, tensors_of
from sparse_rl.trace import NEVER

MOST_LOGITS = 2**28  # with more logits, kv heads are fitted in groups
PIECE = 1024  # number of queries after the context that attend in one call, because the mask has a row for each


class ContextView(TraceView):
    """Replays completions after a context that was compacted once by `am`, with recorded reference queries.

    Trace sections: evict_at int32 [L, B, Hkv, S]; compacted_at int32 [B, 1], the end of each context; compacted_with
    float64 [4]; compacted_parts int32 [B, P + 1]; compacted_queries int32 [B, Q, 3]. `kernel` is ignored. If `through`
    is False, no gradient flows through biases and values.
    """

    replays: ClassVar = frozenset({"evict_at", "compacted_at", *SECTIONS})
    requires: ClassVar = replays

    def prepare(self, batch: Mapping[str, Tensor]) -> None:
        self.evict_at = batch["evict_at"]
        self.fit = ContextRecord.read(batch["compacted_with"]).fit
        self.ends = batch["compacted_at"][:, 0].tolist()
        self.bounds = [bounds[bounds < NEVER] for bounds in batch["compacted_parts"]]
        self.queries = [queries[queries[:, 0] >= 0] for queries in batch["compacted_queries"]]
        self.segments = segments(self.evict_at, batch["compacted_at"], self.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        out = torch.zeros_like(query, dtype=value.dtype).transpose(1, 2)  # [B, S, Hq, D]
        context = self.segments[0]
        out = placed(out, context, saved(partial(attend, context, scaling), query, key, value))
        for after in self.segments[1:]:
            of_rows = [self._held(layer, row, query, key, value, scaling) for row in after.rows.tolist()]
            held = _padded(of_rows)
            for start in range(0, after.own.shape[1], PIECE):
                some = slice(start, min(start + PIECE, after.own.shape[1]))
                attending = partial(attend, after, scaling, queries=some)
                out = placed(out, after, saved(attending, query, key, value, *tensors_of(held)), start)
        return out.transpose(1, 2)

    def _held(self, layer: int, row: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Held:
        """Return the entries of a row's context: [1, H, K] for the largest number K of entries of a kv head."""
        evict_at, end, heads = self.evict_at[layer, row], self.ends[row], key.shape[1]
        parts = fitted_parts(self.bounds[row], self.queries[row], query.shape[1] // heads)
        start = int((evict_at[0] > 0).int().argmax())
        edges = torch.tensor([*range(start, parts[0].start), *range(parts[-1].end, end)], dtype=torch.long)
        index = edges.to(self.device).expand(1, heads, -1)
        pieces = [Held(index, torch.zeros(index.shape, device=self.device), value[row, :, index[0, 0]][None])]
        for part in parts:
            stays = evict_at[:, part.start : part.end] > end
            numbers = stays.sum(1)
            of_groups, order = [], []
            for count in numbers.unique().tolist():
                together = (numbers == count).nonzero()[:, 0]
                chosen = stays[together].nonzero()[:, 1].view(len(together), count)
                at_once = max(1, MOST_LOGITS // (len(part.tokens) * (part.end - part.start)))
                for some, kept in zip(together.split(at_once), chosen.split(at_once), strict=True):
                    made = self._fitted(row, some, part, kept, query, key, value, scaling)
                    of_groups.append(_widened(made, int(numbers.max())))
                order.append(together)
            joined = [torch.cat(tensors, dim=1) for tensors in zip(*map(tensors_of, of_groups), strict=True)]
            if len(order) > 1:
                joined = [x[:, torch.cat(order).argsort().to(self.device)] for x in joined]
            pieces.append(Held(*joined))
        return Held(*(torch.cat(tensors, dim=2) for tensors in zip(*map(tensors_of, pieces), strict=True)))

    def _fitted(
        self,
        row: int,
        heads: Tensor,
        part: FittedPart,
        kept: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
    ) -> Held:
        """Return the fitted entries of some kv heads in one part.

        heads : int64 [h], the kv heads
        kept : int64 [h, t], the tokens that each of them keeps, counted from the part's first one
        """
        kept, where = kept.to(self.device), [x.to(self.device) for x in (heads, part.heads, part.tokens)]
        if kept.shape[1]:
            remake = partial(_refit, row, part, kept, where, scaling, self.fit)
            if self.through:
                bias, values = saved(remake, query, key, value)
            else:
                with torch.no_grad():
                    bias, values = remake(query, key, value)
        else:
            bias, values = value.new_zeros(1, *kept.shape).float(), value.new_zeros(1, *kept.shape, value.shape[3])
        return Held(kept[None] + part.start, bias, values)


def _refit(
    row: int,
    part: FittedPart,
    kept: Tensor,
    where: list[Tensor],
    scaling: float,
    fit: Fit,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> tuple[Tensor, Tensor]:
    """Fit the entries `kept` of one part of a row. `where` has the kv heads, and heads and tokens of the queries."""
    heads, asking_heads, tokens = where
    grouped = query[row].unflatten(0, (key.shape[1], -1))[heads]  # [h, G, S, D]
    keys, values = (x[row][heads, part.start : part.end][None] for x in (key, value))
    bias = torch.zeros(keys.shape[:3], device=keys.device)
    competing = torch.ones_like(bias, dtype=torch.bool)
    block = Block(keys, values, grouped[:, asking_heads, tokens][None], bias, competing, scaling)
    return refit(block, kept[None], fit)


def _widened(held: Held, count: int) -> Held:
    """Return entries that are padded with masked entries to `count` of each kv head."""
    missing = count - held.index.shape[2]
    if not missing:
        return held
    index, bias = F.pad(held.index, (0, missing)), F.pad(held.bias, (0, missing), value=float("-inf"))
    return Held(index, bias, F.pad(held.values, (0, 0, 0, missing)))


def _padded(of_rows: list[Held]) -> Held:
    """Join the entries of several rows, padded with masked entries."""
    count = max(held.index.shape[2] for held in of_rows)
    widened = [tensors_of(_widened(held, count)) for held in of_rows]
    return Held(*(torch.cat(tensors) for tensors in zip(*widened, strict=True)))
