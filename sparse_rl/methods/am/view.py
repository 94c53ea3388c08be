"""Replay of Attention Matching in training: the kept entries of every compaction are recomputed, not stored.

Compactions divide a sequence into *segments*, whose queries all see the same kept entries. In each segment, one dense
attention call covers the entries that the previous compaction left, with their biases, and, causally, the segment's own
tokens. Between segments, the sampler's function (match.py) recomputes biases and values. The gradients of this function
teach the model to represent tokens well even after their eviction. No mask of S x S is made.

MatchedView replays the compactions of a sampler; all rows that have a c-th compaction run it in one call. ContextView
replays completions after a context that was compacted once (rollout/context): its tokens attend causally to each other;
at its end, the biases and values of the kept entries are recomputed, part by part, from the recorded reference queries;
all later tokens attend to these entries and, causally, to each other. Rows differ in the length of their contexts, and
kv heads in their number of kept entries, so heads of a row that keep the same number are fitted together.

Sizes in shapes: B rows of the batch, R rows of a segment, T columns of a segment, S columns of the batch, L layers, H
(or Hkv) kv heads, Hq query heads, K kept entries, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparse_rl.attention.interface import TraceView
from sparse_rl.kernels.exact import sdpa
from sparse_rl.methods.am.match import Block, Fit, refit, residuals
from sparse_rl.methods.am.sections import OF_CONTEXTS, ContextRecord, FittedPart, Record, fitted_parts
from sparse_rl.trace import NEVER, pinned

Inputs = tuple[Tensor, Tensor, Tensor]  # query, key and value of one layer
MOST_LOGITS = 2**28  # with more logits, kv heads are fitted in groups
PIECE = 1024  # number of queries after the context that attend in one call, because the mask has a row for each


# ---- segments of a sequence between compactions ---------------------------------------------------------------------


@dataclass
class Segment:
    """The tokens between two compactions, for the R rows that have this segment."""

    held: int  # number of entries of the first kv head before each row's first token
    rows: Tensor  # int64 [R], indices of the rows in the batch
    kept_rows: Tensor  # int64 [R], indices of the same rows among the rows of the previous segment
    own: Tensor  # int64 [R, T], columns of the segment's tokens, right-padded
    real: Tensor  # bool [R, T], False for padding
    first: Tensor  # int64 [R], column of the first token of each row's sequence


class Held(NamedTuple):
    """The K entries per kv head that a compaction left."""

    columns: Tensor  # int64 [R, H, K], ascending
    bias: Tensor  # float32 [R, H, K]
    values: Tensor  # [R, H, K, D]


def segments(evict_at: Tensor, times: Tensor, device: torch.device, among: Tensor | None = None) -> list[Segment]:
    """Return the segments of a batch, or of its rows `among`, the same for every layer, on `device`.

    evict_at : int32 [L, B, H, S], in host memory
    times : int32 [B, C], columns before which the compactions of each row take place, ascending
    """
    among = torch.arange(len(times)) if among is None else among
    of_head, times = evict_at[0, among, 0], times[among]
    real = of_head > 0  # False for padding
    width = real.shape[1]
    start = real.int().argmax(1)
    end = start + real.sum(1)
    times = torch.cat([start[:, None], times.clamp(max=width).long(), torch.full((len(real), 1), width)], dim=1)
    times = torch.minimum(times, end[:, None])
    results, before = list[Segment](), torch.arange(len(real))
    for place in range(times.shape[1] - 1):
        first, last = times[:, place], times[:, place + 1]
        rows = (last > first).nonzero()[:, 0]
        if not len(rows):
            break
        own = first[rows, None] + torch.arange(int((last - first).max()))
        is_real = own < last[rows, None]
        kept_rows = torch.searchsorted(before, rows)
        parts = (among[rows], kept_rows, own.clamp(max=width - 1), is_real, start[rows])
        kept = (of_head[rows] > first[rows, None]) & (torch.arange(width) < first[rows, None])
        results.append(Segment(int(kept.sum(1).max()), *(part.to(device) for part in parts)))
        before = rows
    return results


def saved(function: Any, *tensors: Tensor) -> Any:
    """Return function(*tensors) with gradient checkpointing, which saves only `tensors` for the backward pass."""
    if not torch.is_grad_enabled():
        return function(*tensors)
    return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)


def remade(function: Any, through: bool, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the biases and values function(*tensors), with gradients if `through`."""
    with torch.set_grad_enabled(through and torch.is_grad_enabled()):
        bias, values = saved(function, *tensors)
    return bias, values


