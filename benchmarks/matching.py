"""The cost of Attention Matching: CPU seconds of this process, on one thread, the minimum of several runs.

layer       one attention layer over a sequence, forward and backward: compactions repeated segment by segment, with
            gradients or as constants; and the evictions alone, without biases and fits, by a mask or by gathered keys
compaction  one layer of ROWS sequences: Attention Matching that selects by attention or by orthogonal matching pursuit,
            and G-KV
pursuit     our orthogonal matching pursuit, with a growing Cholesky factor, against the paper's, which solves a new
            least squares problem in each step; both choose the same entries in the same order. Each is timed as AM-OMP
            (algorithm 1) and as AM-OMP-fast (algorithm 2)
errors      errors of mass and output of the entries that both choose and our fit fits, for the reference queries and
            for other queries of the same kind; see `residuals`

    OMP_NUM_THREADS=1 python benchmarks/matching.py     # writes benchmarks/results/matching.json
    OMP_NUM_THREADS=1 python benchmarks/matching.py --pursuits     # only the pursuits; writes pursuits.json
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch

from benchmarks.cpu_seconds import seconds, show
from benchmarks.results import write
from sparse_rl.attention.views.replay import ReplayView
from sparse_rl.matching import Block, Fit, match, residuals
from sparse_rl.matching.fit import features
from sparse_rl.matching.select import FAST_K, FAST_TAU, PURSUIT_BOUND, pursue
from sparse_rl.methods.am.view import MatchedView
from sparse_rl.policies import Entries, Policy, make_policy
from sparse_rl.trace import NEVER

HEADS, GROUP, DIM = 2, 4, 64
LAYERS = [(4096, 512, 512), (4096, 256, 256)]  # S, budget, period
ROWS = 8
PURSUITS = [(512, 64, 256), (1024, 128, 512), (2048, 256, 512), (4096, 205, 1024)]  # entries, chosen, queries


def recorded(policy: Any, length: int) -> dict[str, torch.Tensor]:
    """Return a batch of one row and layer. Its compactions evict random entries from those outside the window."""
    generator = torch.Generator().manual_seed(0)
    further = policy.further(64, length)
    evict_at = torch.full((1, 1, HEADS, length), NEVER, dtype=torch.int32)
    for now in further["refit_at"].tolist():
        competes = torch.arange(now - policy.config.window)
        for head in range(HEADS):
            held = competes[evict_at[0, 0, head, : len(competes)] > now]
            order = torch.randperm(len(held), generator=generator)
            evict_at[0, 0, head, held[order[policy.config.refitted :]]] = now
    return {"evict_at": evict_at, "refit_at": further["refit_at"][None], "refit_with": further["refit_with"]}


def layer_row(length: int, budget: int, period: int, runs: int) -> dict[str, Any]:
    policy = make_policy("am", budget=budget, period=period, reference_queries=128)
    batch, generator = recorded(policy, length), torch.Generator().manual_seed(1)
    given = [torch.randn(1, n, length, DIM, generator=generator) for n in (HEADS * GROUP, HEADS, HEADS)]
    views = {
        "evictions, gathered": ReplayView({"evict_at": batch["evict_at"]}, "cpu", "gather"),
        "evictions under a mask": ReplayView({"evict_at": batch["evict_at"]}, "cpu", "sdpa"),
        "matched": MatchedView(batch, "cpu"),
        "matched, constants": MatchedView(batch, "cpu", through=False),
    }

    def train(view: Any) -> None:
        tensors = [x.clone().requires_grad_() for x in given]
        view.attend(0, *tensors, DIM**-0.5).sum().backward()

    timings = {name: seconds(lambda view=view: train(view), runs) for name, view in views.items()}
    return {"S": length, "budget": budget, "period": period, **timings}


def entries(
    policy: Policy,
    held: int,
    rows: int = ROWS,
    shape: tuple[int, int, int] = (HEADS, GROUP, DIM),
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Entries:
    """Return random entries of some rows, each of which holds `held` entries.

    shape : (kv heads, query heads per kv head, head dim)
    """
    heads, group, dim = shape
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device}
    keys, values = (torch.randn(rows, heads, held, dim, **options).to(dtype) for _ in range(2))
    queries = torch.randn(rows, heads * group, policy.last_queries, dim, **options).to(dtype)
    lengths = torch.full((rows,), held, device=device)
    memory = policy.entry_memory.items()
    state = {name: torch.full((rows, heads, held), start, device=device) for name, start in memory}
    positions = torch.arange(held, device=device).expand(rows, heads, held)
    return Entries(
        keys, values, positions, lengths, lengths, queries, dim**-0.5, state, [policy.schedule.budget] * rows
    )


def compaction_row(budget: int, period: int, runs: int) -> dict[str, Any]:
    shared = {"budget": budget, "period": period, "window": 16}
    policies = {
        "gkv": make_policy("gkv", **shared),
        "am, 32 tokens of queries": make_policy("am", **shared, reference_queries=32),
        "am, 128": make_policy("am", **shared, reference_queries=128),
    }
    if budget < 1024:  # otherwise it takes minutes
        policies["am, omp, 128"] = make_policy("am", **shared, reference_queries=128, select="omp")
    given = {name: entries(policy, budget + period) for name, policy in policies.items()}
    timings = {n: seconds(lambda n=n: policies[n].compact(0, given[n]), runs) for n in policies}
    return {"budget": budget, "period": period, **timings}


def paper_pursuit(phi: torch.Tensor, count: int, k: int = 1, tau: int = 1) -> list[int]:
    """Return the choice of the paper's algorithm 2, or 1 if k and tau are 1. Unlike naive_pursuit and
    naive_fast_pursuit, compute one product per step, not a loop.
    """
    mass, chosen = phi.sum(-1), list[int]()
    missing = mass
    for u in range(1, math.ceil(count / k) + 1):
        agrees = missing @ phi
        agrees[chosen] = -torch.inf
        chosen += agrees.topk(min(k, count - len(chosen))).indices.tolist()
        if u % tau and len(chosen) < count:
            continue
        weights = torch.linalg.lstsq(phi[:, chosen], mass[:, None], driver="gels").solution[:, 0]
        missing = mass - phi[:, chosen] @ weights.clamp(min=math.exp(-PURSUIT_BOUND), max=math.exp(PURSUIT_BOUND))
    return chosen


def clustered(count: int, queries: int) -> tuple[Block, Block]:
    """Return one kv head with random keys in clusters, as in a text, once with reference queries, once with others."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(16, DIM, generator=generator, dtype=torch.float64)
    keys = centres[torch.randint(16, (count,), generator=generator)]
    keys = keys + 0.5 * torch.randn(count, DIM, generator=generator, dtype=torch.float64)
    asked, other = (torch.randn(queries, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    values = torch.randn(count, DIM, generator=generator, dtype=torch.float64)
    held, rest = (keys[None, None], values[None, None]), (torch.zeros(1, 1, count), torch.ones(1, 1, count) > 0)
    first, second = (Block(*held, asking[None, None], *rest, DIM**-0.5) for asking in (asked, other))
    return first, second


def pursuit_row(count: int, chosen: int, queries: int, runs: int) -> dict[str, Any]:
    """Return timings in one kv head, and check that all variants of a pursuit make the same choice."""
    block, _ = clustered(count, queries)
    phi, allowed = features(block.logits())[0][0, 0], block.competing[0]
    row: dict[str, Any] = {"entries": count, "chosen": chosen, "queries": queries}
    for select, (k, tau) in {"omp": (1, 1), "omp_fast": (FAST_K, FAST_TAU)}.items():
        wanted = paper_pursuit(phi, chosen, k, tau)
        row[f"{select}, the paper's"] = seconds(lambda k=k, tau=tau: paper_pursuit(phi, chosen, k, tau), runs)
        for name, gram in (("growing factor", False), ("growing factor, Gram", True)):
            call = partial(pursue, phi[None], chosen, allowed, gram, at_once=k * tau)
            row[f"{select}, {name}"] = seconds(call, runs)
            assert call()[0][0].tolist() == wanted, (select, name)
    return row


def error_row(count: int, chosen: int, queries: int) -> dict[str, Any]:
    block, other = clustered(count, queries)
    row: dict[str, Any] = {"entries": count, "chosen": chosen, "queries": queries}
    for select in ("omp", "omp_fast"):
        fitted = match(block, chosen, Fit(select))
        for name, asking in (("", block), (", other queries", other)):
            row[f"{select}, mass{name}"], row[f"{select}, output{name}"] = residuals(asking, *fitted)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--pursuits", action="store_true", help="only the pursuits; writes pursuits.json")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or Path("benchmarks/results") / ("pursuits.json" if options.pursuits else "matching.json")
    pursuits = [pursuit_row(*size, options.runs) for size in PURSUITS]
    errors = [error_row(*size) for size in PURSUITS]
    show("orthogonal matching pursuit in one kv head, CPU seconds", pursuits, 3)
    rounded = [
        {name: value if isinstance(value, int) else f"{value:.3g}" for name, value in row.items()} for row in errors
    ]
    show("errors of the fitted entries in one kv head", rounded, len(rounded[0]))
    if options.pursuits:
        write(out, pursuits=pursuits, errors=errors)
        return
    layers = [layer_row(*size, options.runs) for size in LAYERS]
    compactions = [compaction_row(*size, options.runs) for size in ((512, 128), (1024, 1024))]
    shape = f"{HEADS * GROUP} query / {HEADS} kv heads of {DIM}, CPU seconds"
    show(f"a layer of training, {shape}", layers, 3)
    show(f"a compaction of {ROWS} sequences in one layer, {shape}", compactions, 2)
    write(out, layers=layers, compactions=compactions, pursuits=pursuits, errors=errors)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main()
