"""Recall of a cache by layer and kv head: the share of the best possible cache's tokens that the cache holds.

The best possible cache is the "full-attention teacher" of figure 7 in the KVpop paper. At each query it holds the
sinks, the window, and the k other tokens with the best scores. The score of a token is the training target of KVpop's
scorers, computed in a model with a full cache: the mean attention that the token receives from all queries after it has
left the window. If `log_decay` is given, scores decay with age (KVpop eq. 5).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparse_rl.attention.config import TargetConfig
from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.attention.kernels.sdpa import sdpa
from sparse_rl.attention.target import FutureTarget
from sparse_rl.attention.windows.view import WindowedView
from sparse_rl.kernels import running_topk
from sparse_rl.methods.config import KVpopPolicyConfig
from sparse_rl.trace import NEVER, EvictionTrace, policy_part


@dataclass
class _TargetView:
    """A `kv_view` that attends to all tokens and stores each layer's training target, float32 [1, kv heads, tokens]."""

    target: FutureTarget
    window: int
    found: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        ends = torch.full((len(key), key.shape[2]), key.shape[2], device=key.device)
        never = torch.full(key.shape[:3], NEVER, dtype=torch.int32, device=key.device)
        self.found[layer] = self.target(query, key, scaling, self.window, ends, never)
        return sdpa(query, key, value, scaling, causal=True)


@torch.no_grad()
def oracle_trace(
    teacher: Any,
    tokens: list[int],
    prompt: int,
    policy: KVpopPolicyConfig,
    log_decay: Tensor | None = None,
    target: TargetConfig | None = None,
) -> EvictionTrace:
    """Return the trace of the best possible cache for one sequence, in the layers without a sliding window. No token is
    evicted inside the prompt.

    teacher : model with a full cache
    tokens, prompt : token ids of prompt and completion, and number of tokens of the prompt
    policy : settings of the policy; only sinks, window, k and decay_every are used
    log_decay : log gamma, [layers, kv heads], from the policy's scorers; None means no decay
    target : settings of the training target that ranks tokens; None means future attention, normalised over all tokens
    """
    fed, device = len(tokens) - 1, next(teacher.parameters()).device
    view = _TargetView(FutureTarget(target or TargetConfig(normaliser="dense")), policy.window)
    ids = torch.tensor([tokens[:fed]], device=device)
    fed_tensor = torch.tensor([fed], device=device)
    beside = WindowedView.unrecorded(view, teacher.config, fed_tensor, fed, device)
    adopt(teacher)(input_ids=ids, attention_mask=NO_MASK.to(device), kv_view=beside, use_cache=False, logits_to_keep=1)
    evict_at = torch.full((len(view.found), view.found[0].shape[1], len(tokens)), NEVER, dtype=torch.int32)
    for layer, mass in view.found.items():
        decay = None if log_decay is None else log_decay[layer]
        best = running_topk(
            mass, policy.sinks, window=policy.window, k=policy.k, log_decay=decay, decay_every=policy.decay_every
        ).evict_at[0]
        evict_at[layer, :, :fed] = best.cpu().clamp(min=prompt)
    return EvictionTrace(evict_at.masked_fill(evict_at >= fed, NEVER))


@torch.no_grad()
def oracle_recall(
    teacher: Any,
    tokens: list[int],
    prompt: int,
    trace: EvictionTrace,
    policy: KVpopPolicyConfig,
    log_decay: Tensor | None = None,
    target: TargetConfig | None = None,
) -> Tensor:
    """Return the recall of a trace: the share of the best cache's k tokens that it holds, float64 [layers, kv heads].
    Layers with a sliding window are left out.

    trace : the trace to judge, from any policy that keeps the same sinks and window as `policy`

    The other arguments are as in `oracle_trace`. Only decoding queries at which more than k tokens compete count; if
    there is no such query, the result is NaN.
    """
    fed, window, k = len(tokens) - 1, policy.window, policy.k
    best = oracle_trace(teacher, tokens, prompt, policy, log_decay, target).evict_at[..., :fed]
    token = torch.arange(fed)
    begin = (token + window).clamp(min=max(prompt, policy.sinks + window + k))  # the first query that counts
    held_until = policy_part(trace.sections)["evict_at"][..., :fed]
    # The queries that see a token end once, so numbers of queries suffice: no query needs to be visited.
    wanted = (best.clamp(max=fed) - begin).clamp(min=0)[..., policy.sinks :]
    held = (torch.minimum(best, held_until).clamp(max=fed) - begin).clamp(min=0)[..., policy.sinks :]
    return held.sum(-1) / wanted.sum(-1).double()
