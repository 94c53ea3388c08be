"""Attention Matching, online: what stays carries what went (sparse_rl/matching).

"Fast KV compaction via attention matching" (AM), section 3, here at every compaction while a sequence is sampled. Of
what competes, the keys stay that receive most attention (or that orthogonal matching pursuit chooses). Each gets a
bias, which attention adds to its logits, so that the attention mass is right, and another value, so that the output is
right. An entry that was kept before brings its bias along, and the new one is added to it.

A departure from appendix F.3: the reference queries are those that the sampler had, of the last tokens; the paper
repeats the context for them. What is recorded is what goes and when; biases and values follow from that, and a trainer
makes them again, with gradients (sparse_rl/methods/am/view.py).
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
FITTED_AT_ONCE = 2**25  # logits, in float64; a fit takes several arrays like them


def rows_at_once(logits: int) -> int:
    """How many rows of a layer are fitted at once, where each has so many logits."""
    return max(1, FITTED_AT_ONCE // logits)


class AM(Policy):
    """Attention Matching: a compaction gives what stays biases and other values; see the module."""

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
        """How entries are chosen and fitted."""
        config = self.config
        return Fit(config.select, config.aggregate, config.ridge, config.fit == "paper")

    def compact(self, layer: int, entries: Entries) -> Kept:
        """Choose with `match`, and return biases and values of what stays too.

        In order of position: an engine holds entries in any order, and a sum in another order rounds otherwise.
        Raises NotFiniteError where keys, queries or values are not finite.
        """
        assert entries.keys is not None and entries.values is not None and entries.queries is not None
        order = entries.by_position()
        deep = order[..., None].expand_as(entries.keys)
        competing = entries.competing(self.config.sinks, self.config.window)
        block = Block(
            keys=entries.keys.gather(2, deep),
            values=entries.values.gather(2, deep),
            queries=entries.queries.reshape(*entries.keys.shape[:2], -1, entries.keys.shape[-1]),
            bias=entries.state[BIAS].gather(2, order),
            competing=competing.gather(2, order),
            scaling=entries.scaling,
        )
        try:
            at_once = rows_at_once(block.queries.shape[1] * block.queries.shape[2] * block.keys.shape[2])
            parts = [match(part, self.config.refitted, self.fit) for part in block.parts(at_once)]
        except NotFiniteError as error:
            wrong = "the model's keys, queries or values are not finite"
            raise NotFiniteError(f"{self.name}: {error} in layer {layer}; {wrong}") from error
        chosen, bias, values = (torch.cat(found) for found in zip(*parts, strict=True))
        slots = order.gather(2, chosen)
        stays = (entries.valid() & ~competing).scatter(2, slots, True)
        written = entries.values.scatter(2, slots[..., None].expand_as(values), values)
        return Kept(stays, {BIAS: entries.state[BIAS].scatter(2, slots, bias)}, written)

    def compaction_bytes(
        self, rows: int, entries: int, kv_heads: int, head_dim: int, group: int, device: str, dtype: str
    ) -> dict[str, tuple[int, str]]:
        queries = self.config.conditions(group)
        fitted = min(rows, rows_at_once(kv_heads * queries * entries))
        fits = fit_bytes(fitted, kv_heads, queries, entries, self.config.refitted, head_dim)
        return {"fits": (fits, f"{fitted} at once, in float64")}

    def further(self, prompt: int, length: int) -> dict[str, Tensor]:
        times, seen = [], self.schedule.first(prompt)
        while seen < length - 1:  # what comes later, no query sees
            times.append(seen)
            seen = self.schedule.next_due(prompt, seen)
        return Record.of(self.config).sections(times)
