"""Clustered attention: what its replay costs, in CPU seconds of this process on one thread, the least of some runs.

training    forward and backward of one attention layer over one sequence: the path that gathers what was read, the
            masked reference, and plain causal attention over everything
decoding    one step of one layer after so many tokens: a query that reads pages, and one that reads everything

OMP_NUM_THREADS=1 python benchmarks/clustered.py     # writes benchmarks/results/clustered.json
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch

from benchmarks.cpu_seconds import seconds, show, write
from rollout.cache import EvictingCache
from rollout.paged import PagedCache
from sparse_rl.attention.kernels.sdpa import sdpa
from sparse_rl.attention.views.paged import PagedView
from sparse_rl.policies import make_policy
from sparse_rl.policies.clustered import Clustered
from sparse_rl.trace import NEVER

HEADS, GROUP, DIM, PROMPT = 2, 2, 64, 256
CACHE = {"policy": "clustered", "page": 16, "window": 128, "sinks": 4, "open_pages": 3}
LENGTHS = {"training": (2048, 4096, 8192), "decoding": (4096, 8192, 32768)}


def recorded(length: int) -> dict[str, torch.Tensor]:
    """A batch of one row and layer, whose queries open pages at random."""
    policy, generator = make_policy(CACHE), torch.Generator().manual_seed(0)
    assert isinstance(policy, Clustered)
    pages, query = policy.pages, torch.arange(length)
    closed = pages.closed(torch.full_like(query, PROMPT), query)
    evict_at = torch.full((length,), NEVER, dtype=torch.int32)
    for page in range(int(closed.max())):
        evict_at[pages.tokens(torch.tensor(page))] = int((closed > page).int().argmax())
    luck = torch.rand(HEADS, length, int(closed.max()), generator=generator)
    best = luck.masked_fill(torch.arange(int(closed.max())) >= closed[:, None], -1).topk(pages.most)
    opened = best.indices.masked_fill(best.values < 0, -1).to(torch.int16)
    return {
        "evict_at": evict_at.expand(1, 1, HEADS, -1).contiguous(),
        "opened": opened[None, None],
        "paged_with": pages.settings(),
    }


def training_row(length: int, runs: int) -> dict[str, Any]:
    batch, generator = recorded(length), torch.Generator().manual_seed(1)
    given = [torch.randn(1, n, length, DIM, generator=generator) for n in (HEADS * GROUP, HEADS, HEADS)]
    ways = {
        "masked": PagedView(batch, "cpu", "dense").attend,
        "gathered": PagedView(batch, "cpu").attend,
        "full": lambda _, q, k, v, scaling: sdpa(q, k, v, scaling, causal=True),
    }

    def train(attend: Any) -> None:
        attend(0, *(x.clone().requires_grad_() for x in given), DIM**-0.5).sum().backward()

    return {"tokens": length, **{name: seconds(lambda way=way: train(way), runs) for name, way in ways.items()}}


def decoding_row(length: int, runs: int) -> dict[str, Any]:
    """The milliseconds of a step are those of many, one after another."""
    row: dict[str, Any] = {"tokens": length}
    steps = 32
    for name, policy in (("full", make_policy("full")), ("clustered", make_policy(CACHE))):
        generator = torch.Generator().manual_seed(0)

        def new(count: int, generator: torch.Generator = generator) -> list[torch.Tensor]:
            heads = (HEADS * GROUP, HEADS, HEADS)
            return [torch.randn(1, n, count, DIM, generator=generator) for n in heads]

        cache = (PagedCache if isinstance(policy, Clustered) else EvictingCache)(policy)
        cache.begin_prefill([length], torch.device("cpu"))
        key, value = new(length)[1:]
        query = torch.zeros(1, HEADS * GROUP, length, DIM)
        with torch.no_grad():
            cache.attend(0, query, key, value, DIM**-0.5)

            def step(cache: EvictingCache = cache, new: Any = new) -> None:
                cache.begin_decode([True], torch.device("cpu"))
                cache.attend(0, *new(1), DIM**-0.5)

            for _ in range(2):
                step()
            row[name] = seconds(lambda step=step: [step() for _ in range(steps)], runs) / steps
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/clustered.json"))
    options = parser.parse_args()
    training = [training_row(length, options.runs) for length in LENGTHS["training"]]
    decoding = [decoding_row(length, options.runs) for length in LENGTHS["decoding"]]
    shape = f"{HEADS * GROUP} query / {HEADS} kv heads of {DIM}, CPU seconds"
    show(f"a layer of training, {shape}", training, 1)
    show(f"a step of decoding in one layer, {shape}", decoding, 1)
    write(options.out, cache=CACHE, training=training, decoding=decoding)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main()
