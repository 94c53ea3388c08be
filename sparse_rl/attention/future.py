"""How much attention a token will still get once it has left the window: KVpop's target for its scorers.

    m_t = 1 / N_t  sum over d >= t + w of p_{d -> t},    N_t = max(1, number of these d)

with p the attention of query d over the tokens before it. It is the transpose of a causal attention: what flows into a
key, instead of what a query reads. Computed for some keys at a time, from the log-sum-exp of each query, so that no
S x S tensor is alive.
"""

from __future__ import annotations

from typing import Literal

import torch


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
    chunk: int = 512,
) -> torch.Tensor:
    """log(floor + m_t): float32 [B, Hq, S], or [B, Hkv, S] where the queries of a kv head are joined.

    Parameters
    ----------
    query, key : [B, Hq, S, D] and [B, Hkv, S, D], after RoPE
    window : w >= 1; the queries before t + w see t in any case
    scaling : the factor on q . k
    ends : int64 [B, S], the end of each token's document, which is contiguous: query d attends to t where
        t <= d < ends[t]. None: one document fills each row. A padding token has ends[t] <= t.
    log_sum_exp : float32 [B, Hq, S], of each query's scaled scores; None: over all that it attends to. Under a sparse
        mask, that of the forward: then p is the attention that the student pays, to evicted tokens too
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
        log_sum_exp = _log_sum_exp(grouped, key, ends, chunk)
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
        of = (queries[later] >= first[:, None]) & (queries[later] < last[..., None])  # [B, keys, queries]
        scores = key[:, :, None, part].float() @ grouped[..., later, :].transpose(-1, -2)
        scores = (scores - lse[..., None, later]).masked_fill(~of[:, None, None], float("-inf"))
        mass[..., part] = scores.exp().sum(-1)
        count[:, part] = of.sum(-1)
    if normalise:
        mass = mass / count.clamp(min=1)[:, None, None]
    if group == "mean":
        return (floor + mass.mean(2)).log()
    if group == "max":
        return (floor + mass).log().amax(2)
    return (floor + mass).log().reshape(batch, q_heads, length)


def _log_sum_exp(grouped: torch.Tensor, key: torch.Tensor, ends: torch.Tensor, chunk: int) -> torch.Tensor:
    """Of each query over all that it attends to: float32 [B, Hkv, G, S], of scaled queries [B, Hkv, G, S, D]."""
    places = torch.arange(key.shape[2], device=key.device)
    parts = []
    for start in range(0, key.shape[2], chunk):
        part = slice(start, start + chunk)
        seen = (places <= places[part, None]) & (places[part, None] < ends[:, None])  # [B, queries, keys]
        scores = grouped[..., part, :] @ key[:, :, None].float().transpose(-1, -2)
        parts.append(scores.masked_fill(~seen[:, None, None], float("-inf")).logsumexp(-1))
    return torch.cat(parts, dim=-1)
