"""The cost of clustered attention in CPU seconds of this process: the minimum over some runs, on one thread.

training    one attention layer, forward and backward: gathered entries, the masked reference, and a full cache
decoding    one step of one layer: a query that reads pages, and a query that reads all entries
breakdown   the PARTS of a step that reads pages (figure 3 of the paper); the rest of the step computes the logits

    OMP_NUM_THREADS=1 python benchmarks/clustered.py     # writes benchmarks/results/clustered.json
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch

from benchmarks.cpu_seconds import seconds, show
from benchmarks.results import write
from sparse_rl.attention.kernels.sdpa import sdpa
from sparse_rl.methods.eviction.cache import EvictingCache
from sparse_rl.methods.pages import cache as paged
from sparse_rl.methods.pages.cache import PagedCache
from sparse_rl.methods.pages.clustered import Clustered
from sparse_rl.methods.pages.view import PagedView
from sparse_rl.policies import make_policy
from sparse_rl.trace import NEVER

HEADS, GROUP, DIM, PROMPT = 2, 2, 64, 256
CACHE = {"policy": "clustered", "page": 16, "window": 128, "sinks": 4, "open_pages": 3}
LENGTHS = {"training": (2048, 4096, 8192), "decoding": (4096, 8192, 32768)}
STEPS = 64  # every 16th step closes a page
PARTS: dict[str, tuple[Any, str]] = {
    "plan": (PagedCache, "begin_decode"),  # which tokens and summaries to read
    "close": (PagedCache, "_close"),  # closes a page, every 16th step
    "choose": (paged, "choose"),
    "gather": (paged, "at_slots"),  # keys and values
    "sum": (paged, "_weighed"),  # softmax and weighted sum
}


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


def stepping(cache: EvictingCache, length: int) -> Callable[[], None]:
    """Return a function that takes the next step, after a prompt of `length` tokens and two steps."""
    generator = torch.Generator().manual_seed(0)

    def new(count: int) -> list[torch.Tensor]:
        return [torch.randn(1, n, count, DIM, generator=generator) for n in (HEADS * GROUP, HEADS, HEADS)]

    @torch.no_grad()
    def step() -> None:
        cache.begin_decode([True], torch.device("cpu"))
        cache.attend(0, *new(1), DIM**-0.5)

    cache.begin_prefill([length], torch.device("cpu"))
    with torch.no_grad():
        cache.attend(0, torch.zeros(1, HEADS * GROUP, length, DIM), *new(length)[1:], DIM**-0.5)
    step()
    step()
    return step


def decoding_row(length: int, runs: int) -> dict[str, Any]:
    """Return the seconds of a step, as a mean over STEPS consecutive steps."""
    row: dict[str, Any] = {"tokens": length}
    for name, cache in (("full", EvictingCache(make_policy("full"))), ("clustered", PagedCache(make_policy(CACHE)))):
        step = stepping(cache, length)
        row[name] = seconds(lambda step=step: [step() for _ in range(STEPS)], runs) / STEPS
    return row


def breakdown_row(length: int, runs: int) -> dict[str, Any]:
    """Return the seconds of a step and of its parts, from the fastest run."""
    rows: list[dict[str, float]] = []
    for _ in range(runs):
        spent = dict.fromkeys(("step", *PARTS), 0.0)
        with ExitStack() as patched:
            for name, (owner, function) in PARTS.items():
                timed = clocked(spent, name, getattr(owner, function))
                patched.enter_context(mock.patch.object(owner, function, timed))
            step = stepping(PagedCache(make_policy(CACHE)), length)
            spent |= dict.fromkeys(PARTS, 0.0)
            spent["step"] = seconds(lambda step=step: [step() for _ in range(STEPS)], 1)
        rows.append({name: value / STEPS for name, value in spent.items()})
    best = min(rows, key=lambda spent: spent["step"])
    return {"tokens": length, **best, "logits": 2 * best["step"] - sum(best.values())}


def clocked(spent: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, changed to add its time to `spent[name]`. Clocked functions that it calls add nothing."""

    def timed(*given: Any) -> Any:
        before, start = dict(spent), time.process_time()
        try:
            return function(*given)
        finally:
            spent.update(before)
            spent[name] += time.process_time() - start

    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/clustered.json"))
    options = parser.parse_args()
    training = [training_row(length, options.runs) for length in LENGTHS["training"]]
    decoding = [decoding_row(length, options.runs) for length in LENGTHS["decoding"]]
    shape = f"{HEADS * GROUP} query / {HEADS} kv heads of {DIM}, CPU seconds"
    show(f"a layer of training, {shape}", training, 1)
    breakdown = [breakdown_row(length, options.runs) for length in LENGTHS["decoding"]]
    show(f"a step of decoding in one layer, {shape}", decoding, 1)
    show("the parts of such a step", breakdown, 1)
    write(options.out, cache=CACHE, training=training, decoding=decoding, breakdown=breakdown)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main()
