"""Attention in training under the evictions that scorers decide; each layer decides by its own keys and values.

The evictions of a forward pass are decided once. If gradient checkpointing repeats the forward pass, it uses the same
evictions, because scores that are summed in another order could give other evictions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparse_rl.attention.interface import KVView
from sparse_rl.attention.logprobs import read_under
from sparse_rl.attention.views import map_of_traces
from sparse_rl.kernels import RunningTopK, recall, running_topk
from sparse_rl.kernels.exact import sdpa
from sparse_rl.kernels.masked import masked_attention
from sparse_rl.methods.config import KVpopPolicyConfig
from sparse_rl.methods.kvpop.target import FutureTarget
from sparse_rl.trace import NEVER, EvictionTrace, batch_traces, pinned, policy_part


def share_held(held: Tensor, lengths: Tensor) -> Tensor:
    """Return the share of each row's fed tokens (all but the last) that is held at the row's end: float [B].

    The share is a mean over heads. `held`, float [B, Hkv, S], from 0 to 1, is the degree to which the last query that
    is fed sees each token.
    """
    fed = (lengths - 1).clamp(min=1)
    counted = torch.arange(held.shape[-1], device=held.device) < fed[:, None]
    return (held * counted[:, None]).sum(-1).mean(-1) / fed


@dataclass
class LayerTarget:
    """The training target of a layer's scorer."""

    scores: Tensor  # float32 [B, Hkv, S], the scores that the scorer learns to predict
    best: RunningTopK  # the tokens that a cache keeps if it ranks them by `scores`


@dataclass
class _Decided:
    evict_at: Tensor  # int32 [B, Hkv, S]
    evicts: bool  # True if any token is evicted
    known: Any  # an input of the loss


@dataclass(eq=False)
class LearnedView(KVView):
    """A `kv_view` for one forward and backward pass over B right-padded rows of S columns."""

    # one function per layer, called with (keys, values, window); it returns the scores, float32 [B, Hkv, S], and the
    # logarithm of each kv head's decay gamma, [Hkv]
    scorers: Sequence[Callable[..., tuple[Tensor, Tensor]]]
    policy: KVpopPolicyConfig = field()  # only sinks, window, k and decay_every are used
    lengths: Tensor  # int64 [B], number of tokens of each row
    _: KW_ONLY
    # int64 [B], number of tokens of each prompt; evictions within a prompt are moved to its end: its queries see
    # all tokens before them. None means that evictions apply from the first query
    prompts: Tensor | None = None
    target: FutureTarget | None = None  # computes the training target of the scorers; None: the view only attends
    # (training target, log gamma) -> the third input of `loss`; called once per layer, without gradients
    prepare: Callable[[LayerTarget, Tensor], Any] | None = None
    loss: Callable[[Tensor, Tensor, Any], Tensor] | None = None  # (scores, log gamma, result of `prepare`) -> a scalar
    kernel: str = "gather"  # one of ATTENTION_KERNELS
    # int32 [L, B, Hkv, S], evict_at of an engine, used in attention instead of the scorers' own decisions
    recorded: Tensor | None = None

    # After the forward pass, for each layer: evict_at as the scorers decide, int32 [B, Hkv, S], only with `recorded`;
    own: dict[int, Tensor] = field(default_factory=dict, init=False)
    # the loss, which keeps the autograd graph alive;
    losses: dict[int, Tensor] = field(default_factory=dict, init=False)
    # a pair (held, of), summed over all queries: `of` counts the tokens that the target would keep, and `held` counts
    # those among them that are kept;
    recalls: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)
    # float [B], the share of each row's tokens that is held at the row's end, as in EvictionTrace.retention
    retained: dict[int, Tensor] = field(default_factory=dict, init=False)
    _decided: dict[int, _Decided] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.recorded = None if self.recorded is None else pinned(self.recorded, self.lengths.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        scores, log_decay = self.scorers[layer](key, value, self.policy.window)
        if layer not in self._decided:
            self._decided[layer] = self._decide(layer, scores, log_decay, query, key, scaling)
        decided = self._decided[layer]
        if self.loss is not None:
            loss = self.loss(scores, log_decay, decided.known)  # also computed when checkpointing recomputes the layer
            self.losses.setdefault(layer, loss)
        if not decided.evicts:
            return sdpa(query, key, value, scaling, causal=True)
        return masked_attention(lambda: decided.evict_at, query, key, value, scaling, self.kernel)

    @torch.no_grad()
    def _decide(
        self, layer: int, scores: Tensor, log_decay: Tensor, query: Tensor, key: Tensor, scaling: float
    ) -> _Decided:
        policy, lengths = self.policy, self.lengths
        sizes: dict[str, Any] = {"window": policy.window, "k": policy.k, "lengths": lengths}
        ranked: dict[str, Any] = {"log_decay": log_decay, "decay_every": policy.decay_every, **sizes}
        decisions = running_topk(scores, policy.sinks, **ranked)
        evict_at = decisions.evict_at
        if self.prompts is not None:
            evict_at = torch.maximum(evict_at, self.prompts[:, None, None].to(evict_at))
        if self.recorded is not None:
            self.own[layer] = evict_at
            evict_at = self.recorded[layer].to(evict_at.device, non_blocking=True)
            decisions = RunningTopK(evict_at, decisions.cutoff_rank, decisions.boundary)
        width, end = scores.shape[-1], lengths[:, None, None]
        self.retained[layer] = share_held((evict_at >= end - 1).float(), lengths)
        loss_input = None
        if self.target is not None:
            ends = lengths[:, None].expand(-1, width)
            target_scores = self.target(query.detach(), key.detach(), scaling, policy.window, ends, evict_at)
            best = running_topk(target_scores, policy.sinks, **ranked)
            self.recalls[layer] = recall(decisions, best, policy.sinks, **sizes)
            if self.prepare is not None:
                loss_input = self.prepare(LayerTarget(target_scores, best), log_decay)
        evicts = bool((evict_at < width).any())
        padding = torch.arange(width, device=scores.device) >= end  # no query sees it
        return _Decided(evict_at.masked_fill(padding, 0), evicts, loss_input)


@torch.no_grad()
def decisions_agree(model: Any, policy: KVpopPolicyConfig, rollouts: Sequence[Any]) -> float | None:
    """Return the share of evictions on which an engine and the model's own scorers agree; None without evictions.

    The scorers decide again on the tokens of the rollouts. In each layer and kv head, a token counts if the engine or
    the scorers evict it; they agree on the token if its evict_at is equal.
    """
    same = either = 0
    device = next(model.parameters()).device
    for rollout in rollouts:
        lengths, prompts = (torch.tensor([n], device=device) for n in (len(rollout.trace), len(rollout.prompt_ids)))
        recorded = batch_traces([rollout.trace], [0], len(rollout.trace))
        dense, theirs = prompts if policy.prefill == "dense" else None, policy_part(recorded)["evict_at"]
        view = LearnedView(model.cache_scorers, policy, lengths, prompts=dense, recorded=theirs)
        read_under(map_of_traces(view, recorded, device), model, rollout)
        ours = EvictionTrace.recorded(torch.cat([view.own[layer] for layer in sorted(view.own)])).evict_at
        theirs = theirs[:, 0]
        evicted = (ours < NEVER) | (theirs < NEVER)
        same += int(((ours == theirs) & evicted).sum())
        either += int(evicted.sum())
    return same / either if either else None
