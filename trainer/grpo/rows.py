"""Keeps data of a batch's rows, such as traces, from sampling to the loss, because TRL does not pass these data on."""

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

    losses : loss of each layer, float [layers]
    recalls : layer -> two counts, summed over all queries: the kept tokens among those that the training target of the
        scorers would keep, and the tokens that the target would keep; empty if there is no such target
    """

    losses: Tensor
    recalls: dict[int, tuple[Tensor, Tensor]]


@dataclass
class Rows:
    """The rows that TRL currently works on, with the data that TRL's methods do not pass to one another.

    Every generation and every loss makes a new object. TRL's methods for sampling, scoring and rewards take and return
    only tokens; this object keeps the other data until TRL has made the batch, a dict. In the batch, traces are a list,
    which TRL shuffles and splits like tensors.

    rollouts : rollouts that were just sampled; empty while a loss is computed
    rewards : rewards of all ranks, float [rows, reward functions]
    logprobs : the trainer's log-probs from the last forward pass, float [rows, completion width], detached
    learned : auxiliary losses from the last forward pass, which covers all rows while a loss is computed
    """

    traces: Sequence[EvictionTrace]
    rollouts: Sequence[Rollout] = ()
    rewards: Tensor = field(default_factory=lambda: torch.empty(0))
    logprobs: Tensor = field(default_factory=lambda: torch.empty(0))
    learned: Learned | None = None

    def model_logprobs(self, width: int) -> Tensor:
        """Return the sampler's log-probs before top-p and top-k, float [rows, width], padded with 0 on the right."""
        return torch.tensor([r.model_logprobs + [0.0] * (width - len(r.model_logprobs)) for r in self.rollouts])


@dataclass(frozen=True)
class Sampled:
    """The newest generation of this process in training.

    rewards : of each rollout, float [rollouts][reward functions]
    advantages : of each rollout
    """

    rollouts: Sequence[Rollout]
    rewards: Sequence[Sequence[float]]
    advantages: Sequence[float]


def packed(batch: dict[str, Any]) -> dict[str, Any]:
    """Convert a batch to plain data and tensors for a checkpoint."""
    return {**batch, "traces": [trace.to_state() for trace in batch["traces"]]}


def unpacked(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    tensors = {name: value.to(device) for name, value in state.items() if name != "traces"}
    return {**tensors, "traces": [EvictionTrace.from_state(trace) for trace in state["traces"]]}
