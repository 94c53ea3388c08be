"""The plain reference of `running_topk`: a heap that takes one token at a time."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from sparse_rl.kernels import RunningTopK
from sparse_rl.trace import NEVER


def running_topk_reference(
    scores: Tensor,
    sinks: int | Tensor = 0,
    *,
    window: int,
    k: int,
    log_decay: Tensor | None = None,
    decay_every: int = 1,
    lengths: Tensor | None = None,
) -> RunningTopK:
    """Compute the result of `running_topk` for the same arguments, slowly and on the CPU.

    scores, sinks, log_decay, lengths : [B, H, S]; an int or int64 [B]; [H]; int64 [B]
    """
    batch, heads, length = scores.shape
    exact = scores if scores.dtype == torch.float64 else scores.float()
    evict_at = torch.full(scores.shape, NEVER, dtype=torch.int32)
    cutoff, boundary = (torch.full(scores.shape, -1, dtype=torch.int32) for _ in range(2))
    for row in range(batch):
        start = int(sinks) if isinstance(sinks, int) else int(sinks[row])
        end = length if lengths is None else int(lengths[row])
        for head in range(heads):
            priority = exact[row, head].clone()
            if log_decay is not None:
                for t in range(length):
                    priority[t] -= log_decay[head].to(priority) * (t // decay_every)
            competing = range(start, end - window)
            best_first = sorted(competing, key=lambda t: -priority[t].item())  # stable: ties go to the earlier token
            rank = {t: place for place, t in enumerate(best_first)}
            held: list[tuple[int, int]] = []  # the worst token is on top
            for q in range(start + window, end):
                newcomer = q - window
                heapq.heappush(held, (-rank[newcomer], newcomer))
                if len(held) > k:
                    evict_at[row, head, heapq.heappop(held)[1]] = q
                if len(held) == k:
                    cutoff[row, head, q], boundary[row, head, q] = -held[0][0], held[0][1]
    return RunningTopK(evict_at, cutoff, boundary)
