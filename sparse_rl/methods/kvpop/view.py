"""Attention in training under the evictions that scorers decide; each layer decides by its own keys and values.

The evictions of a forward pass are decided once. If gradient checkpointing repeats the forward pass, it uses the same
evictions, because scores that are summed in another order could give other evictions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparse_rl.attention.future import future_bytes
from sparse_rl.attention.interface import Replayed
from sparse_rl.attention.kernels.masked import masked_attention
from sparse_rl.attention.kernels.sdpa import sdpa
from sparse_rl.attention.target import FutureTarget
from sparse_rl.attention.views.replay import ReplayView
from sparse_rl.kernels import RunningTopK, recall, running_topk
from sparse_rl.methods.config import KVpopPolicyConfig


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
    """The training target of a layer's scorer.

    scores : float32 [B, Hkv, S], the scores that the scorer learns to predict
    best : the tokens that a cache keeps if it ranks them by `scores`
    """

    scores: Tensor
    best: RunningTopK


@dataclass
class _Decided:
    """A layer's decisions: evict_at, int32 [B, Hkv, S]; True if any token is evicted; `known`, an input of the loss."""

    evict_at: Tensor
    evicts: bool
    known: Any


class LearnedView:
    """A `kv_view` for one forward and backward pass over B right-padded rows of S columns.

    scorers : one function per layer, called with (keys, values, window); it returns the scores, float32 [B, Hkv, S],
        and the logarithm of each kv head's decay gamma, [Hkv]
    policy : settings; only sinks, window, k and decay_every are used
    lengths : int64 [B], number of tokens of each row
    prompts : int64 [B], number of tokens of each prompt; evictions within a prompt are moved to the prompt's end, so
        that prompt queries see all prompt tokens before them. None means that evictions apply from the first query
    target : computes the training target of the scorers; None means that the view only attends
    prepare : function, (training target, log gamma) -> the third input of `loss`; called once per layer, without
        gradients
    loss : function, (scores, log gamma, result of `prepare`) -> a scalar
    kernel : one of ATTENTION_KERNELS
    recorded : int32 [L, B, Hkv, S], evict_at of an engine, used in attention instead of the scorers' own decisions

    Attributes after the forward pass, for each layer:

    own : evict_at as the scorers decide, int32 [B, Hkv, S]; stored only if `recorded` is given
    losses : the loss; it keeps the autograd graph alive
    recalls : a pair (held, of), summed over all queries: `of` counts the tokens that the target would keep, and `held`
        counts those among them that are kept
    retained : float [B], the share of each row's tokens that is held at the row's end, as in EvictionTrace.retention
    """

    def __init__(
        self,
        scorers: Sequence[Callable[..., tuple[Tensor, Tensor]]],
        policy: KVpopPolicyConfig,
        lengths: Tensor,
        *,
        prompts: Tensor | None = None,
        target: FutureTarget | None = None,
        prepare: Callable[[LayerTarget, Tensor], Any] | None = None,
        loss: Callable[[Tensor, Tensor, Any], Tensor] | None = None,
        kernel: str = "gather",
        recorded: Tensor | None = None,
    ) -> None:
        self.recorded = recorded
        self.own: dict[int, Tensor] = {}
        self.scorers, self.policy, self.lengths, self.prompts = scorers, policy, lengths, prompts
        self.target, self.prepare, self.loss, self.kernel = target, prepare, loss, kernel
        self.losses: dict[int, Tensor] = {}
        self.recalls: dict[int, tuple[Tensor, Tensor]] = {}
        self.retained: dict[int, Tensor] = {}
        self._decided: dict[int, _Decided] = {}

    @classmethod
    def holds(cls, config: Any, replayed: Replayed) -> list[tuple[str, int, str]]:
        sizes = replayed.rows, replayed.heads, replayed.head_dim, replayed.length
        held = future_bytes(*sizes, replayed.model_itemsize, replayed.cuda)
        return [*ReplayView.holds(config, replayed), ("future attention", held, "the scorers' target, of one layer")]

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

    def running_topk(self, scores: Tensor, log_decay: Tensor) -> RunningTopK:
        """Return the tokens that the policy keeps at every query if it ranks by the scores [B, Hkv, S]."""
        policy = self.policy
        return running_topk(
            scores,
            policy.sinks,
            window=policy.window,
            k=policy.k,
            log_decay=log_decay,
            decay_every=policy.decay_every,
            lengths=self.lengths,
        )

    @torch.no_grad()
    def _decide(
        self, layer: int, scores: Tensor, log_decay: Tensor, query: Tensor, key: Tensor, scaling: float
    ) -> _Decided:
        policy, lengths = self.policy, self.lengths
        decisions = self.running_topk(scores, log_decay)
        evict_at = decisions.evict_at
        if self.prompts is not None:
            evict_at = torch.maximum(evict_at, self.prompts[:, None, None].to(evict_at))
        if self.recorded is not None:
            self.own[layer] = evict_at
            evict_at = self.recorded[layer].to(evict_at)
            decisions = RunningTopK(evict_at, decisions.cutoff_rank, decisions.boundary)
        width = scores.shape[-1]
        end = lengths[:, None, None]
        positions = torch.arange(width, device=scores.device)
        self.retained[layer] = share_held((evict_at >= end - 1).float(), lengths)
        loss_input = None
        if self.target is not None:
            ends = lengths[:, None].expand(-1, width)
            target_scores = self.target(query.detach(), key.detach(), scaling, policy.window, ends, evict_at)
            best = self.running_topk(target_scores, log_decay)
            self.recalls[layer] = recall(
                decisions, best, policy.sinks, window=policy.window, k=policy.k, lengths=lengths
            )
            if self.prepare is not None:
                loss_input = self.prepare(LayerTarget(target_scores, best), log_decay)
        evicts = bool((evict_at < width).any())
        return _Decided(evict_at.masked_fill(positions >= end, 0), evicts, loss_input)  # no query sees padding
