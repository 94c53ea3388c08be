"""Attention Matching during sampling: kept entries get biases and new values (sparse_rl/matching).

The policy applies section 3 of "Fast KV compaction via attention matching" (AM) at every compaction. Among the
competing entries, it keeps the keys that receive the most attention, or that orthogonal matching pursuit chooses. Each
kept entry gets a new value, and a bias that attention adds to its logits. The biases are fitted to preserve the
attention mass, and the values to preserve the attention output. A new bias adds to the bias of an earlier compaction.

A departure from appendix F.3, where the model repeats the context to get reference queries: here these are the
sampler's own queries of the last tokens. The trace records only the evictions, and the times and settings of the
compactions. From these, a trainer recomputes biases and values, with gradients (view.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl.errors import NotFiniteError
from sparse_rl.matching import Block, Fit, Record, match
from sparse_rl.matching.block import fit_bytes
from sparse_rl.methods.config import AMConfig
from sparse_rl.policies.base import Policy
from sparse_rl.policies.entries import Entries, Kept

BIAS = "bias"
FITTED_AT_ONCE = 2**25  # maximum number of float64 logits in one fit, which allocates several arrays of that size


def rows_at_once(logits: int) -> int:
    """Return the number of rows of a layer to fit in one call, if each row has `logits` logits."""
    return max(1, FITTED_AT_ONCE // logits)


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
        the rounding. Raises NotFiniteError if keys, queries or values are not finite.
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
        try:
            at_once = rows_at_once(block.queries.shape[1] * block.queries.shape[2] * block.keys.shape[2])
            parts = [match(part, self.config.refitted, self.fit) for part in block.parts(at_once)]
        except NotFiniteError as error:
            reason = "the model's keys, queries or values are not finite"
            raise NotFiniteError(f"{self.name}: {error} in layer {layer}; {reason}") from error
        chosen, bias, values = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        slots = order.gather(2, chosen)
        keep = (entries.valid() & ~competing).scatter(2, slots, True)
        new_values = entries.values.scatter(2, slots[..., None].expand_as(values), values)
        return Kept(keep, {BIAS: entries.state[BIAS].scatter(2, slots, bias)}, new_values)

    def compaction_bytes(
        self, rows: int, entries: int, kv_heads: int, head_dim: int, group: int, device: str, dtype: str
    ) -> dict[str, tuple[int, str]]:
        queries = self.config.conditions(group)
        fitted = min(rows, rows_at_once(kv_heads * queries * entries))
        fits = fit_bytes(fitted, kv_heads, queries, entries, self.config.refitted, head_dim)
        return {"fits": (fits, f"{fitted} rows at a time, in float64")}

    def further(self, prompt: int, length: int) -> dict[str, Tensor]:
        times, seen = [], self.schedule.first(prompt)
        while seen < length - 1:  # no query comes after a later compaction
            times.append(seen)
            seen = self.schedule.next_due(prompt, seen)
        return Record.of(self.config).sections(times)
