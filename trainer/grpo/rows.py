"""Data of a batch's rows besides their tokens, which stays with them from sampling to the loss and in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout.engine import Rollout
from sparse_rl.trace import EvictionTrace


class Learned(NamedTuple):
    """Auxiliary losses of a forward pass.

    losses : loss of each layer, float [L]
    recalls : see LearnedView
    """

    losses: Tensor
    recalls: dict[int, tuple[Tensor, Tensor]]


@dataclass
class Rows:
    """The rows that TRL currently works on, with the data that its methods do not pass to one another.

    TRL samples, scores and rewards in methods that take and return tokens, and then makes the batch, a dict, from their
    results. Until the batch exists, and again while it is scored for a loss, the other data is kept here; every
    generation and every loss makes a new object. In the batch, traces are a list, which TRL shuffles and splits like
    tensors.

    traces : trace of each row, for its forward pass
    rollouts : rollouts that were just sampled; empty during a loss
    rewards : rewards of all ranks, float [rows, functions]
    logprobs : the trainer's log-probs from the last forward pass, float [B, C], detached
    learned : losses of scorers or of a method from the last forward pass; for a loss TRL scores all rows in one pass
    """

    traces: Sequence[EvictionTrace]
    rollouts: Sequence[Rollout] = ()
    rewards: Tensor = field(default_factory=lambda: torch.empty(0))
    logprobs: Tensor = field(default_factory=lambda: torch.empty(0))
    learned: Learned | None = None

    def model_logprobs(self, width: int) -> Tensor:
        """Return the rollouts' log-probs before top-p and top-k: float [B, width], 0 after the end of each."""
        return torch.tensor([r.model_logprobs + [0.0] * (width - len(r.model_logprobs)) for r in self.rollouts])


def packed(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch as plain data and tensors, which `unpacked` reads."""
    return {**batch, "traces": [trace.to_state() for trace in batch["traces"]]}


def unpacked(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the batch that `packed` has stored, on a device."""
    tensors = {name: value.to(device) for name, value in state.items() if name != "traces"}
    return {**tensors, "traces": [EvictionTrace.from_state(trace) for trace in state["traces"]]}
