"""KVpop: keeps sinks, the window, and the k other entries that a learned scorer ranks highest.

Token t = q - w leaves the window as query q arrives, and competes before q attends; a token dropped then gets
evict_at = q. All scores of a kv head decay at one rate, so their order never changes and a dropped token never returns:

    r_t(q) = r_t + (floor(q / n) - floor(t / n)) log gamma        (n = 1 in the papers' main runs)

A departure: for n > 1 the papers write floor((q - t) / n), under which a dropped token could come back.

Training decides for all queries at once, with `sparse_rl.kernels.running_topk`; decoding decides here, for one query
after another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl.errors import NotFiniteError
from sparse_rl.kernels import running_topk
from sparse_rl.methods.config import KVpopPolicyConfig
from sparse_rl.methods.kvpop.learned import LearnedPolicy
from sparse_rl.policies.entries import Arriving, Chunk, Entries

PRIORITY = "priority"  # r_t - floor(t / n) log gamma, which gives the same order at every q


class KVpop(LearnedPolicy):
    """KVpop; in decoding, a full kv head holds exactly `budget - state_entries` entries."""

    config: KVpopPolicyConfig
    entry_memory = {PRIORITY: 0.0}

    def priority(self, scores: Tensor, log_decay: Tensor, positions: Tensor) -> Tensor:
        """r_t - floor(t / n) log gamma for scores [R, Hkv, T] of tokens at int64 [R, T], as in running_topk."""
        return scores - self.aged(log_decay[:, None], positions[:, None])

    def aged(self, log_decay: Tensor, positions: Tensor) -> Tensor:
        """floor(t / n) log gamma, for log gamma and positions of any shapes that broadcast."""
        return log_decay * (positions // self.config.decay_every)

    def take_in(self, layer: int, chunk: Chunk) -> dict[str, Tensor]:
        scores, positions = self.scores_of(layer, chunk)
        return {PRIORITY: self.priority(scores, self.scorers[layer].log_decay().to(scores), positions)}

    # ---- evictions ------------------------------------------------------------------------------------------------

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
            priorities.scatter_(
                -1, leaving_slot[..., None], torch.where(real, priority, priorities.gather(-1, leaving_slot[..., None]))
            )
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
        """(slot, priority, NaN flag), each [R, Hkv], of the worst competing entry as query seen - 1 arrives.

        but : number of tokens left out, from those that left the window last
        """
        competing = entries.competing(self.config.sinks, self.config.window + but)
        among = entries.state[PRIORITY].masked_fill(~competing, float("inf"))
        worst = among.amin(-1)
        slot = entries.positions.masked_fill(among != worst[..., None], -1).argmax(-1)  # among equals the latest
        return slot, worst, worst.isnan()  # a minimum propagates NaN
