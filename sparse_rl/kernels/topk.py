"""The tokens that a cache with a budget holds at each query, computed for all queries together.

A token t becomes eligible at query q = t + w, when it leaves the window of w tokens. With s sinks, the tokens that are
eligible at query q are

    E(q) = {t : s <= t <= q - w}                                                        KVpop's long-range entries

Of these, query q sees the k tokens with the highest priority; a token that is not among these k is never seen again.
The score r_t of token t decays with age, at the same rate gamma for all tokens: r_t(q) = r_t + (q - t) log gamma. So at
every query, the order of the tokens is the order of their priorities r_t - t log gamma. One stable sort therefore gives
ranks that never change (0 is best; ties go to the earlier token).

Then the k-th smallest rank in every prefix of the tokens must be found. A wavelet matrix does this for all prefixes
together: from the highest bit of the ranks down, tokens are partitioned by the bit, and each query continues in the
half that contains its k-th smallest rank. For S tokens, this takes ceil(log2 S) passes of cumsum, gather and scatter,
and no loop over tokens, rows or heads. KVpop's algorithm 2 inserts one token after the other into a Fenwick tree
instead; the results are equal (benchmarks/speed.py has such a tree).

While fewer than k tokens are eligible, a query sees all of them, as the paper's text says; its algorithm 2 sets the
cutoff to -1, which by equation 26 would hide them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from sparse_rl.errors import NotFiniteError, UserError
from sparse_rl.kernels.parity import Errors, Parity, distance, judged
from sparse_rl.trace import NEVER


def ranked(scores: Tensor, positions: Tensor) -> Tensor:
    """Return distinct ranks, int64 [...]: an entry with a higher score, or an equal one at an earlier position, has a
    greater rank. Scores are float32 [...], positions int64 [...] below 2**31.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the bits of negative floats sort in reverse
    return (ordered.long() << 32) - positions


Descent = Callable[[Tensor, int], Tensor]
CHECKED = ((3, 1000, 17), (8, 16_384, 2016))  # (rows, tokens, k) of the cases in the check


@dataclass(frozen=True)
class RunningTopK:
    """The tokens that a cache with a budget holds at each query, for B rows of S tokens and H kv heads: int32 [B, H,
    S].

    evict_at : for each token, the first query that no longer sees it; NEVER if all queries up to the row's end see it
    cutoff_rank : for each query, the rank of the worst of the k tokens that it sees; -1 before k tokens are eligible,
        and after the row's end
    boundary : for each query, the position of this worst token; -1 where cutoff_rank is -1
    """

    evict_at: Tensor
    cutoff_rank: Tensor
    boundary: Tensor


