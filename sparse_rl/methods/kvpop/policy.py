"""KVpop: keeps sinks, the window, and the k other entries that a learned scorer ranks highest.

When query q arrives, token t = q - w leaves the window of w tokens. It then competes with the entries kept so far,
before q attends. A token that is dropped at this point gets evict_at = q. All scores of a kv head decay at the same
rate gamma, so their order never changes and a dropped token never returns. The score of token t at query q is

    r_t(q) = r_t + (floor(q / n) - floor(t / n)) log gamma        (n = 1 in the papers' main runs)

where n is `decay_every`. A departure: for n > 1 the papers write floor((q - t) / n), under which a dropped token could
come back. In training, `sparse_rl.kernels.running_topk` decides for all queries together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl.errors import NotFiniteError
from sparse_rl.kernels import running_topk
from sparse_rl.methods.config import KVpopPolicyConfig
from sparse_rl.methods.kvpop.learned import LearnedPolicy
from sparse_rl.policies.entries import Arriving, Chunk, Entries

PRIORITY = "priority"  # r_t - floor(t / n) log gamma; it orders tokens as r_t(q) does at every query q


class KVpop(LearnedPolicy):
    """The policy KVpop. In decoding, a kv head holds exactly `budget - state_entries` entries once it is full."""

    config: KVpopPolicyConfig
    entry_memory = {PRIORITY: 0.0}

    def priority(self, scores: Tensor, log_decay: Tensor, positions: Tensor) -> Tensor:
        """Return r_t - floor(t / n) log gamma, [R, Hkv, T], the priority by which `running_topk` ranks tokens too."""
        return scores - self.aged(log_decay[:, None], positions[:, None])

    def aged(self, log_decay: Tensor, positions: Tensor) -> Tensor:
        """Return floor(t / n) log gamma, for `log_decay` and positions t whose shapes broadcast."""
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
        """Find the worst competing entry of each kv head when the newest query arrives.

        but : number of tokens that do not compete although they have left the window: those that left the window last

        Returns the slot of the entry, its priority, and a flag that is True if a priority is NaN, each [R, Hkv] for R
        rows. Among equal priorities, the latest entry is the worst.
        """
        competing = entries.competing(self.config.sinks, self.config.window + but)
        among = entries.state[PRIORITY].masked_fill(~competing, float("inf"))
        worst = among.amin(-1)
        slot = entries.positions.masked_fill(among != worst[..., None], -1).argmax(-1)  # the latest of equal entries
        return slot, worst, worst.isnan()  # a minimum propagates NaN
