"""What belongs to the rows of a batch beside their tokens: it goes with them from sampling to the loss, and into
checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout.engine import Rollout
from sparse_rl.trace import EvictionTrace


class Learned(NamedTuple):
    """What is learned from a forward beside the tokens: each layer's loss, float [L]; recalls : see LearnedView."""

    losses: Tensor
    recalls: dict[int, tuple[Tensor, Tensor]]


@dataclass
class Rows:
    """The rows that TRL is working on, with what its methods do not hand on to one another.

    TRL samples, scores and rewards in methods that take and return tokens, and makes the batch, a dict, of what they
    return. Until that is there, and again while it is scored for a loss, the rest stands here: anew for each
    generation and each loss. In the batch, traces are a list, which TRL shuffles and splits as it does tensors.

    traces : what the forward of each row replays
    rollouts : that have just been sampled; none in a loss
    rewards : of all ranks, float [rows, functions]
    logprobs : the trainer's, of the last forward: float [B, C], detached
    learned : where scorers or a method have a loss, from the last forward; TRL scores the rows of a loss in one
    """

    traces: Sequence[EvictionTrace]
    rollouts: Sequence[Rollout] = ()
    rewards: Tensor = field(default_factory=lambda: torch.empty(0))
    logprobs: Tensor = field(default_factory=lambda: torch.empty(0))
    learned: Learned | None = None

    def model_logprobs(self, width: int) -> Tensor:
        """The rollouts' log-probs before top-p and top-k: float [B, width], 0 after the end of each."""
        return torch.tensor([r.model_logprobs + [0.0] * (width - len(r.model_logprobs)) for r in self.rollouts])


def packed(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch as plain data and tensors, for `unpacked`."""
    return {**batch, "traces": [trace.to_state() for trace in batch["traces"]]}


def unpacked(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch, on a device."""
    tensors = {name: value.to(device) for name, value in state.items() if name != "traces"}
    return {**tensors, "traces": [EvictionTrace.from_state(trace) for trace in state["traces"]]}
