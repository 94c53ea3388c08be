"""The k best of a growing set, at every step at once: which tokens a budgeted cache holds, and when each one goes.

A token t becomes eligible at query q = t + w, as it leaves the window. Of the eligible ones

    E(q) = {t : s <= t <= q - w}                                                        KVpop's long-range entries

query q sees the k with the highest priority; a token that is not among them is never seen again. Priorities decay with
age, r_t(q) = r_t + (q - t) log gamma, and all at the same rate, so that their order is that of r_t - t log gamma at
every q: one stable sort ranks them for good (0 is best; ties go to the earlier token). What remains is, for every
prefix of the tokens, the k-th smallest rank in it. A wavelet matrix answers all of these at once: from the highest bit
of the ranks down, tokens are partitioned by the bit, and each query goes on into the half where its k-th smallest is.
ceil(log2 S) passes of cumsum, gather and scatter; no loop over tokens, rows or heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from sparse_rl.errors import NotFiniteError, UserError
from sparse_rl.kernels.choice import Choice, choose, seconds_on_gpu
from sparse_rl.trace import NEVER

Descent = Callable[[Tensor, int], Tensor]
CHECKED = ((3, 1000, 17), (8, 16_384, 2016))  # rows, tokens and k of the check; the last is timed


@dataclass(frozen=True)
class RunningTopK:
    """Which tokens a budgeted cache holds at each query, of B rows and H kv heads: three tensors int32 [B, H, S].

    evict_at : by token t, the first query that no longer sees it; NEVER where there is none before the row's end
    cutoff_rank : by query q, the rank of the worst of the k that it sees; -1 until k are eligible, and behind the end
    boundary : by query q, that worst token itself; -1 likewise
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
    """When each token leaves a cache that holds the k best of those behind the window, for all queries at once.

    Query q sees the k of highest priority r_t - floor(t / n) log gamma among s <= t <= q - w. Of equal priorities the
    earlier token is held.

    scores : r, [B, H, S] float; computed in float64 if they are that, else in float32
    sinks : the first token that competes; int64 [B] of each row, where a row begins with padding too
    window : w >= 1, the tokens that a query sees in any case
    k : >= 1, how many others it sees
    log_decay : log gamma, [H] <= 0
    decay_every : n; ages count in whole steps of n positions, r_t - floor(t / n) log gamma
    lengths : int64 [B], the end of each row; what stands behind is padding
    kernel : who makes the passes over the bits; None: triton on a GPU where it has been found right and faster, else
        torch

    Raises UserError: a window, k or decay_every below 1.
    Raises NotFiniteError: a competing score that is NaN: it would be kept for ever.
    """
    for name, value in (("window", window), ("k", k), ("decay_every", decay_every)):
        if value < 1:
            raise UserError(f"running_topk: {name} must be at least 1, got {value}")
    heads, length = scores.shape[1:]
    start, end = _ends(scores, sinks, lengths)
    first = start.repeat_interleave(heads)[:, None]  # of the competing tokens of each of R = B x H rows: where they are
    counts = (end - window - start).clamp(min=0).repeat_interleave(heads)[:, None]  # and how many
    priorities = scores if scores.dtype == torch.float64 else scores.float()
    if log_decay is not None:
        ages = torch.arange(length, device=scores.device) // decay_every
        priorities = priorities - log_decay.to(priorities)[:, None] * ages
    slots = torch.arange(max(int(counts.max()) if len(counts) else 0, k), device=scores.device)
    real = slots < counts
    priorities = priorities.flatten(0, 1).gather(-1, (first + slots).clamp(max=length - 1))  # [R, M], oldest first
    if bool((priorities.isnan() & real).any()):
        raise NotFiniteError("a score is NaN: the tokens cannot be ranked by it")
    order = priorities.masked_fill(~real, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    ranks = torch.empty_like(order).scatter_(-1, order, slots.expand_as(order))  # 0 is the best; padding comes last

    if kernel is None:
        kernel = topk_choice().kernel if scores.is_cuda else "torch"
    descend = _triton_form() if kernel == "triton" else kth_smallest_of_prefixes
    cutoff = descend(ranks, k)  # [R, M - k + 1], of the prefixes of k, k + 1, ... tokens
    worst = order.gather(-1, cutoff)
    # Once k are held, each step drops one: the newcomer, or the worst so far.
    gone = torch.where(ranks[:, k:] > cutoff[:, :-1], slots[k:], worst[:, :-1])

    # From slots to positions; what is not real goes behind the end.
    real, queries = real[:, k - 1 :], first + window + slots[k - 1 :]
    at = torch.where(real, queries, length)
    found = [torch.full((len(ranks), length + 1), fill, device=scores.device) for fill in (NEVER, -1, -1)]
    found[0].scatter_(-1, torch.where(real[:, 1:], first + gone, length), queries[:, 1:])
    found[1].scatter_(-1, at, cutoff)
    found[2].scatter_(-1, at, first + worst)
    return RunningTopK(*(part[:, :length].int().reshape(scores.shape) for part in found))


def _ends(scores: Tensor, sinks: int | Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where the tokens of each row begin to compete, and end: int64 [B], of [B, H, S]."""
    start = torch.as_tensor(sinks, device=scores.device).expand(len(scores))
    return start, torch.full_like(start, scores.shape[-1]) if lengths is None else lengths.to(scores.device)


def kth_smallest_of_prefixes(ranks: Tensor, k: int) -> Tensor:
    """The k-th smallest of the first k, k + 1, ... to M numbers of a row: int64 [R, M - k + 1].

    ranks : int64 [R, M], in each row 0 to M - 1, each once
    """
    rows, width = ranks.shape
    device = ranks.device
    left = torch.zeros(rows, width - k + 1, dtype=torch.long, device=device)  # each query's part of the sequence
    right = torch.arange(k, width + 1, device=device).repeat(rows, 1)
    wanted = torch.full_like(left, k - 1)  # how many smaller ones its answer has there
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
def topk_choice() -> Choice:
    """Who descends on this process's GPU."""
    return check_topk(_triton_form, seconds_on_gpu, "cuda")


def check_topk(load: Callable[[], Descent], seconds: Callable[[Callable[[], object]], float], device: str) -> Choice:
    """Triton's form where it gives what torch's does, and takes less of `seconds`."""

    def judge(form: Descent) -> tuple[bool, str]:
        for rows, width, k in CHECKED:
            ranks = torch.rand(rows, width, generator=torch.Generator().manual_seed(0)).argsort(-1).to(device)
            if not torch.equal(form(ranks, k), kth_smallest_of_prefixes(ranks, k)):
                return False, f"it is wrong here, of {rows} rows of {width} tokens"
        ours, plain = seconds(lambda: form(ranks, k)), seconds(lambda: kth_smallest_of_prefixes(ranks, k))
        return ours < plain, f"{1e3 * ours:.2f} ms, torch's form {1e3 * plain:.2f} ms: {rows} rows of {width} tokens"

    return choose(load, judge)


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
    """Of the k tokens that `wanted` holds at each query with more than k eligible ones, those that `found` holds.

    found, wanted : of the same B rows and H kv heads
    sinks, window, k, lengths : those of `running_topk` that both were made with; sinks an int or int64 [B],
        lengths int64 [B] or None

    Returns (held, of): float64 scalars, sums over all queries, heads and rows; recall is held / of.
    """
    batch, heads, length = found.evict_at.shape
    device = found.evict_at.device
    start, end = (x[:, None, None] for x in _ends(found.evict_at, sinks, lengths))
    tokens = torch.arange(length, device=device)
    born = tokens + window
    real = (tokens >= start) & (born < end)
    # Both hold t at the queries from its birth to the first of its two ends: + 1 at the one, - 1 at the other.
    died = torch.minimum(found.evict_at, wanted.evict_at).clamp(max=length)
    change = torch.zeros(batch, heads, length + 1, dtype=torch.long, device=device)
    alive = real & (born < died)  # one may drop it as it is born
    change.scatter_add_(-1, born.clamp(max=length).expand_as(alive), alive.long())
    change.scatter_add_(-1, died.long(), -alive.long())
    both = change.cumsum(-1)[..., :length]
    counted = (tokens >= start + window + k) & (tokens < end)
    return (both * counted).sum().double(), counted.expand_as(both).sum().double() * k
