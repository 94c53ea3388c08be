"""Replay of Attention Matching in training: the kept entries of every compaction are recomputed, not stored.

Compactions divide a sequence into *segments*, whose queries all see the same kept entries. In each segment, one dense
attention call covers the entries that the previous compaction left, with their biases, and, causally, the segment's own
tokens. Between segments, the sampler's function (sparse_rl/matching) recomputes biases and values. The gradients of
this function teach the model to represent tokens well even after their eviction. No mask of S x S is made.

Rows differ in length and in their number of compactions. All rows that have a c-th compaction run it in one call.

Sizes in shapes: B rows of the batch, R rows of a segment, T columns of a segment, S columns of the batch, L layers, H
(or Hkv) kv heads, Hq query heads, K kept entries, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparse_rl.attention.interface import Replayed, TraceView
from sparse_rl.matching import Block, Record, refit, residuals
from sparse_rl.matching.block import fit_bytes
from sparse_rl.methods.am.segments import Held, Segment, attend, columns_of, placed, saved, segments, tensors_of


class MatchedView(TraceView):
    """Replays the traces of Attention Matching, which record evictions, and the times and settings of fits.

    Trace sections: evict_at int32 [L, B, Hkv, S]; refit_at int32 [B, C], the times of up to C compactions of each row;
    refit_with float64 [7], the settings of the fits. `kernel` is ignored. If `through` is False, no gradient flows
    through biases and values.
    """

    replays: ClassVar = frozenset({"evict_at", "refit_at", "refit_with"})
    requires: ClassVar = replays

    def prepare(self, batch: Mapping[str, Tensor]) -> None:
        self.evict_at = batch["evict_at"]
        # If this is set to a list, each compaction appends: residual of mass, residual of output, largest |bias|.
        self.residuals: list[tuple[float, float, float]] | None = None
        self.record = Record.read(batch["refit_with"])
        self.segments = segments(self.evict_at, batch["refit_at"], self.device)

    @classmethod
    def holds(cls, config: Any, replayed: Replayed) -> list[tuple[str, int, str]]:
        rows, kv_heads = replayed.rows, replayed.kv_heads
        entries = config.schedule.most_held(replayed.prompt, replayed.length)
        queries = config.conditions(replayed.heads // kv_heads)
        fits = fit_bytes(rows, kv_heads, queries, entries, config.refitted, replayed.head_dim)
        masks = rows * kv_heads * (entries - config.budget) * entries * (4 + replayed.itemsize)
        note = "estimate, of one layer and one segment at a time; the fits in float64"
        return [("fits and masks", 3 * fits // 2 + masks, note)]  # the backward pass needs more memory

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        evict_at = self.evict_at[layer].to(self.device, non_blocking=True)
        out = torch.zeros_like(query, dtype=value.dtype).transpose(1, 2)  # [B, S, Hq, D]
        held: Held | None = None
        for place, segment in enumerate(self.segments):
            if place:
                held = self._compacted(self.segments[place - 1], segment, held, evict_at, query, key, value, scaling)
            attended = saved(partial(attend, segment, scaling), query, key, value, *tensors_of(held))
            out = placed(out, segment, attended)
        return out.transpose(1, 2)

    def _compacted(
        self,
        before: Segment,
        after: Segment,
        held: Held | None,
        evict_at: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
    ) -> Held:
        """Replay a compaction; return the entries that the rows then hold. `held` is None at the first compaction."""
        record, heads = self.record, key.shape[1]
        rows, kept_rows = after.rows, after.kept_rows
        now = after.own[:, :1]
        sinks = after.first[:, None] + torch.arange(record.sinks, device=self.device)
        window = now + torch.arange(-record.window, 0, device=self.device)
        if held is None:
            raw = before.own[kept_rows, record.sinks :]
        else:  # entries that were not fitted last time: the window of that time, and the tokens since then
            raw = torch.cat(
                [held.index[kept_rows, 0, held.index.shape[2] - record.window :], before.own[kept_rows]], dim=1
            )
            held = Held(*(part[kept_rows] for part in tensors_of(held)))
        competes = raw < now - record.window
        raw = raw[:, : int(competes.sum(1).max())]
        competing = competes[:, None, : raw.shape[1]].expand(-1, heads, -1)
        index = raw[:, None].expand(-1, heads, -1)
        if held is not None:
            fitted = slice(record.sinks, record.sinks + record.refitted)
            held = Held(*(part[:, :, fitted] for part in tensors_of(held)))
            index = torch.cat([held.index, index], dim=2)
            competing = torch.cat([torch.ones_like(held.index, dtype=torch.bool), competing], dim=2)
        stays = (evict_at[rows].gather(2, index) > now[:, None]) & competing
        chosen = stays.int().argsort(dim=-1, descending=True, stable=True)[..., : record.refitted]
        query_columns = now + torch.arange(-record.reference_queries, 0, device=self.device)
        block = partial(_block, rows, index, competing, query_columns, scaling)
        remake, tensors = partial(_refit, block, chosen, record), (query, key, value, *tensors_of(held)[1:])
        if self.through:
            bias, values = saved(remake, *tensors)
        else:
            with torch.no_grad():
                bias, values = remake(*tensors)
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


def _refit(block: Any, chosen: Tensor, record: Record, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    return refit(block(*tensors), chosen, record.fit)


def _block(
    rows: Tensor,
    index: Tensor,
    competing: Tensor,
    query_columns: Tensor,
    scaling: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *held: Tensor,
) -> Block:
    """Return the `Block` of a compaction of `rows`: N entries per kv head, and the reference queries.

    index, competing : int64 and bool [R, H, N], columns of the entries, and a mask of those that compete
    query_columns : int64 [R, reference queries], columns of the reference queries
    held : biases and values of the entries that an earlier compaction fitted; empty at the first compaction
    """
    heads, group = key.shape[1], query.shape[1] // key.shape[1]
    query, key, value = query[rows], key[rows], value[rows]
    queries = columns_of(query, query_columns[:, None].expand(-1, query.shape[1], -1))
    values = columns_of(value, index)
    bias = torch.zeros(index.shape, device=index.device)
    if held:
        was_bias, was_values = held
        raw = index[:, :, was_bias.shape[2] :]
        values, bias = (
            torch.cat([was_values, columns_of(value, raw)], dim=2),
            torch.cat([was_bias, bias[:, :, was_bias.shape[2] :]], dim=2),
        )
    return Block(
        keys=columns_of(key, index),
        values=values,
        queries=queries.reshape(len(rows), heads, group * query_columns.shape[1], -1),
        bias=bias,
        competing=competing,
        scaling=scaling,
    )
