"""How much attention a token will still get once it has left the window: KVpop's target for its scorers.

    m_t = 1 / N_t  sum over d >= t + w of p_{d -> t},    N_t = max(1, number of these d)

with p the attention of query d over the tokens before it. It is the transpose of a causal attention: what flows into a
key, instead of what a query reads. Computed for some keys at a time, from the log-sum-exp of each query, so that no
S x S tensor is alive.
"""

from __future__ import annotations

from typing import Literal

import torch

CHUNK = 512  # keys or queries at a time
LARGEST = 40.0  # of log p: an evicted token may weigh more than all that is seen, but its mass must not overflow


@torch.no_grad()
def future_attention_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    window: int,
    scaling: float,
    ends: torch.Tensor | None = None,
    log_sum_exp: torch.Tensor | None = None,
    lookahead: int | None = None,
    normalise: bool = True,
    group: Literal["max", "mean"] | None = None,
    floor: float = 0.0,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """log(floor + m_t): float32 [B, Hq, S], or [B, Hkv, S] where the queries of a kv head are joined.

    Parameters
    ----------
    query, key : [B, Hq, S, D] and [B, Hkv, S, D], after RoPE
    window : w >= 1; the queries before t + w see t in any case
    scaling : the factor on q . k
    ends : int64 [B, S], the end of each token's document, which is contiguous: query d attends to t where
        t <= d < ends[t]. None: one document fills each row. A padding token has ends[t] <= t.
    log_sum_exp : float32 [B, Hq, S], of each query's scaled scores; None: over all before it. With that of a sparse
        forward, p is what the student pays, and would pay to evicted tokens, up to e^40
    lookahead : L; count only the queries d <= t + w + L
    normalise : divide by N_t
    group : None; "max": the largest log of a kv head's queries; "mean": the log of their mean probability
    floor : epsilon; 0 leaves -inf where nothing looks back
    chunk : keys at a time
    """
    batch, q_heads, length, dim = query.shape
    kv_heads = key.shape[1]
    if ends is None:
        ends = torch.full((batch, length), length, device=query.device)
    grouped = query.float().reshape(batch, kv_heads, -1, length, dim) * scaling
    if log_sum_exp is None:
        log_sum_exp = attention_lse(query, key, scaling=scaling, ends=ends, chunk=chunk)
    lse = log_sum_exp.float().reshape(batch, kv_heads, -1, length)
    queries = torch.arange(length, device=query.device)
    mass = grouped.new_zeros(batch, kv_heads, grouped.shape[2], length)
    count = torch.zeros(batch, length, dtype=torch.long, device=query.device)
    for start in range(0, length, chunk):
        part = slice(start, start + chunk)
        first, last = queries[part] + window, ends[:, part]
        if lookahead is not None:
            last = torch.minimum(last, first + lookahead + 1)
        later = slice(min(start + window, length), None)  # no query before is of any key here
        counted = (queries[later] >= first[:, None]) & (queries[later] < last[..., None])  # [B, keys, queries]
        scores = key[:, :, None, part].float() @ grouped[..., later, :].transpose(-1, -2)
        scores = (scores - lse[..., None, later]).masked_fill(~counted[:, None, None], float("-inf"))
        mass[..., part] = scores.clamp(max=LARGEST).exp().sum(-1)
        count[:, part] = counted.sum(-1)
    if normalise:
        mass = mass / count.clamp(min=1)[:, None, None]
    if group == "mean":
        return (floor + mass.mean(2)).log()
    if group == "max":
        return (floor + mass).log().amax(2)
    return (floor + mass).log().reshape(batch, q_heads, length)


@torch.no_grad()
def attention_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    scaling: float,
    ends: torch.Tensor | None = None,
    evict_at: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """The log-sum-exp of each query's scaled scores: float32 [B, Hq, S].

    query, key, scaling, ends : as in future_attention_mass
    evict_at : int32 [B, Hkv, S]; a query counts only the tokens that it sees. None: all before it
    chunk : queries at a time
    """
    batch, q_heads, length, dim = query.shape
    kv_heads = key.shape[1]
    if ends is None:
        ends = torch.full((batch, length), length, device=query.device)
    grouped = query.float().reshape(batch, kv_heads, -1, length, dim) * scaling
    places = torch.arange(length, device=query.device)
    parts = []
    for start in range(0, length, chunk):
        at = places[start : start + chunk, None]
        seen = ((places <= at) & (at < ends[:, None]))[:, None]  # [B, 1, queries, keys]
        if evict_at is not None:
            seen = seen & (at < evict_at[:, :, None])
        scores = grouped[..., start : start + chunk, :] @ key[:, :, None].float().transpose(-1, -2)
        parts.append(scores.masked_fill(~seen[:, :, None], float("-inf")).logsumexp(-1))
    return torch.cat(parts, dim=-1).reshape(batch, q_heads, length)
