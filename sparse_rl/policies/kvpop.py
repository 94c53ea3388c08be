"""KVpop: sinks, the window, and the k entries that a learned scorer ranks highest.

A token t = q - w leaves the window as query q arrives and competes, before q attends; what is dropped then gets
evict_at = q. All decay at one rate per kv head, so their order never changes and a dropped token never returns:

    r_t(q) = r_t + (floor(q / n) - floor(t / n)) log gamma        (n = 1 in the papers' main runs)

For n > 1 the papers write floor((q - t) / n), under which a dropped token could come back: a stated departure.
Training decides with `sparse_rl.kernels.running_topk`, all queries at once; decoding here, one query after another.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from sparse_rl.errors import NotFiniteError, UserError
from sparse_rl.kernels import running_topk
from sparse_rl.policies.base import Arriving, Chunk, Entries, Policy
from sparse_rl.policies.config import KVpopPolicyConfig
from sparse_rl.scorers.base import Scorer
from sparse_rl.scorers.config import ATTACHED_AS as SCORERS
from sparse_rl.scorers.registry import sketch_scorer

PRIORITY = "priority"  # r_t - floor(t / n) log gamma, which ranks entries at every q alike


class KVpop(Policy):
    """Decides before the query attends, so that a kv head decodes with exactly `budget - state_entries` entries.

    scorers : of each layer, once it is `bound_to` a model
    """

    config: KVpopPolicyConfig
    layered_parameters = True
    entry_memory = {PRIORITY: 0.0}
    score_reads = ()
    scorers: Sequence[Scorer] = ()

    def bound_to(self, model: Any) -> KVpop:
        scorers = getattr(model, SCORERS, None)
        if scorers is None:
            mend = "train some with kind: kvpop, or name another policy"
            raise UserError(f"the model has no scorers, by which kvpop ranks what it keeps; {mend}", "cache.policy")
        if scorers[0].config != self.config.scorer:
            theirs, ours = scorers[0].config.as_block(), self.config.scorer.as_block()
            raise UserError(f"the model's scorers are {theirs}, and the policy asks for {ours}", "cache.scorer")
        return self.with_scorers(scorers)

    def with_scorers(self, scorers: Sequence[Scorer]) -> KVpop:
        """scorers : of each layer"""
        bound = copy.copy(self)
        bound.scorers = scorers
        return bound

    # ---- memory ---------------------------------------------------------------------------------------------------

    @property
    def delay(self) -> int:
        return self.config.window if self.delayed else 0

    @property
    def delayed(self) -> bool:
        """Whether a token is scored as it leaves the window, and not as it comes."""
        return getattr(self.config.scorer, "readout", "immediate") == "delayed"

    def sequence_memory(self, kv_heads: int, head_dim: int) -> dict[str, torch.Tensor]:
        return sketch_scorer(self.config.scorer, heads=kv_heads, dim=head_dim).memory()

    def priority(self, scores: torch.Tensor, log_decay: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """r_t - floor(t / n) log gamma of scores [R, Hkv, T] of tokens at int64 [R, T], as running_topk computes it."""
        return scores - log_decay[:, None] * (positions // self.config.decay_every)[:, None]

    def take_in(self, layer: int, chunk: Chunk) -> dict[str, torch.Tensor]:
        scorer, count = self.scorers[layer], chunk.keys.shape[2]
        x = torch.cat([chunk.keys, chunk.values], dim=-1)
        asked = x
        if self.delay:
            earlier = torch.cat([chunk.earlier_keys, chunk.earlier_values], dim=-1)
            asked = torch.cat([earlier, x], dim=2)[:, :, :count]
        positions = chunk.start[:, None] + torch.arange(count, device=x.device) - self.delay
        positions = positions.clamp(min=0)
        scores = scorer.follow(chunk.memory, x, asked, positions, chunk.lengths)
        return {PRIORITY: self.priority(scores, scorer.log_decay().to(scores), positions)}

    # ---- what goes ------------------------------------------------------------------------------------------------

    def masks(self, layer: int, state: dict[str, torch.Tensor], lengths: torch.Tensor) -> torch.Tensor | None:
        config = self.config
        if config.prefill == "dense":
            return None
        return running_topk(state[PRIORITY], config.sinks, window=config.window, k=config.k, lengths=lengths).evict_at

    def score(self, layer: int, entries: Entries) -> torch.Tensor:
        return entries.state[PRIORITY]

    def before_attending(self, layer: int, entries: Entries, arriving: Arriving) -> torch.Tensor:
        scorer, now = self.scorers[layer], entries.seen - 1
        x = torch.cat([arriving.keys, arriving.values], dim=-1)[:, :, None]
        if self.delay:
            leaving = now - self.config.window
            at = entries.at(leaving)
            asked = entries.read(at)[:, :, None]
        else:
            leaving, asked = now, x
        positions = leaving.clamp(min=0)[:, None]
        scores = scorer.follow(arriving.memory, x, asked, positions)
        scored = self.priority(scores, scorer.log_decay().to(scores), positions)
        if self.delay:
            priorities = entries.state[PRIORITY]
            real = (leaving >= 0)[:, None, None]
            priorities.scatter_(-1, at[..., None], torch.where(real, scored, priorities.gather(-1, at[..., None])))
        else:
            arriving.state[PRIORITY].copy_(scored[..., 0])
        freed, _, is_nan = self.worst(entries)
        if bool(is_nan.any()):
            wrong = "the model's keys or values are not finite, or its scorers are not"
            raise NotFiniteError(f"{self.name}: a NaN score in layer {layer}; {wrong}")
        full = (entries.lengths >= self.schedule.budget)[:, None, None]
        slots = torch.arange(entries.positions.shape[-1], device=freed.device)
        return entries.valid() & ~(full & (slots == freed[..., None]))

    def worst(self, entries: Entries, but: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(slot, priority, whether one is NaN), each [R, Hkv], of the worst that competes as query seen - 1 arrives.

        but : leave out so many of the tokens that have left the window last
        """
        competing = entries.competing(self.config.sinks, self.config.window + but)
        among = entries.state[PRIORITY].masked_fill(~competing, float("inf"))
        worst = among.amin(-1)
        slot = entries.positions.masked_fill(among != worst[..., None], -1).argmax(-1)  # of equal ones the latest goes
        return slot, worst, among.isnan().any(-1)
