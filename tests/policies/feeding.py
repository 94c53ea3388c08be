"""Helpers of the policy tests: feed given queries, keys and values through the real cache, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dense_matched import DenseMatchedView

from sparse_rl.methods.config import accepted_parameters
from sparse_rl.policies import Policy, make_policy
from sparse_rl.policies.cache import EvictingCache
from sparse_rl.trace import EvictionTrace

CPU = torch.device("cpu")


@dataclass
class Batch:
    """Made-up rows: query [B, Hq, S, D]; key and value [B, Hkv, S, D]. Row b has totals[b] tokens, prompts[b] of them
    its prompt."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    prompts: list[int]
    totals: list[int]

    @property
    def scaling(self) -> float:
        return self.query.shape[-1] ** -0.5

    def row(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the query [Hq, S_b, D], key [Hkv, S_b, D] and value [Hkv, S_b, D] of one row, without padding."""
        end = self.totals[index]
        return self.query[index, :, :end], self.key[index, :, :end], self.value[index, :, :end]


def ragged_batch(seed: int, prompts: Sequence[int], totals: Sequence[int], *, tied: bool = False) -> Batch:
    """Return random tokens, 4 query heads on 2 kv heads of width 8. `tied`: four different keys of +-1 and small whole
    queries in width 4, so that scores tie exactly in any precision."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(prompts), max(totals)
    if tied:
        kinds = torch.tensor([[1, 1, 1, 1], [1, 1, -1, -1], [1, -1, 1, 1], [-1, 1, 1, 1]]).float()
        query = torch.randint(-2, 3, (rows, 4, width, 4), generator=generator).float()
        key = kinds[torch.randint(0, 4, (rows, 2, width), generator=generator)]
        value = torch.randn(rows, 2, width, 4, generator=generator)
    else:
        query = torch.randn(rows, 4, width, 8, generator=generator) * 1.5
        key = torch.randn(rows, 2, width, 8, generator=generator)
        value = torch.randn(rows, 2, width, 8, generator=generator)
    return Batch(query, key, value, list(prompts), list(totals))


def lengths_around(budget: int, period: int) -> tuple[list[int], list[int]]:
    """Return (prompts, totals) of rows that end below, at and beyond the budget, the first and the third compaction."""
    first = budget + period
    prompts = [3, budget, first - 1, first, first + period + 5, 5]
    totals = [3 + first + period + 4, first + 2 * period + 3, first + 6, first + period, first + 2 * period + 9, budget]
    return prompts, totals


def small_parameters(name: str, **parameters: Any) -> dict[str, Any]:
    """Return budget 12, window 4, and the entries of `parameters` that the policy takes."""
    chosen = {"budget": 12, "sinks": 0, "window": 4, "period": 1, **parameters}
    return {key: value for key, value in chosen.items() if key in accepted_parameters(name)}


@dataclass
class Fed:
    """For each row b: the recorded evict_at int32 [Hkv, S_b], and the attention output [Hq, S_b, D]."""

    records: list[torch.Tensor]
    outputs: list[torch.Tensor]


def feed(
    policy: Policy,
    batch: Batch,
    after: Callable[[EvictingCache], None] | None = None,
) -> Fed:
    """Feed one layer the prompts, right-padded with noise, then one token per row; finished rows are frozen, and
    `after` is called after every forward."""
    rows, width = len(batch.prompts), max(batch.prompts)
    noise = torch.Generator().manual_seed(0)
    cache = EvictingCache(policy)
    outputs: list[list[torch.Tensor]] = [[] for _ in range(rows)]

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        real = torch.arange(width) < torch.tensor(batch.prompts)[:, None]
        prompts = tensor[:, :, :width]
        return torch.where(real[:, None, :, None], prompts, 3 * torch.randn(prompts.shape, generator=noise))

    cache.begin_prefill(batch.prompts, CPU)
    out = cache.attend(0, padded(batch.query), padded(batch.key), padded(batch.value), batch.scaling)
    for row, prompt in enumerate(batch.prompts):
        outputs[row].append(out[row, :, :prompt])
    if after:
        after(cache)
    for _ in range(max(t - p for t, p in zip(batch.totals, batch.prompts, strict=True))):
        active = [seen < total for seen, total in zip(cache.seen, batch.totals, strict=True)]
        cache.begin_decode(active, CPU)
        at = torch.tensor(cache.seen) - 1

        def token(tensor: torch.Tensor, at: torch.Tensor = at, active: list[bool] = active) -> torch.Tensor:
            picked = tensor[torch.arange(rows), :, at][:, :, None]
            junk = 3 * torch.randn(picked.shape, generator=noise)  # the input of a frozen row must not matter
            return torch.where(torch.tensor(active)[:, None, None, None], picked, junk)

        out = cache.attend(0, token(batch.query), token(batch.key), token(batch.value), batch.scaling)
        for row in range(rows):
            if active[row]:
                outputs[row].append(out[row])
        if after:
            after(cache)
    records = [cache.evict_at(row, total)[0] for row, total in enumerate(batch.totals)]
    return Fed(records, [torch.cat(parts, dim=1) for parts in outputs])


def run_policy(name: str, seed: int = 0, **parameters: Any) -> tuple[Policy, Batch, Fed]:
    """Feed random tokens through the cache of a policy with `small_parameters`; return (policy, rows, results)."""
    policy = make_policy(name, **small_parameters(name, **parameters))
    prompts, totals = lengths_around(getattr(policy.config, "budget", 12), getattr(policy.config, "period", 1))
    batch = ragged_batch(seed, prompts, totals)
    return policy, batch, feed(policy, batch)


def dense_output(policy: Policy, batch: Batch, row: int, record: torch.Tensor) -> torch.Tensor:
    """Return the dense reference's output [Hq, S_b, D] for one row under a record [Hkv, S_b] of evictions."""
    query, key, value = batch.row(row)
    further = policy.further(batch.prompts[row], batch.totals[row] + 1)  # every token is fed here
    view = DenseMatchedView(EvictionTrace(record[None], further, validate=False))
    return view.attend(0, query[None], key[None], value[None], batch.scaling)[0]
