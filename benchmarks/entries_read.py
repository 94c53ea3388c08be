"""Numbers of entries that decoding queries read and that caches hold, for benchmarks that compare caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparse_rl.methods.pages.policy import Clustered
from sparse_rl.policies import make_policy


def read_and_held(cache: Mapping[str, Any], prompt: int, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of entries per kv head that each query reads, and that the cache holds, float64 [Q] each.

    Summaries of pages count as entries. For the policy `layered`, the numbers are means over its layers.

    cache : the recipe's cache block
    prompt : number of tokens of the prompt
    queries : positions >= prompt, int64 [Q]
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