def running_topk(
    scores: Tensor,
    sinks: int | Tensor = 0,
    *,
    window: int,
    k: int,
    log_decay: Tensor | None = None,
    decay_every: int = 1,
    lengths: Tensor | None = None,
    kernel: Literal["torch", "triton"] | None = None,
) -> RunningTopK:
    """Return the tokens that a cache holds at each query, if it keeps the k best tokens outside the window.

    Query q sees the k tokens with the highest priorities r_t - floor(t / n) log gamma among the tokens
    s <= t <= q - w. If priorities are equal, the earlier token is held.

    scores : r, [B, H, S] float; priorities are computed in float64 if the scores are float64, else in float32
    sinks : s, position of the first token that competes; int64 [B], one per row, if rows also begin with padding
    window : w >= 1, number of most recent tokens that a query always sees
    k : >= 1, number of other tokens that a query sees
    log_decay : log gamma, [H] <= 0
    decay_every : n; ages count in whole steps of n positions
    lengths : int64 [B], the end of each row; the tokens after the end are padding
    kernel : the implementation of the passes over the bits; None means triton on a GPU if it passed the check, else
        torch

    Raises UserError if window, k or decay_every is below 1.
    Raises NotFiniteError if the score of a competing token is NaN, because that token would never be evicted.
    """
    for name, value in (("window", window), ("k", k), ("decay_every", decay_every)):
        if value < 1:
            raise UserError(f"running_topk: {name} must be at least 1, got {value}")
    heads, length = scores.shape[1:]
    start, end = _ends(scores, sinks, lengths)
    # Position of the first competing token, and number of competing tokens, in each of R = B x H rows.
    first = start.repeat_interleave(heads)[:, None]
    counts = (end - window - start).clamp(min=0).repeat_interleave(heads)[:, None]
    priorities = scores if scores.dtype == torch.float64 else scores.float()
    if log_decay is not None:
        ages = torch.arange(length, device=scores.device) // decay_every
        priorities = priorities - log_decay.to(priorities)[:, None] * ages
    slots = torch.arange(max(int(counts.max()) if len(counts) else 0, k), device=scores.device)
    real = slots < counts
    priorities = priorities.flatten(0, 1).gather(-1, (first + slots).clamp(max=length - 1))  # [R, M], oldest first
    if bool((priorities.isnan() & real).any()):
        raise NotFiniteError("a score is NaN: the tokens cannot be ranked")
    order = priorities.masked_fill(~real, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    ranks = torch.empty_like(order).scatter_(-1, order, slots.expand_as(order))  # 0 is the best; padding comes last

    if kernel is None:
        kernel = "triton" if scores.is_cuda and check_topk().failure is None else "torch"
    descend = _triton_form() if kernel == "triton" else kth_smallest_of_prefixes
    cutoff = descend(ranks, k)  # [R, M - k + 1], for the prefixes of k, k + 1, ... tokens
    worst = order.gather(-1, cutoff)
    # Once k tokens are held, each step drops one: the new token, or the worst so far.
    dropped = torch.where(ranks[:, k:] > cutoff[:, :-1], slots[k:], worst[:, :-1])

    # Convert slots to positions; results for padding are written past the end.
    real, queries = real[:, k - 1 :], first + window + slots[k - 1 :]
    at = torch.where(real, queries, length)
    results = [torch.full((len(ranks), length + 1), fill, device=scores.device) for fill in (NEVER, -1, -1)]
    results[0].scatter_(-1, torch.where(real[:, 1:], first + dropped, length), queries[:, 1:])
    results[1].scatter_(-1, at, cutoff)
    results[2].scatter_(-1, at, first + worst)
    return RunningTopK(*(part[:, :length].int().reshape(scores.shape) for part in results))


def _ends(scores: Tensor, sinks: int | Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    start = torch.as_tensor(sinks, device=scores.device).expand(len(scores))
    return start, torch.full_like(start, scores.shape[-1]) if lengths is None else lengths.to(scores.device)


def kth_smallest_of_prefixes(ranks: Tensor, k: int) -> Tensor:
    """Return, for each row, the k-th smallest number among the first k, k + 1, ..., M numbers: int64 [R, M - k + 1].

    ranks : int64 [R, M], R rows, each of them a permutation of 0 to M - 1
    """
    rows, width = ranks.shape
    device = ranks.device
    left = torch.zeros(rows, width - k + 1, dtype=torch.long, device=device)  # each query's range in the sequence
    right = torch.arange(k, width + 1, device=device).repeat(rows, 1)
    wanted = torch.full_like(left, k - 1)  # number of ranks in that range that are smaller than the query's answer
    answer = torch.zeros_like(left)
    zeros_before = torch.zeros(rows, width + 1, dtype=torch.long, device=device)
    place = torch.arange(width, device=device)
    for bit in reversed(range(max(1, (width - 1).bit_length()))):
        zero = (ranks >> bit & 1) == 0
        torch.cumsum(zero, -1, out=zeros_before[:, 1:])
        zeros = zeros_before[:, -1:]
        from_left, from_right = zeros_before.gather(-1, left), zeros_before.gather(-1, right)
        inside = from_right - from_left
        high = wanted >= inside
        wanted = torch.where(high, wanted - inside, wanted)
        left = torch.where(high, zeros + left - from_left, from_left)
        right = torch.where(high, zeros + right - from_right, from_right)
        answer += high.long() << bit
        moved = torch.where(zero, zeros_before[:, :-1], zeros + place - zeros_before[:, :-1])
        ranks = torch.empty_like(ranks).scatter_(-1, moved, ranks)
    return answer


@cache
def check_topk(device: str = "cuda") -> Parity:
    """Compare the Triton implementation with torch's; the results must be equal."""

    def compared() -> Errors:
        form, errors = _triton_form(), {}
        for rows, width, k in CHECKED:
            ranks = torch.rand(rows, width, generator=torch.Generator().manual_seed(0)).argsort(-1).to(device)
            worst = distance(form(ranks, k), kth_smallest_of_prefixes(ranks, k))
            errors[f"{rows} rows of {width} tokens"] = worst, 0.0
        return errors

    return judged("triton", device, compared)


def _triton_form() -> Descent:
    from sparse_rl.kernels.topk_triton import kth_smallest_of_prefixes as form

    return form


def recall(
    found: RunningTopK,
    wanted: RunningTopK,
    sinks: int | Tensor = 0,
    *,
    window: int,
    k: int,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Count the tokens that the cache `wanted` holds, and those among them that the cache `found` also holds.

    Only queries at which more than k tokens are eligible count.

    found, wanted : results of `running_topk` with this window and k, sinks, int or int64 [B], and lengths, int64 [B]

    Returns two float64 scalars, summed over all queries, heads and rows: the number of tokens that both hold, and the
    number of tokens that `wanted` holds. The recall is the first divided by the second.
    """
    batch, heads, length = found.evict_at.shape
    device = found.evict_at.device
    start, end = (x[:, None, None] for x in _ends(found.evict_at, sinks, lengths))
    tokens = torch.arange(length, device=device)
    eligible_at = tokens + window
    real = (tokens >= start) & (eligible_at < end)
    # difference array: +1 at the query at which t becomes eligible, -1 at the earlier of its two evictions
    evicted_at = torch.minimum(found.evict_at, wanted.evict_at).clamp(max=length)
    change = torch.zeros(batch, heads, length + 1, dtype=torch.long, device=device)
    shared = real & (eligible_at < evicted_at)  # False if a token is dropped as soon as it becomes eligible
    change.scatter_add_(-1, eligible_at.clamp(max=length).expand_as(shared), shared.long())
    change.scatter_add_(-1, evicted_at.long(), -shared.long())
    held_by_both = change.cumsum(-1)[..., :length]
    counted = (tokens >= start + window + k) & (tokens < end)
    return (held_by_both * counted).sum().double(), counted.expand_as(held_by_both).sum().double() * k