def columns_of(x: Tensor, columns: Tensor) -> Tensor:
    """Gather the columns int64 [R, H, N] of x [R, H, S, D]: [R, H, N, D]."""
    return x.gather(2, columns[..., None].expand(*columns.shape, x.shape[-1]))


def placed(out: Tensor, segment: Segment, attended: Tensor, start: int = 0) -> Tensor:
    """Return `out` [B, S, Hq, D] with the output `attended` [R, Hq, T, D] of a segment's queries from `start` on."""
    queries = slice(start, start + attended.shape[2])
    where = segment.real[:, queries].nonzero(as_tuple=True)
    columns = segment.own[:, queries][where]
    return out.index_put((segment.rows[where[0]], columns), attended.transpose(1, 2)[where])


def attend(segment: Segment, scaling: float, *tensors: Tensor, queries: slice | None = None) -> Tensor:
    """Attend from a segment's queries to the entries held and, causally, to the segment's own tokens.

    tensors : query, key, value, and those of `Held` if there are entries held
    queries : the indices in the segment of the queries that attend; None means all. It requires entries held

    Returns the output [R, Hq, number of queries, D].
    """
    query, key, value, *held = tensors
    start, end = (0, segment.own.shape[1]) if queries is None else (queries.start, queries.stop)
    rows, own, asking = segment.rows, segment.own[:, :end], segment.own[:, start:end]
    heads, width = key.shape[1], asking.shape[1]
    query, key, value = query[rows], key[rows], value[rows]
    columns = own[:, None].expand(-1, heads, -1)
    asked = columns_of(query, asking[:, None].expand(-1, query.shape[1], -1))
    keys, values = columns_of(key, columns), columns_of(value, columns)
    if not held:
        return sdpa(asked, keys, values, scaling, causal=True)
    causal = torch.ones(width, end, dtype=torch.bool, device=own.device).tril(start)
    index, bias, held_values = held
    keys, values = torch.cat([columns_of(key, index), keys], dim=2), torch.cat([held_values, values], dim=2)
    later = torch.zeros(width, end, device=own.device).masked_fill(~causal, float("-inf"))
    parts = [bias[:, :, None].expand(-1, -1, width, -1), later.expand(*bias.shape[:2], -1, -1)]
    mask = torch.cat(parts, dim=-1).flatten(0, 1)[:, None]
    group = asked.shape[1] // heads
    grouped = asked.reshape(-1, group, width, asked.shape[-1])  # kv heads join the rows: a group shares a mask
    keys, values = (x.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for x in (keys, values))
    return sdpa(grouped, keys, values, scaling, mask).reshape(asked.shape)


# ---- compactions while sampling -------------------------------------------------------------------------------------


