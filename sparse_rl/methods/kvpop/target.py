"""The training target of KVpop's scorers, from the attention that a token receives after its window; and recall.

The best possible cache is the "full-attention teacher" of figure 7 in the KVpop paper. At each query it holds the
sinks, the window, and the k other tokens with the best scores, that is, the best training targets, computed in a model
with a full cache. If `log_decay` is given, scores decay with age (KVpop eq. 5). The recall of a cache is the share of
the best possible cache's tokens that it holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparse_rl.attention.interface import NO_MASK, KVView, adopt
from sparse_rl.attention.views import map_of_model
from sparse_rl.kernels import running_topk
from sparse_rl.kernels.exact import computing_dtype, sdpa
from sparse_rl.kernels.future import attention_lse, future_attention_mass
from sparse_rl.kernels.parity import target_kernel
from sparse_rl.methods.config import KVpopPolicyConfig
from sparse_rl.methods.kvpop.config import TargetConfig
from sparse_rl.trace import NEVER, EvictionTrace, policy_part


class FutureTarget:
    """Computes the training target of KVpop's scorers, r_t = log(floor + m_t).

    m_t is the future attention of token t in a kv head (`future_attention_mass`). The value of the floor is our choice;
    the papers give none. We add it to the mean attention, as equation 3 of the full paper does; equations 14 and 17 add
    it to the sum. The torch kernel uses queries and keys as they are passed. FlexAttention, on a GPU, rounds them to
    autocast's dtype first, as the model's attention does. Sums are in float32 in both cases.
    """

    def __init__(self, config: TargetConfig) -> None:
        self.config = config

    def __call__(
        self, query: Tensor, key: Tensor, scaling: float, window: int, ends: Tensor, evict_at: Tensor
    ) -> Tensor:
        """Compute the training target of one layer: float32 [B, Hkv, S].

        query, key, ends : as in `future_attention_mass`
        evict_at : int32 [B, Hkv, S], the evictions under which the model attends; read only if `normaliser` is sparse
        """
        sparse = evict_at if self.config.normaliser == "sparse" else None
        dtype = computing_dtype(query, key)
        with torch.autocast(query.device.type, enabled=False):  # sums are in float32 for any dtype of the model
            kernel = target_kernel(query.device, dtype, (query.shape[1], key.shape[1], query.shape[3]))
            if kernel == "flex":
                query, key = query.to(dtype), key.to(dtype)
            shared: dict[str, Any] = {"scaling": scaling, "ends": ends, "kernel": kernel}
            lse = attention_lse(query, key, evict_at=sparse, **shared)
            settings = {name: getattr(self.config, name) for name in ("lookahead", "normalise", "group", "floor")}
            return future_attention_mass(query, key, window=window, log_sum_exp=lse, **shared, **settings)


@dataclass
class _TargetView(KVView):
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
    whole = map_of_model(view, teacher.config, torch.tensor([fed], device=device), fed)
    adopt(teacher)(input_ids=ids, attention_mask=NO_MASK.to(device), kv_view=whole, use_cache=False, logits_to_keep=1)
    evict_at = torch.full((len(view.found), view.found[0].shape[1], len(tokens)), NEVER, dtype=torch.int32)
    for layer, mass in view.found.items():
        decay = None if log_decay is None else log_decay[layer]
        sizes: dict[str, Any] = {"window": policy.window, "k": policy.k, "decay_every": policy.decay_every}
        best = running_topk(mass, policy.sinks, log_decay=decay, **sizes).evict_at[0]
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

    The trace is from any policy that keeps the same sinks and window as `policy`; the other arguments are as in
    `oracle_trace`. Only decoding queries at which more than k tokens compete count; without one, the result is NaN.
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
