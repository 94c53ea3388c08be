"""Future attention: the attention that a token receives after it has left the window.

KVpop's scorers are trained to predict the logarithm of the future attention of token t,

    m_t = 1 / N_t  sum over d >= t + w of p_{d -> t},    N_t = max(1, number of these d)

where w is the number of tokens in the window, and p_{d -> t} is the attention probability of query d for token t. p is
computed from the log-sum-exp of each query's scores, so that no tensor of tokens x tokens is made: the torch kernel
processes a chunk of keys at a time; FlexAttention (`mass_by_flex` in flex.py) visits only the tiles with pairs.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sparse_rl.kernels.flex import VALUE_DIM, flex_attend, mass_by_flex, padded

Kernel = Literal["torch", "flex"]
CHUNK = 512  # keys or queries at a time
LARGEST = 40.0  # upper limit of log p, against overflow: p of an evicted token may exceed 1 (see `log_sum_exp`)


@torch.no_grad()
def future_attention_mass(
    query: Tensor,
    key: Tensor,
    *,
    window: int,
    scaling: float,
    ends: Tensor | None = None,
    log_sum_exp: Tensor | None = None,
    lookahead: int | None = None,
    normalise: bool = True,
    group: Literal["max", "mean"] | None = None,
    floor: float = 0.0,
    chunk: int = CHUNK,
    kernel: Kernel = "torch",
) -> Tensor:
    """Return log(floor + m_t), the logarithm of the future attention of every token t.

    query, key : [B, Hq, S, D] and [B, Hkv, S, D], after RoPE
    window : w >= 1; the queries before t + w always see t
    scaling : the factor on q . k
    ends : int64 [B, S], the end of each token's document. Documents are contiguous, and query d sees token t if
        t <= d < ends[t]. None means that one document fills each row. A padding token has ends[t] <= t.
    log_sum_exp : float32 [B, Hq, S], log-sum-exp of each query's scaled scores, which normalises p. None means the
        log-sum-exp over all tokens up to the query. If it runs only over the tokens that a model with evictions sees,
        p is that model's attention; for an evicted token, p is then not a probability, and is limited to e^40
    lookahead : if not None, only the queries d <= t + w + lookahead count
    normalise : True divides by N_t
    group : reduction over the query heads that share a kv head: "max" takes the largest log, "mean" takes the mean of
        m_t before the log; None means no reduction
    floor : added to m_t; with 0, the result is -inf for tokens that receive no attention
    chunk : number of keys that the torch kernel processes at a time
    kernel : flex is FlexAttention. On a GPU it is compiled, and its scores have the precision of the queries' dtype. On
        a CPU it is torch's plain operator, which is slow

    Returns float32 [B, Hq, S], or [B, Hkv, S] with `group`; float64 for float64 input.
    """
    batch, q_heads, length, _ = query.shape
    kv_heads = key.shape[1]
    if ends is None:
        ends = torch.full((batch, length), length, device=query.device)
    if log_sum_exp is None:
        log_sum_exp = attention_lse(query, key, scaling=scaling, ends=ends, chunk=chunk, kernel=kernel)
    first, last = torch.arange(length, device=query.device) + window, ends.clamp(max=length)
    if lookahead is not None:
        last = torch.minimum(last, first + lookahead + 1)
    if kernel == "flex":
        spans = first.expand_as(last), last
        logs = mass_by_flex(query, key, log_sum_exp, *spans, scaling, LARGEST, compiled=query.is_cuda)
        mass = logs.exp().reshape(batch, kv_heads, -1, length)
    else:
        mass = _mass(query, key, log_sum_exp, window, last, scaling, chunk)
    if normalise:
        mass = mass / (last - first).clamp(min=1)[:, None, None]
    if group == "mean":
        return (floor + mass.mean(2)).log()
    if group == "max":
        return (floor + mass).log().amax(2)
    return (floor + mass).log().reshape(batch, q_heads, length)


def _mass(
    query: Tensor, key: Tensor, log_sum_exp: Tensor, window: int, last: Tensor, scaling: float, chunk: int
) -> Tensor:
    """Return, for every token t, the sum of p_{d -> t} over the queries t + w <= d < last[t]: [B, Hkv, G, S]."""
    batch, _, length, dim = query.shape
    kv_heads, dtype = key.shape[1], _sum_dtype(query)
    grouped = query.to(dtype).reshape(batch, kv_heads, -1, length, dim) * scaling
    lse = log_sum_exp.to(dtype).reshape(batch, kv_heads, -1, length)
    queries = torch.arange(length, device=query.device)
    mass = torch.zeros_like(lse)
    for start in range(0, length, chunk):
        part = slice(start, start + chunk)
        later = slice(min(start + window, length), None)  # earlier queries count for no key of this chunk
        far_enough = queries[later] >= queries[part, None] + window
        counted = far_enough & (queries[later] < last[:, part, None])  # [B, keys, queries]
        scores = key[:, :, None, part].to(dtype) @ grouped[..., later, :].transpose(-1, -2)
        scores = (scores - lse[..., None, later]).masked_fill(~counted[:, None, None], float("-inf"))
        mass[..., part] = scores.clamp(max=LARGEST).exp().sum(-1)
    return mass


@torch.no_grad()
def attention_lse(
    query: Tensor,
    key: Tensor,
    *,
    scaling: float,
    ends: Tensor | None = None,
    evict_at: Tensor | None = None,
    chunk: int = CHUNK,
    kernel: Kernel = "torch",
) -> Tensor:
    """Return the log-sum-exp of each query's scaled scores, -inf for a query that sees no token.

    query, key, scaling, ends, kernel : as in `future_attention_mass`
    evict_at : int32 [B, Hkv, S]; the sum runs over the tokens that the query sees under these evictions. None means all
        tokens up to the query
    chunk : number of queries that the torch kernel processes at a time

    Returns float32 [B, Hq, S], or float64 for float64 input.
    """
    batch, q_heads, length, dim = query.shape
    kv_heads, dtype = key.shape[1], _sum_dtype(query)
    if ends is None:
        ends = torch.full((batch, length), length, device=query.device)
    if kernel == "flex":
        document_ends = ends[:, None].expand(-1, kv_heads, -1).int()
        seen = document_ends if evict_at is None else torch.minimum(document_ends, evict_at)
        value = key.new_zeros(*key.shape[:3], VALUE_DIM)
        options = {"in_segments": evict_at is not None, "compiled": query.is_cuda, "want_lse": True}
        lse = flex_attend(seen, query, key, value, scaling, **options)[1]
        assert lse is not None
        return lse.to(dtype)
    grouped = query.to(dtype).reshape(batch, kv_heads, -1, length, dim) * scaling
    places = torch.arange(length, device=query.device)
    parts = []
    for start in range(0, length, chunk):
        at = places[start : start + chunk, None]
        seen = ((places <= at) & (at < ends[:, None]))[:, None]  # [B, 1, queries, keys]
        if evict_at is not None:
            seen = seen & (at < evict_at[:, :, None])
        scores = grouped[..., start : start + chunk, :] @ key[:, :, None].to(dtype).transpose(-1, -2)
        parts.append(scores.masked_fill(~seen[:, :, None], float("-inf")).logsumexp(-1))
    return torch.cat(parts, dim=-1).reshape(batch, q_heads, length)


def _sum_dtype(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def future_bytes(sequences: int, heads: int, head_dim: int, length: int, itemsize: int, cuda: bool) -> int:
    """Return the bytes of temporary memory that the computation of one layer's training target takes."""
    if cuda:  # FlexAttention takes a copy of the queries, and a copy of the keys for each query head
        return 2 * itemsize * sequences * heads * padded(length) * head_dim
    return 3 * 4 * sequences * heads * min(CHUNK, length) * length  # three arrays of a chunk of keys by all queries
