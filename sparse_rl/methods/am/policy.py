"""Attention Matching during sampling (section 3 of "Fast KV compaction via attention matching", AM; match.py).

A departure from appendix F.3, where the model repeats the context to get reference queries: here these are the
sampler's own queries of the last tokens. The trace records only the evictions, and the times and settings of the
compactions. From these, a trainer recomputes biases and values, with gradients (view.py). A new bias adds to the bias
of an earlier compaction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparse_rl.attention.logprobs import read_under
from sparse_rl.attention.views import map_of_traces
from sparse_rl.errors import NotFiniteError
from sparse_rl.methods.am.match import Block, Fit, match
from sparse_rl.methods.am.sections import Record
from sparse_rl.methods.am.view import MatchedView
from sparse_rl.methods.config import AMConfig
from sparse_rl.policies.base import Entries, Kept, Policy, slots_of
from sparse_rl.trace import batch_traces, policy_part

BIAS = "bias"
FITTED_AT_ONCE = 2**25  # maximum number of float64 logits in one fit, which allocates several arrays of that size


class AM(Policy):
    config: AMConfig
    entry_memory = {BIAS: 0.0}
    bias = BIAS
    score_reads = ("keys", "values")

    @property
    def last_queries(self) -> int:
        assert self.config.reference_queries is not None
        return self.config.reference_queries

    @property
    def fit(self) -> Fit:
        config = self.config
        return Fit(config.select, config.aggregate, config.ridge, config.fit == "paper")

    def compact(self, layer: int, entries: Entries) -> Kept:
        """Choose entries with `match`; return them with new biases and values.

        Entries are sorted by position first: engines store them in different orders, and the order of summation changes
        the rounding. A row has failed if its keys, queries or values are not finite.
        """
        assert entries.keys is not None and entries.values is not None and entries.queries is not None
        order = entries.by_position()
        wide_order = order[..., None].expand_as(entries.keys)
        competing = entries.competing(self.config.sinks, self.config.window)
        block = Block(
            keys=entries.keys.gather(2, wide_order),
            values=entries.values.gather(2, wide_order),
            queries=entries.queries.reshape(*entries.keys.shape[:2], -1, entries.keys.shape[-1]),
            bias=entries.state[BIAS].gather(2, order),
            competing=competing.gather(2, order),
            scaling=entries.scaling,
        )
        logits = block.queries.shape[1] * block.queries.shape[2] * block.keys.shape[2]  # of a row
        keep, bias, new_values = entries.valid() & ~competing, entries.state[BIAS].clone(), entries.values.clone()
        failed = keep.new_zeros(len(order))
        for left in sorted(set(entries.left)):  # one number, unless the budget grows
            rows = torch.tensor([row for row, count in enumerate(entries.left) if count == left], device=order.device)
            alike = block if len(rows) == len(order) else block.of(rows)
            at_once = max(1, FITTED_AT_ONCE // logits)
            count = left - self.config.sinks - self.config.window
            parts = [matched for part in alike.parts(at_once) for matched in self._matched(part, count)]
            chosen, new_bias, values, failed[rows] = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            slots = order[rows].gather(2, chosen)
            keep[rows] = keep[rows].scatter(2, slots, True)
            bias[rows] = bias[rows].scatter(2, slots, new_bias)
            new_values[rows] = new_values[rows].scatter(2, slots[..., None].expand_as(values), values)
        return Kept(keep, {BIAS: bias}, new_values, failed)

    def _matched(self, block: Block, count: int) -> list[tuple[Tensor, ...]]:
        """Return the results of `match`, and True for rows that have failed, in parts of the block. A row that has
        failed keeps any of its entries, unchanged.
        """
        rows = len(block.keys)
        try:
            return [(*match(block, count, self.fit), block.competing.new_zeros(rows))]
        except NotFiniteError:
            if rows > 1:
                return [matched for row in block.parts(1) for matched in self._matched(row, count)]
        slots = slots_of(block.competing & (block.competing.cumsum(-1) <= count), count)
        values = block.values.gather(2, slots[..., None].expand(-1, -1, -1, block.values.shape[-1]))
        return [(slots, block.bias.gather(2, slots), values, block.competing.new_ones(rows))]

    def further(self, prompt: int, length: int) -> dict[str, Tensor]:
        # no query comes after a compaction at `length` - 1 tokens or later
        times = [seen for seen in range(prompt, length - 1) if self.schedule.due(prompt, seen)]
        return Record.of(self.config).sections(times)

    def metrics(self, model: Any, rollout: Any) -> dict[str, float]:
        """Return the mean residuals of the fits in one sequence, and the largest |bias|; {} without a compaction."""
        device = next(model.parameters()).device
        recorded = batch_traces([rollout.trace], [0], len(rollout.trace))
        part = policy_part(recorded)
        view = MatchedView({name: part[name] for name in MatchedView.replays}, device)
        view.residuals = []
        read_under(map_of_traces(view, recorded, device), model, rollout)
        if not view.residuals:
            return {}
        mass, output, bias = zip(*view.residuals, strict=True)
        means = {"match/mass": sum(mass) / len(mass), "match/output": sum(output) / len(output)}
        return {**means, "match/bias_max": max(bias), "match/ridge": view.record.ridge}
