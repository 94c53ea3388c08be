"""Number of entries that a decoding query reads and holds, for the benchmarks that compare caches by reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparse_rl.methods.pages.clustered import Clustered
from sparse_rl.policies import make_policy


def read_and_held(cache: Mapping[str, Any], prompt: int, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries per kv head that each query reads, and that are held meanwhile, summaries of pages among them.

    cache : the recipe's block
    queries : int64 [Q], >= prompt
    returns : two float64 [Q]; of a policy of parts, the means over the layers
    """
    if cache["policy"] == "layered":
        parts = [(part["layers"], read_and_held(part["cache"], prompt, queries)) for part in cache["parts"]]
        layers = sum(share for share, _ in parts)
        read, held = (sum(share * counts[i] for share, counts in parts) / layers for i in (0, 1))
        return read, held
    policy = make_policy(cache)
    if isinstance(policy, Clustered):
        closed, inside = policy.pages.closed(prompt, queries), policy.pages.size - 1
        read = queries + 1 + (closed.clamp(max=policy.pages.most) - closed) * inside
        return read.double(), (queries + 1 + closed).double()
    attended = policy.schedule.attended(prompt, queries + 1).double()
    return attended, attended