class MatchedView(TraceView):
    """Replays the traces of Attention Matching, which record evictions, and the times and settings of fits.

    Trace sections: evict_at int32 [L, B, Hkv, S]; refit_at int32 [B, C], the times of up to C compactions of each row;
    refit_with float64 [7], the settings of the fits. `kernel` is ignored. If `through` is False, no gradient flows
    through biases and values.
    """

    replays: ClassVar = frozenset({"evict_at", "refit_at", "refit_with"})
    requires: ClassVar = replays

    def prepare(self, batch: Mapping[str, Tensor]) -> None:
        self.evict_at = pinned(batch["evict_at"], self.device)
        # If this is set to a list, each compaction appends: residual of mass, residual of output, largest |bias|.
        self.residuals: list[tuple[float, float, float]] | None = None
        self.record = Record.read(batch["refit_with"])
        times, together = batch["refit_at"], [torch.arange(self.evict_at.shape[1])]
        if not self.record.refitted and times.shape[1]:  # a row's first compaction determines the counts at the others
            first = times[:, 0] - (self.evict_at[0, :, 0] > 0).int().argmax(1)
            together = [(first == number).nonzero()[:, 0] for number in first.unique()]
        self.groups = [segments(self.evict_at, times, self.device, rows) for rows in together]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        evict_at = self.evict_at[layer].to(self.device, non_blocking=True)
        out = torch.zeros_like(query, dtype=value.dtype).transpose(1, 2)  # [B, S, Hq, D]
        for group in self.groups:
            held: Held | None = None
            for place, segment in enumerate(group):
                if place:
                    held = self._compacted(group[place - 1], segment, held, evict_at, (query, key, value), scaling)
                attended = saved(partial(attend, segment, scaling), query, key, value, *(held or ()))
                out = placed(out, segment, attended)
        return out.transpose(1, 2)

    def _compacted(
        self, before: Segment, after: Segment, held: Held | None, evict_at: Tensor, inputs: Inputs, scaling: float
    ) -> Held:
        """Replay a compaction; return the entries that the rows then hold. `held` is None at the first compaction."""
        _, key, value = inputs
        record, heads = self.record, key.shape[1]
        rows, kept_rows = after.rows, after.kept_rows
        now = after.own[:, :1]
        sinks = after.first[:, None] + torch.arange(record.sinks, device=self.device)
        window = now + torch.arange(-record.window, 0, device=self.device)
        if held is None:
            raw = before.own[kept_rows, record.sinks :]
        else:  # entries that were not fitted last time: the window of that time, and the tokens since then
            window_then = held.columns[kept_rows, 0, held.columns.shape[2] - record.window :]
            raw = torch.cat([window_then, before.own[kept_rows]], dim=1)
            held = Held(*(part[kept_rows] for part in held))
        competes = raw < now - record.window
        raw = raw[:, : int(competes.sum(1).max())]
        competing = competes[:, None, : raw.shape[1]].expand(-1, heads, -1)
        index = raw[:, None].expand(-1, heads, -1)
        if held is not None:
            fitted = slice(record.sinks, held.columns.shape[2] - record.window)
            held = Held(*(part[:, :, fitted] for part in held))
            index = torch.cat([held.columns, index], dim=2)
            competing = torch.cat([torch.ones_like(held.columns, dtype=torch.bool), competing], dim=2)
        stays = (evict_at[rows].gather(2, index) > now[:, None]) & competing
        count = after.held - record.sinks - record.window
        chosen = stays.int().argsort(dim=-1, descending=True, stable=True)[..., :count]
        query_columns = now + torch.arange(-record.reference_queries, 0, device=self.device)
        block = partial(_block, rows, index, competing, query_columns, scaling)
        tensors = (*inputs, *(held or ())[1:])
        bias, values = remade(lambda *inputs: refit(block(*inputs), chosen, record.fit), self.through, *tensors)
        if self.residuals is not None:
            self.residuals.append((*residuals(block(*tensors), chosen, bias, values), float(bias.abs().max())))
        around = [columns[:, None].expand(-1, heads, -1) for columns in (sinks, window)]
        as_they_were = [columns_of(value[rows], columns) for columns in around]
        no_bias = [bias.new_zeros(columns.shape) for columns in around]
        return Held(
            torch.cat([around[0], index.gather(2, chosen), around[1]], dim=2),
            torch.cat([no_bias[0], bias, no_bias[1]], dim=2),
            torch.cat([as_they_were[0], values, as_they_were[1]], dim=2),
        )


def _block(
    rows: Tensor, index: Tensor, competing: Tensor, query_columns: Tensor, scaling: float, *tensors: Tensor
) -> Block:
    """Return the `Block` of a compaction of `rows`: N entries per kv head, and the reference queries.

    index, competing : int64 and bool [R, H, N], columns of the entries, and a mask of those that compete
    query_columns : int64 [R, reference queries], columns of the reference queries
    tensors : query, key, value, and biases and values of the entries that an earlier compaction fitted, if any
    """
    query, key, value, *held = tensors
    heads, group = key.shape[1], query.shape[1] // key.shape[1]
    query, key, value = query[rows], key[rows], value[rows]
    queries = columns_of(query, query_columns[:, None].expand(-1, query.shape[1], -1))
    values = columns_of(value, index)
    bias = torch.zeros(index.shape, device=index.device)
    if held:
        was_bias, was_values = held
        raw = index[:, :, was_bias.shape[2] :]
        values = torch.cat([was_values, columns_of(value, raw)], dim=2)
        bias = torch.cat([was_bias, bias[:, :, was_bias.shape[2] :]], dim=2)
    return Block(
        keys=columns_of(key, index),
        values=values,
        queries=queries.reshape(len(rows), heads, group * query_columns.shape[1], -1),
        bias=bias,
        competing=competing,
        scaling=scaling,
    )


