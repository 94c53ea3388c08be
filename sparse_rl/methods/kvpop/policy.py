"""KVpop: keeps sinks, the window, and the k other entries that a learned scorer ranks highest.

When query q arrives, token t = q - w leaves the window of w tokens. It then competes with the entries kept so far,
before q attends. A token that is dropped at this point gets evict_at = q. All scores of a kv head decay at the same
rate gamma, so their order never changes and a dropped token never returns. The score of token t at query q is

    r_t(q) = r_t + (floor(q / n) - floor(t / n)) log gamma        (n = 1 in the papers' main runs)

where n is `decay_every`. A departure: for n > 1 the papers write floor((q - t) / n), under which a dropped token could
come back. In training, `sparse_rl.kernels.running_topk` decides for all queries together.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from sparse_rl.errors import NotFiniteError, UserError
from sparse_rl.kernels import running_topk
from sparse_rl.methods.config import KVpopPolicyConfig, LearnedConfig
from sparse_rl.methods.kvpop.config import ATTACHED_AS as SCORERS
from sparse_rl.methods.kvpop.config import ScorerConfig
from sparse_rl.methods.kvpop.scorers import Scorer, sketch_scorer
from sparse_rl.methods.kvpop.view import decisions_agree
from sparse_rl.policies.base import Arriving, Chunk, Entries, Policy


class LearnedPolicy(Policy):
    """Base class of policies that evict by the scores of the tokens, before a query attends."""

    config: LearnedConfig
    layered_parameters = True
    score_reads = ()
    scorers: Sequence[Scorer] = ()  # one per layer after `bound_to`

    def bound_to(self, model: Any) -> Self:
        scorers: Sequence[Scorer] = getattr(model, SCORERS, ())
        self.check(scorers[0].config if scorers else None, "the model")
        return self.with_scorers(scorers)

    def check(self, scorer: ScorerConfig | None, whose: str) -> None:
        """Raise UserError if the model `whose` has no scorers (None), or scorers other than the policy asks for."""
        if scorer is None:
            remedy = "train some with kind: kvpop, or use another policy"
            raise UserError(f"{whose} has no scorers, which {self.name} needs; {remedy}", "cache.policy")
        if scorer != self.config.scorer:
            theirs, ours = scorer.as_block(), self.config.scorer.as_block()
            raise UserError(f"the scorers of {whose} are {theirs}, but the policy asks for {ours}", "cache.scorer")

    def with_scorers(self, scorers: Sequence[Scorer]) -> Self:
        bound = copy.copy(self)
        bound.scorers = scorers
        return bound

    @property
    def delay(self) -> int:
        """The window if a token is scored when it leaves the window, 0 if it is scored when it arrives."""
        return self.config.window if getattr(self.config.scorer, "readout", "immediate") == "delayed" else 0

    def sequence_memory(self, kv_heads: int, head_dim: int) -> dict[str, Tensor]:
        return sketch_scorer(self.config.scorer, heads=kv_heads, dim=head_dim).memory()

    def scores_of(self, layer: int, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return the scores, float32 [R, Hkv, T], and positions, int64 [R, T] >= 0, of the tokens `delay` positions
        before those of the chunk.
        """
        count = chunk.keys.shape[2]
        x = torch.cat([chunk.keys, chunk.values], dim=-1)
        to_score = x
        if self.delay:
            earlier = torch.cat([chunk.earlier_keys, chunk.earlier_values], dim=-1)
            to_score = torch.cat([earlier, x], dim=2)[:, :, :count]
        positions = chunk.start[:, None] + torch.arange(count, device=x.device) - self.delay
        positions = positions.clamp(min=0)
        return self.scorers[layer].follow(chunk.memory, x, to_score, positions, chunk.lengths), positions


PRIORITY = "priority"  # r_t - floor(t / n) log gamma; it orders tokens as r_t(q) does at every query q


class KVpop(LearnedPolicy):
    """The policy KVpop. In decoding, a kv head holds exactly `budget - state_entries` entries once it is full."""

    config: KVpopPolicyConfig
    entry_memory = {PRIORITY: 0.0}

    def priority(self, scores: Tensor, log_decay: Tensor, positions: Tensor) -> Tensor:
        return scores - self.aged(log_decay[:, None], positions[:, None])

    def aged(self, log_decay: Tensor, positions: Tensor) -> Tensor:
        """Return floor(t / n) log gamma, for `log_decay` and positions t whose shapes broadcast."""
        return log_decay * (positions // self.config.decay_every)

    def take_in(self, layer: int, chunk: Chunk) -> dict[str, Tensor]:
        scores, positions = self.scores_of(layer, chunk)
        return {PRIORITY: self.priority(scores, self.scorers[layer].log_decay().to(scores), positions)}

    def metrics(self, model: Any, rollout: Any) -> dict[str, float]:
        share = decisions_agree(model, self.config, [rollout])
        return {} if share is None else {"cache/decisions_agree": share}

    def masks(self, layer: int, state: dict[str, Tensor], lengths: Tensor) -> Tensor | None:
        config = self.config
        if config.prefill == "dense":
            return None
        return running_topk(state[PRIORITY], config.sinks, window=config.window, k=config.k, lengths=lengths).evict_at

    def score(self, layer: int, entries: Entries) -> Tensor:
        return entries.state[PRIORITY]

    def before_attending(self, layer: int, entries: Entries, arriving: Arriving) -> Tensor:
        scorer, now = self.scorers[layer], entries.seen - 1
        x = torch.cat([arriving.keys, arriving.values], dim=-1)[:, :, None]
        if self.delay:
            leaving = now - self.config.window
            leaving_slot = entries.at(leaving)
            to_score = entries.read(leaving_slot)[:, :, None]
        else:
            leaving, to_score = now, x
        positions = leaving.clamp(min=0)[:, None]
        scores = scorer.follow(arriving.memory, x, to_score, positions)
        priority = self.priority(scores, scorer.log_decay().to(scores), positions)
        if self.delay:
            priorities = entries.state[PRIORITY]
            real = (leaving >= 0)[:, None, None]
            at = leaving_slot[..., None]
            priorities.scatter_(-1, at, torch.where(real, priority, priorities.gather(-1, at)))
        else:
            arriving.state[PRIORITY].copy_(priority[..., 0])
        worst_slot, _, is_nan = self.worst(entries)
        if bool(is_nan.any()):
            reason = "the model's keys or values are not finite, or its scorers are not"
            raise NotFiniteError(f"{self.name}: a NaN score in layer {layer}; {reason}")
        full = (entries.lengths >= self.schedule.budget)[:, None, None]
        slots = torch.arange(entries.positions.shape[-1], device=worst_slot.device)
        return entries.valid() & ~(full & (slots == worst_slot[..., None]))

    def worst(self, entries: Entries, but: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return the slot of the worst competing entry of each kv head when the newest query arrives (the latest among
        equal ones), its priority, and True if a priority is NaN: [R, Hkv] each. The `but` tokens that left the window
        last do not compete.
        """
        competing = entries.competing(self.config.sinks, self.config.window + but)
        among = entries.state[PRIORITY].masked_fill(~competing, float("inf"))
        worst = among.amin(-1)
        slot = entries.positions.masked_fill(among != worst[..., None], -1).argmax(-1)  # the latest of equal entries
        return slot, worst, worst.isnan()  # a minimum propagates NaN
