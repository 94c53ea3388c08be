"""The boundary loss of scorers, on the keys and values of a forward, whatever else is learned from that."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparse_rl.attention.config import TargetConfig
from sparse_rl.attention.target import FutureTarget
from sparse_rl.methods.config import KVpopPolicyConfig
from sparse_rl.methods.kvpop.config import BoundaryConfig
from sparse_rl.methods.kvpop.loss import BoundaryLoss
from sparse_rl.methods.kvpop.view import LearnedView
from sparse_rl.models.base import base_of
from sparse_rl.trace import NEVER, EvictionTrace, batch_traces
from trainer.batches import Batch
from trainer.examples import Example


class ScorerLoss:
    """What scorers are to foresee, and how they are told; the settings are described with these configurations."""

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
    ) -> LearnedView:
        """The view of one forward over B rows, in which the scorers' loss is computed.

        student : the model that carries the scorers
        lengths, prompts : int64 [B], tokens of each row, right-padded to `width`, and of its prompt
        traces : of each row, from an engine: what attention sees; None: what the scorers decide
        learn : whether the boundary loss is computed; measure : whether what the target would keep is compared
        """
        policy = self.policy
        decay: dict[str, Any] = {"decay_every": policy.decay_every}
        queries = self.boundary.draw(lengths, policy.sinks + policy.window + policy.k, width)
        return LearnedView(
            base_of(student).cache_scorers,
            policy,
            lengths,
            prompts=prompts if policy.prefill == "dense" else None,
            target=self.target if learn or measure else None,
            prepare=partial(self.boundary.pairs, queries=queries, window=policy.window, **decay) if learn else None,
            loss=partial(self.boundary, **decay) if learn else None,
            kernel=kernel,
            recorded=None if traces is None else batch_traces(traces, [0] * len(traces), width)["evict_at"],
        )


@torch.no_grad()
def decisions_agree(model: Any, policy: KVpopPolicyConfig, rollouts: Sequence[Any]) -> float | None:
    """The share of evictions on which an engine and the model's own scorers agree, of all that either makes: 0 to 1.
    None where neither makes one.

    An eviction is a layer, kv head and token with its evict_at; the scorers decide anew on the rollouts' tokens.
    """
    same = either = 0
    for rollout in rollouts:
        batch = Batch.make([Example.from_rollout(rollout)], next(model.parameters()).device)
        lengths, prompts = batch.sizes()
        recorded = batch_traces([rollout.trace], [0], len(rollout.trace))["evict_at"]
        dense = prompts if policy.prefill == "dense" else None
        view = LearnedView(model.cache_scorers, policy, lengths, prompts=dense, recorded=recorded)
        batch.hidden_under(model, view)
        ours = EvictionTrace.recorded(torch.cat([view.own[layer] for layer in sorted(view.own)])).evict_at
        theirs = rollout.trace.evict_at
        evicted = (ours < NEVER) | (theirs < NEVER)
        same += int(((ours == theirs) & evicted).sum())
        either += int(evicted.sum())
    return same / either if either else None
