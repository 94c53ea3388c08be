"""The training target of KVpop's scorers, made from the attention that a token receives after leaving the window."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl.attention.config import TargetConfig
from sparse_rl.attention.future import attention_lse, future_attention_mass
from sparse_rl.attention.future_parity import target_kernel
from sparse_rl.attention.kernels.sdpa import computing_dtype


class FutureTarget:
    """Computes the training target of KVpop's scorers, r_t = log(floor + m_t).

    m_t is the future attention of token t in a kv head (`future_attention_mass`). The value of the floor is our choice;
    the papers give none. We add the floor to the mean attention, as equation 3 of the full paper does. Equations 14 and
    17 of that paper add it to the sum, before the division by N_t. The torch kernel uses queries and keys as they are
    passed. FlexAttention, on a GPU, rounds them to autocast's dtype first, as the model's attention does. Sums are in
    float32 in both cases.
    """

    def __init__(self, config: TargetConfig) -> None:
        self.config = config

    def __call__(
        self, query: Tensor, key: Tensor, scaling: float, window: int, ends: Tensor, evict_at: Tensor
    ) -> Tensor:
        """Compute the training target of one layer: float32 [B, Hkv, S], for B rows of S tokens.

        query, key : [B, Hq, S, D] and [B, Hkv, S, D], after RoPE
        ends : int64 [B, S], the end of each token's document
        evict_at : int32 [B, Hkv, S], the evictions under which the model attends; read only if `normaliser` is sparse
        """
        sparse = evict_at if self.config.normaliser == "sparse" else None
        dtype = computing_dtype(query, key)
        with torch.autocast(query.device.type, enabled=False):  # sums are in float32 for any dtype of the model
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
