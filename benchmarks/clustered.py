"""The cost of clustered attention in CPU seconds of this process: the minimum over some runs, on one thread.

It is the cost of one attention layer in training, forward and backward: gathered entries, the masked reference, and a
full cache. `sparse-rl bench bench/luka_step` measures decoding, and the parts of a step.

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

from benchmarks.cpu_seconds import seconds, show
from benchmarks.results import write
from sparse_rl.attention.kernels.sdpa import sdpa
from sparse_rl.methods.pages.clustered import Clustered
from sparse_rl.methods.pages.view import PagedView
from sparse_rl.policies import make_policy
from sparse_rl.trace import NEVER

HEADS, GROUP, DIM, PROMPT = 2, 2, 64, 256
CACHE = {"policy": "clustered", "page": 16, "window": 128, "sinks": 4, "open_pages": 3}
LENGTHS = (2048, 4096, 8192)


def recorded(length: int) -> dict[str, torch.Tensor]:
    policy, generator = make_policy(CACHE), torch.Generator().manual_seed(0)
    assert isinstance(policy, Clustered)
    pages, query = policy.pages, torch.arange(length)
    closed = pages.closed(torch.full_like(query, PROMPT), query)
    luck = torch.rand(HEADS, length, int(closed.max()), generator=generator)
    best = luck.masked_fill(torch.arange(int(closed.max())) >= closed[:, None], -1).topk(pages.most)
    opened = best.indices.masked_fill(best.values < 0, -1).to(torch.int16)
    return {
        "evict_at": torch.full((1, 1, HEADS, length), NEVER, dtype=torch.int32),
        "closed_at": pages.closing(PROMPT, length)[None],
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/clustered.json"))
    options = parser.parse_args()
    training = [training_row(length, options.runs) for length in LENGTHS]
    show(f"a layer of training, {HEADS * GROUP} query / {HEADS} kv heads of {DIM}, CPU seconds", training, 1)
    write(options.out, cache=CACHE, training=training)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main()
