"""What policies share that go by a model's scorers: how they are bound to them, and what these remember of a text."""

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
    """Decides before a query attends, by what scorers say of the tokens.

    scorers : of each layer, once it is `bound_to` a model
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
        """Raise UserError where a model's scorers are not the policy's, or it has none: None."""
        if scorer is None:
            mend = "train some with kind: kvpop, or name another policy"
            raise UserError(
                f"{whose} has no scorers, by which {self.name} decides what it keeps; {mend}", "cache.policy"
            )
        if scorer != self.config.scorer:
            theirs, ours = scorer.as_block(), self.config.scorer.as_block()
            raise UserError(f"the scorers of {whose} are {theirs}, and the policy asks for {ours}", "cache.scorer")

    def with_scorers(self, scorers: Sequence[Scorer]) -> Self:
        """A copy of the policy that decides by these scorers, one for each layer."""
        bound = copy.copy(self)
        bound.scorers = scorers
        return bound

    @property
    def delay(self) -> int:
        return self.config.window if self.delayed else 0

    @property
    def delayed(self) -> bool:
        """Whether a token is scored as it leaves the window, and not as it comes."""
        return getattr(self.config.scorer, "readout", "immediate") == "delayed"

    def sequence_memory(self, kv_heads: int, head_dim: int) -> dict[str, Tensor]:
        return sketch_scorer(self.config.scorer, heads=kv_heads, dim=head_dim).memory()

    def scores_of(self, layer: int, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Scores float32 [R, Hkv, T] of tokens at the chunk's positions less `delay`; and those, int64 [R, T] >= 0."""
        count = chunk.keys.shape[2]
        x = torch.cat([chunk.keys, chunk.values], dim=-1)
        asked = x
        if self.delay:
            earlier = torch.cat([chunk.earlier_keys, chunk.earlier_values], dim=-1)
            asked = torch.cat([earlier, x], dim=2)[:, :, :count]
        positions = chunk.start[:, None] + torch.arange(count, device=x.device) - self.delay
        positions = positions.clamp(min=0)
        return self.scorers[layer].follow(chunk.memory, x, asked, positions, chunk.lengths), positions
