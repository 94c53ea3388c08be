"""Base class of the learned policies, which use a model's scorers and keep the scorers' memory of a sequence."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from sparse_rl.errors import UserError
from sparse_rl.methods.config import LearnedConfig
from sparse_rl.methods.kvpop.scorers.base import Scorer
from sparse_rl.methods.kvpop.scorers.config import ATTACHED_AS as SCORERS
from sparse_rl.methods.kvpop.scorers.config import ScorerConfig
from sparse_rl.methods.kvpop.scorers.registry import sketch_scorer
from sparse_rl.policies.base import Policy
from sparse_rl.policies.entries import Chunk


class LearnedPolicy(Policy):
    """Base class of policies that evict by the scores of the tokens, before a query attends.

    The attribute `scorers` has one scorer per layer after `bound_to`, and is empty until then.
    """

    config: LearnedConfig
    layered_parameters = True
    score_reads = ()
    scorers: Sequence[Scorer] = ()

    def bound_to(self, model: Any) -> Self:
        scorers: Sequence[Scorer] = getattr(model, SCORERS, ())
        self.check(scorers[0].config if scorers else None, "the model")
        return self.with_scorers(scorers)

    def check(self, scorer: ScorerConfig | None, whose: str) -> None:
        """Raise UserError if a model has no scorers (None), or scorers that differ from the policy's settings.

        `whose` names the model in the message.
        """
        if scorer is None:
            remedy = "train some with kind: kvpop, or use another policy"
            raise UserError(
                f"{whose} has no scorers, which {self.name} needs to choose entries; {remedy}", "cache.policy"
            )
        if scorer != self.config.scorer:
            theirs, ours = scorer.as_block(), self.config.scorer.as_block()
            raise UserError(f"the scorers of {whose} are {theirs}, but the policy asks for {ours}", "cache.scorer")

    def with_scorers(self, scorers: Sequence[Scorer]) -> Self:
        bound = copy.copy(self)
        bound.scorers = scorers
        return bound

    @property
    def delay(self) -> int:
        return self.config.window if self.delayed else 0

    @property
    def delayed(self) -> bool:
        """True if a token is scored when it leaves the window, not when it arrives."""
        return getattr(self.config.scorer, "readout", "immediate") == "delayed"

    def sequence_memory(self, kv_heads: int, head_dim: int) -> dict[str, Tensor]:
        return sketch_scorer(self.config.scorer, heads=kv_heads, dim=head_dim).memory()

    def scores_of(self, layer: int, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return the scores, float32 [R, Hkv, T], and positions, int64 [R, T], of T tokens.

        These tokens are `delay` positions before the tokens of the chunk; positions are clamped to at least 0.
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
