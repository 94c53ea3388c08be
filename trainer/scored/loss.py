"""Computes the boundary loss of the scorers during a forward pass of the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparse_rl.attention.config import TargetConfig
from sparse_rl.attention.target import FutureTarget
from sparse_rl.attention.windows.view import WindowedView
from sparse_rl.experts.view import RoutedView
from sparse_rl.methods.config import KVpopPolicyConfig
from sparse_rl.methods.kvpop.config import BoundaryConfig
from sparse_rl.methods.kvpop.loss import BoundaryLoss
from sparse_rl.methods.kvpop.view import LearnedView
from sparse_rl.models.base import base_of
from sparse_rl.trace import NEVER, EvictionTrace, batch_traces, policy_part
from trainer.batches import Batch
from trainer.examples import Example


class ScorerLoss:
    """Computes the training target and the boundary loss of one policy's scorers."""

    def __init__(self, policy: KVpopPolicyConfig, target: TargetConfig, boundary: BoundaryConfig) -> None:
        self.policy, self.target, self.boundary = policy, FutureTarget(target), BoundaryLoss(boundary)

    def view(
        self,
        student: Any,
        lengths: Tensor,
        prompts: Tensor,
        width: int,
        *,
        kernel: str,
        traces: Sequence[EvictionTrace] | None = None,
        learn: bool = True,
        measure: bool = True,
    ) -> Any:
        """Return the attention view for one forward pass: a LearnedView, which computes the scorers' loss in the pass.

        If the traces record experts, the view replays these, too.

        student : model that carries the scorers
        lengths : number of tokens of each row, int64 [rows]; rows are right-padded to `width`
        prompts : number of tokens of each row's prompt, int64 [rows]
        traces : traces from an engine, one per row, under which attention runs; None means that the scorers' own
            decisions apply
        learn : True computes the boundary loss
        measure : True counts the kept tokens among those that the training target would keep
        """
        policy = self.policy
        decay: dict[str, Any] = {"decay_every": policy.decay_every}
        queries = self.boundary.draw(lengths, policy.sinks + policy.window + policy.k, width)
        batch = {} if traces is None else batch_traces(traces, [0] * len(traces), width)
        base = base_of(student)
        view = LearnedView(
            base.cache_scorers,
            policy,
            lengths,
            prompts=prompts if policy.prefill == "dense" else None,
            target=self.target if learn or measure else None,
            prepare=partial(self.boundary.pairs, queries=queries, window=policy.window, **decay) if learn else None,
            loss=partial(self.boundary, **decay) if learn else None,
            kernel=kernel,
            recorded=policy_part(batch)["evict_at"] if batch else None,
        )
        beside = WindowedView.unrecorded(view, base.config, lengths, width, lengths.device, kernel)
        return RoutedView.around(beside, batch, lengths.device)


@torch.no_grad()
def decisions_agree(model: Any, policy: KVpopPolicyConfig, rollouts: Sequence[Any]) -> float | None:
    """Return the share of evictions, from 0 to 1, on which an engine and the model's own scorers agree.

    The scorers decide again on the tokens of the rollouts. In each layer and kv head, a token counts if the engine or
    the scorers evict it; they agree on the token if its evict_at is equal. None means that no token is evicted.
    """
    same = either = 0
    for rollout in rollouts:
        batch = Batch.make([Example.from_rollout(rollout)], next(model.parameters()).device)
        lengths, prompts = batch.sizes()
        recorded = batch_traces([rollout.trace], [0], len(rollout.trace))
        dense, theirs = prompts if policy.prefill == "dense" else None, policy_part(recorded)["evict_at"]
        view = LearnedView(model.cache_scorers, policy, lengths, prompts=dense, recorded=theirs)
        beside = WindowedView.around(view, recorded, lengths.device, "gather")
        batch.hidden_under(model, RoutedView.around(beside, recorded, lengths.device))
        ours = EvictionTrace.recorded(torch.cat([view.own[layer] for layer in sorted(view.own)])).evict_at
        theirs = theirs[:, 0]
        evicted = (ours < NEVER) | (theirs < NEVER)
        same += int(((ours == theirs) & evicted).sum())
        either += int(evicted.sum())
    return same / either if either else None