# ---- a context that was compacted once ------------------------------------------------------------------------------


class ContextView(TraceView):
    """Replays completions after a context that was compacted once by `am`, with recorded reference queries.

    Trace sections: evict_at int32 [L, B, Hkv, S]; compacted_at int32 [B, 1], the end of each context; compacted_with
    float64 [4]; compacted_parts int32 [B, P + 1]; compacted_queries int32 [B, Q, 3]. `kernel` is ignored. If `through`
    is False, no gradient flows through biases and values.
    """

    replays: ClassVar = frozenset({"evict_at", "compacted_at", *OF_CONTEXTS})
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
            of_rows = [self._held(layer, row, (query, key, value), scaling) for row in after.rows.tolist()]
            held = _padded(of_rows)
            for start in range(0, after.own.shape[1], PIECE):
                some = slice(start, min(start + PIECE, after.own.shape[1]))
                attending = partial(attend, after, scaling, queries=some)
                out = placed(out, after, saved(attending, query, key, value, *held), start)
        return out.transpose(1, 2)

    def _held(self, layer: int, row: int, inputs: Inputs, scaling: float) -> Held:
        """Return the entries of a row's context: [1, H, K] for the largest number K of entries of a kv head."""
        query, key, value = inputs
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
                    made = self._fitted(row, some, part, kept, inputs, scaling)
                    of_groups.append(_widened(made, int(numbers.max())))
                order.append(together)
            joined = [torch.cat(tensors, dim=1) for tensors in zip(*of_groups, strict=True)]
            if len(order) > 1:
                joined = [x[:, torch.cat(order).argsort().to(self.device)] for x in joined]
            pieces.append(Held(*joined))
        return Held(*(torch.cat(tensors, dim=2) for tensors in zip(*pieces, strict=True)))

    def _fitted(self, row: int, heads: Tensor, part: FittedPart, kept: Tensor, inputs: Inputs, scaling: float) -> Held:
        """Return the fitted entries of the kv heads `heads`, int64 [h], which keep the tokens `kept`, int64 [h, t], of
        one part, counted from the part's first one.
        """
        kept, where = kept.to(self.device), [x.to(self.device) for x in (heads, part.heads, part.tokens)]
        if kept.shape[1]:
            remake = partial(_refit_part, row, part, kept, where, scaling, self.fit)
            bias, values = remade(remake, self.through, *inputs)
        else:
            value = inputs[2]
            bias, values = value.new_zeros(1, *kept.shape).float(), value.new_zeros(1, *kept.shape, value.shape[3])
        return Held(kept[None] + part.start, bias, values)


def _refit_part(
    row: int, part: FittedPart, kept: Tensor, where: list[Tensor], scaling: float, fit: Fit, *inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """Fit the entries `kept` of one part of a row. `where` has the kv heads, and heads and tokens of the queries."""
    query, key, value = inputs
    heads, asking_heads, tokens = where
    grouped = query[row].unflatten(0, (key.shape[1], -1))[heads]  # [h, G, S, D]
    keys, values = (x[row][heads, part.start : part.end][None] for x in (key, value))
    bias = torch.zeros(keys.shape[:3], device=keys.device)
    competing = torch.ones_like(bias, dtype=torch.bool)
    block = Block(keys, values, grouped[:, asking_heads, tokens][None], bias, competing, scaling)
    return refit(block, kept[None], fit)


def _widened(held: Held, count: int) -> Held:
    """Return entries that are padded with masked entries to `count` of each kv head."""
    missing = count - held.columns.shape[2]
    index, bias = F.pad(held.columns, (0, missing)), F.pad(held.bias, (0, missing), value=float("-inf"))
    return Held(index, bias, F.pad(held.values, (0, 0, 0, missing)))


def _padded(of_rows: list[Held]) -> Held:
    """Join the entries of several rows, padded with masked entries."""
    count = max(held.columns.shape[2] for held in of_rows)
    widened = [_widened(held, count) for held in of_rows]
    return Held(*(torch.cat(tensors) for tensors in zip(*widened, strict=True)))
