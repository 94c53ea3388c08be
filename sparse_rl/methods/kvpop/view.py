"""Attention under the mask that scorers induce, in training: every layer decides by its own keys and values.

The decisions of a forward are made once and replayed in the recomputed one, as those of an engine are: a kernel that
sums in another order would else evict another token in the backward pass than in the forward.
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
    """Of the tokens before each row's last, which no sampler feeds, the share that is held: float [B], mean over heads.

    held : float [B, Hkv, S], how far each token is seen by the last query that is fed; lengths : int64 [B]
    """
    fed = (lengths - 1).clamp(min=1)
    counted = torch.arange(held.shape[-1], device=held.device) < fed[:, None]
    return (held * counted[:, None]).sum(-1).mean(-1) / fed


@dataclass
class LayerTarget:
    """A layer's target: scores float32 [B, Hkv, S], and the tokens that the best by them would keep."""

    scores: Tensor
    best: RunningTopK


@dataclass
class _Decided:
    """evict_at int32 [B, Hkv, S]; known: what the loss takes from the target."""

    evict_at: Tensor
    evicts: bool
    known: Any


class LearnedView:
    """A `kv_view` for one forward, and its backward, of B right-padded rows.

    Parameters
    ----------
    scorers : of each layer, (keys, values, window) -> (scores float32 [B, Hkv, S], log gamma [Hkv])
    policy : sinks, window, k and decay
    lengths : int64 [B]
    prompts : int64 [B]; a prompt of so many tokens sees the whole of itself, and what is dropped in it goes at its end.
        None: the mask applies from the start
    target : what the scorers are to foresee; None: only attend
    prepare : (target, log gamma) -> what `loss` needs of it; called once in a layer, without gradient
    loss : (scores, log gamma, that) -> a scalar
    kernel : one of ATTENTION_KERNELS
    recorded : int32 [L, B, Hkv, S], evict_at of an engine: attend under these decisions instead of one's own

    Attributes
    ----------
    own : by layer, the scorers' own decisions, int32 [B, Hkv, S]; kept where others are `recorded`
    losses : by layer, once the forward is done; they hold on to its graph
    recalls : by layer, (held, of): how many of the tokens that the target would keep, over all queries, are kept
    retained : by layer, of each row the share of its tokens that is held at the end: float [B], as
        EvictionTrace.retention has it
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
        """What the replay of its own decisions holds, and the scorers' target."""
        sizes = replayed.rows, replayed.heads, replayed.head_dim, replayed.length
        held = future_bytes(*sizes, replayed.model_itemsize, replayed.cuda)
        return [*ReplayView.holds(config, replayed), ("future attention", held, "the scorers' target, of one layer")]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `KVView.attend`."""
        scores, log_decay = self.scorers[layer](key, value, self.policy.window)
        if layer not in self._decided:
            self._decided[layer] = self._decide(layer, scores, log_decay, query, key, scaling)
        decided = self._decided[layer]
        if self.loss is not None:
            loss = self.loss(scores, log_decay, decided.known)  # made again where the layer is recomputed
            self.losses.setdefault(layer, loss)
        if not decided.evicts:
            return sdpa(query, key, value, scaling, causal=True)
        return masked_attention(lambda: decided.evict_at, query, key, value, scaling, self.kernel)

    def running_topk(self, scores: Tensor, log_decay: Tensor) -> RunningTopK:
        """Under the policy, of scores [B, Hkv, S]."""
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
        ours = self.running_topk(scores, log_decay)
        evict_at = ours.evict_at
        if self.prompts is not None:
            evict_at = torch.maximum(evict_at, self.prompts[:, None, None].to(evict_at))
        if self.recorded is not None:
            self.own[layer] = evict_at
            evict_at = self.recorded[layer].to(evict_at)
            ours = RunningTopK(evict_at, ours.cutoff_rank, ours.boundary)
        width = scores.shape[-1]
        end = lengths[:, None, None]
        places = torch.arange(width, device=scores.device)
        self.retained[layer] = share_held((evict_at >= end - 1).float(), lengths)
        known = None
        if self.target is not None:
            ends = lengths[:, None].expand(-1, width)
            wanted = self.target(query.detach(), key.detach(), scaling, policy.window, ends, evict_at)
            best = self.running_topk(wanted, log_decay)
            self.recalls[layer] = recall(ours, best, policy.sinks, window=policy.window, k=policy.k, lengths=lengths)
            if self.prepare is not None:
                known = self.prepare(LayerTarget(wanted, best), log_decay)
        evicts = bool((evict_at < width).any())
        return _Decided(evict_at.masked_fill(places >= end, 0), evicts, known)  # nobody sees padding
