"""The target of the scorers: the attention that a token will still receive."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl.attention.config import TargetConfig
from sparse_rl.attention.future import attention_lse, future_attention_mass
from sparse_rl.attention.future_parity import target_kernel
from sparse_rl.attention.kernels.sdpa import computing_dtype


class FutureTarget:
    """The target of the scorers: r_t = log(floor + m_t), with m_t the mass of future attention of a kv head.

    The attention is the student's (p is normalised over the tokens that a query sees), or the dense attention;
    lookahead and normalise are as in future_attention_mass. The floor, epsilon, is ours: the papers give none.

    The loop uses queries and keys as they are passed. FlexAttention on a GPU uses them as the attention does, rounded
    to autocast's dtype. Sums are in float32 in either case.
    """

    def __init__(self, config: TargetConfig) -> None:
        self.config = config

    def __call__(
        self, query: Tensor, key: Tensor, scaling: float, window: int, ends: Tensor, evict_at: Tensor
    ) -> Tensor:
        """Compute the target of one layer: float32 [B, Hkv, S].

        query : [B, Hq, S, D]; key : [B, Hkv, S, D]; after RoPE
        window : w, number of most recent tokens that a query always sees
        ends : int64 [B, S], the end of each token's document
        evict_at : int32 [B, Hkv, S], the evictions of the student
        """
        sparse = evict_at if self.config.normaliser == "sparse" else None
        dtype = computing_dtype(query, key)
        with torch.autocast(query.device.type, enabled=False):  # in float32, whatever the model computes in
            kernel = target_kernel(query.device, dtype, (query.shape[1], key.shape[1], query.shape[3]))
            if kernel == "flex":
                query, key = query.to(dtype), key.to(dtype)
            return future_attention_mass(
                query,
                key,
                window=window,
                scaling=scaling,
                ends=ends,
                log_sum_exp=attention_lse(query, key, scaling=scaling, ends=ends, evict_at=sparse, kernel=kernel),
                lookahead=self.config.lookahead,
                normalise=self.config.normalise,
                group=self.config.group,
                floor=self.config.floor,
                kernel=kernel,
            )
