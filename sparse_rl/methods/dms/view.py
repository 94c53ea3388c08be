"""Attention under DMS's gates in training. The gates are soft: they reduce a token's weight instead of dropping it.

The gate of token t is the Gumbel-sigmoid with temperature tau and logistic noise g:

    alpha_t = sigmoid((score_t + bias + g) / tau)

If q - t >= w, where w is the window, log(1 - alpha_t) is added to the logit of query q and token t. Under dense
prefill, this is done only for queries q after the prompt. The added terms of one layer would have the shape
[B, Hkv, S, S], so they are computed for CHUNK queries at a time, and again in the backward pass. Without a temperature
the gates are hard, as in decoding: query t + w and later queries do not see a token t with score + bias > 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparse_rl.attention.interface import Replayed
from sparse_rl.attention.kernels.masked import masked_attention
from sparse_rl.attention.kernels.sdpa import computing_dtype, sdpa
from sparse_rl.methods.config import DMSConfig
from sparse_rl.methods.kvpop.view import share_held
from sparse_rl.trace import NEVER

CHUNK = 256  # queries whose biases are computed at a time


class GatedView:
    """A `kv_view` for one forward and backward pass over B right-padded rows of S columns.

    scorers : one function per layer, called with (keys, values, window); it returns the scores, float32 [B, Hkv, S],
        and the logarithm of each kv head's decay gamma, [Hkv]
    policy : settings; only sinks, window and bias are used
    lengths : int64 [B], number of tokens of each row
    prompts : int64 [B], number of tokens of each row's prompt. No gate applies to queries of the prompt; None means
        that gates apply from the first query
    temperature : tau; None means hard gates
    kernel : one of ATTENTION_KERNELS, used with hard gates

    Attributes after the forward pass:

    open : for each layer, the sum of alpha over all real tokens and heads, with its autograd graph; for hard gates, the
        number of open gates
    gates : number of gates of a layer
    retained : for each layer, float [B], the share of each row's tokens that is held at the end of the row. With soft
        gates, a token that could have been dropped by then counts as 1 - alpha
    """

    def __init__(
        self,
        scorers: Sequence[Callable[..., tuple[Tensor, Tensor]]],
        policy: DMSConfig,
        lengths: Tensor,
        *,
        prompts: Tensor | None = None,
        temperature: float | None = None,
        kernel: str = "gather",
    ) -> None:
        self.scorers, self.policy, self.lengths = scorers, policy, lengths
        self.prompts = torch.zeros_like(lengths) if prompts is None else prompts
        self.temperature, self.kernel = temperature, kernel
        self.open: dict[int, Tensor] = {}
        self.gates = 0
        self.retained: dict[int, Tensor] = {}
        self._noise: dict[int, Tensor] = {}

    @classmethod
    def holds(cls, config: Any, replayed: Replayed) -> list[tuple[str, int, str]]:
        held = gates_bytes(replayed.rows, replayed.heads, replayed.kv_heads, replayed.length, replayed.itemsize)
        return [("gates", held, "estimate, soft biases of a chunk of one layer's queries")]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        scores, log_decay = self.scorers[layer](key, value, self.policy.window)
        logits = scores + self.policy.bias + 0.0 * log_decay[:, None]  # the decay has no effect, but gets a gradient
        places = torch.arange(key.shape[2], device=key.device)
        may_go = (places >= self.policy.sinks) & (places < self.lengths[:, None])  # [B, S]
        real = (places < self.lengths[:, None])[:, None].expand_as(logits)
        self.gates = int(real.sum())
        goes_at = torch.maximum(
            places + self.policy.window, self.prompts[:, None]
        )  # first query to which the token's gate applies
        if self.temperature is None:
            evict_at = self.evict_at(logits, may_go, goes_at)
            self.open.setdefault(layer, ((logits > 0) & may_go[:, None]).sum().float())
            self.retained[layer] = share_held((evict_at >= self.lengths[:, None, None] - 1).float(), self.lengths)
            evict_at = evict_at.masked_fill(~real, 0)  # no query sees padding
            return masked_attention(lambda: evict_at, query, key, value, scaling, self.kernel)
        soft = (logits + self._logistic(layer, logits)) / self.temperature
        alpha = torch.where(may_go[:, None], soft.sigmoid(), 0.0)
        self.open.setdefault(layer, alpha.sum())
        due = (goes_at < self.lengths[:, None] - 1)[:, None]
        self.retained[layer] = share_held(torch.where(due, 1 - alpha.detach(), 1.0), self.lengths)
        stays = torch.where(may_go[:, None], F.logsigmoid(-soft), 0.0)  # log(1 - alpha)
        return self._soft_attention(query, key, value, stays, goes_at, scaling)

    def _soft_attention(
        self, query: Tensor, key: Tensor, value: Tensor, stays: Tensor, goes_at: Tensor, scaling: float
    ) -> Tensor:
        """Attend under soft gates, in chunks of queries whose biases the backward pass recomputes.

        stays, goes_at : [B, Hkv, S], log(1 - alpha), added to a token's logits, and [B, S], the first query to which
            the token's gate applies
        """
        wide, parts = computing_dtype(query, value), list[Tensor]()
        grouped = query.to(wide).unflatten(1, (key.shape[1], -1))  # [B, Hkv, G, S, D]
        tensors = (key.to(wide), value.to(wide), stays)
        for queries in grouped.split(CHUNK, dim=3):
            work = partial(_attend_softly, len(parts) * CHUNK, scaling, goes_at, self.lengths)
            if torch.is_grad_enabled():
                parts.append(checkpoint(work, queries, *tensors, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(work(queries, *tensors))
        return torch.cat(parts, dim=3).flatten(1, 2).to(value.dtype)

    def evict_at(self, logits: Tensor, may_go: Tensor, goes_at: Tensor) -> Tensor:
        """Return evict_at of hard gates, int32 [B, Hkv, S]: `goes_at` [B, S] if the logit is positive, else NEVER."""
        return torch.where((logits > 0) & may_go[:, None], goes_at[:, None], NEVER).int()

    def share(self) -> Tensor:
        """Return the mean of alpha over all gates of all layers. Call this after the forward pass."""
        return torch.stack(list(self.open.values())).sum() / max(1, self.gates * len(self.open))

    @torch.no_grad()
    def _logistic(self, layer: int, like: Tensor) -> Tensor:
        """Return the logistic noise of a layer. It is the same when gradient checkpointing repeats the layer."""
        if layer not in self._noise:
            uniform = torch.rand(like.shape).clamp(1e-6, 1 - 1e-6).to(like)
            self._noise[layer] = uniform.log() - (-uniform).log1p()
        return self._noise[layer]


def _attend_softly(
    first: int,
    scaling: float,
    goes_at: Tensor,
    lengths: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stays: Tensor,
) -> Tensor:
    """Attend causally, under soft gates, from C consecutive queries to all tokens up to the last query.

    `first` is the position of the first query; `query` and the result are [B, Hkv, G, C, D].
    """
    last = first + query.shape[3]
    tokens = torch.arange(last, device=query.device)
    queries = tokens[first:, None]
    late = queries >= goes_at[:, None, None, :last]  # [B, 1, C, N]
    bias = torch.where(late, stays[:, :, None, :last], 0.0)
    hidden = (queries < tokens) | (tokens >= lengths[:, None, None, None])  # later tokens, and padding
    bias = bias.masked_fill(hidden & (queries != tokens), float("-inf")).to(query.dtype)
    # kv heads are folded into the batch, so that neither keys nor biases are repeated
    keys, values = (x[:, :, None, :last].expand(-1, -1, query.shape[2], -1, -1).flatten(0, 1) for x in (key, value))
    return sdpa(query.flatten(0, 1), keys, values, scaling, bias.flatten(0, 1)[:, None]).view(query.shape)


def gates_bytes(sequences: int, heads: int, kv_heads: int, length: int, itemsize: int) -> int:
    """Return the bytes that DMS's soft gates need for one chunk of a layer's queries.

    They hold the biases in float32 and in the attention's dtype, and three arrays of logits for the backward pass.
    """
    pairs = sequences * min(CHUNK, length) * length
    return pairs * (kv_heads * (4 + itemsize) + 3 * heads * itemsize)
