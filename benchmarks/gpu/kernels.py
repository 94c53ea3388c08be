"""Kernels beside their references: attention under evictions, running top-k, redundancy of keys, sampler."""

from __future__ import annotations

import importlib
import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.stages import FAILURE, Options, Row, attempt, in_a_line
from benchmarks.speed import SINKS, attentions, evictions, sampler
from rollout.measure.timing import now
from sparse_rl.kernels import mean_similarity, running_topk
from sparse_rl.kernels.flex import KERNEL_OPTIONS, flex_attend
from sparse_rl.kernels.masked import masked_attention
from sparse_rl.kernels.parity import check_parity

# Further ways to run FlexAttention, timed beside `flex` and `flex_sorted` with a backward pass:
# name -> (keywords of flex_attend, options of FlexAttention's kernels)
CANDIDATES: dict[str, tuple[Row, Row]] = {
    "flex_sorted, bwd_BLOCK_N1 64": ({"in_segments": True}, {"bwd_BLOCK_N1": 64}),
}


def seconds(work: Callable[[], Any]) -> float:
    """Return the duration of one run, after a GPU has finished its work."""
    start = now()
    work()
    return now() - start


def compared(works: Mapping[str, Callable[[], Any]], runs: int, reference: str) -> dict[str, Row]:
    """Return name -> row: median of interleaved runs, spread, median ratio to the reference's time; or the failure."""
    times: dict[str, list[float]] = {name: [] for name in works}
    rows: dict[str, Row] = {}
    for _ in range(runs + 2):
        for name in [name for name in works if name not in rows]:
            try:
                times[name].append(seconds(works[name]))
            except Exception as error:  # the other works are still wanted
                traceback.print_exc()
                rows[name] = {FAILURE: in_a_line(error)}
    for name, (_, _, *own) in ((name, own) for name, own in times.items() if name not in rows):
        median = statistics.median(own)
        rows[name] = {"ms": 1e3 * median, "spread": (max(own) - min(own)) / median}
        if FAILURE not in rows.get(reference, {}):
            ratios = (theirs / ours for theirs, ours in zip(times[reference][2:], own, strict=True))
            rows[name][f"times faster than {reference}"] = statistics.median(ratios)
    return rows


def let_flex_train(options: Options) -> None:
    """On a CPU, let torch differentiate FlexAttention's plain operator, which it otherwise refuses."""
    if options.device == "cpu":
        module: Any = importlib.import_module("torch.nn.attention.flex_attention")
        module._validate_device = lambda *_: None


def parity(options: Options) -> Iterator[Row]:
    """Yield a row for each kernel and length: the errors, and the errors that are allowed beside SDPA's."""
    let_flex_train(options)
    heads, kv_heads, dim = options.sizes.heads
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}

    def row(kernel: str, length: int) -> Row:
        result = check_parity(kernel, options.device, getattr(torch, options.dtype), length=length, **shape)
        if not result.errors:
            raise RuntimeError(result.failure)
        errors = {name: f"{error:.1e} / {allowed:.1e}" for name, (error, allowed) in result.errors.items()}
        return {"exact": result.failure is None, "largest error": max(e for e, _ in result.errors.values()), **errors}

    for length, kernel in product(sorted(options.sizes.lengths)[:2], ("flex_sorted", "flex")):
        if not options.measured(kernel=kernel, S=length):  # the dense float64 reference of longer ones is too large
            yield attempt({"kernel": kernel, "S": length}, partial(row, kernel, length))


def speed(options: Options) -> Iterator[Row]:
    """Yield a row for each length, kernel, and passes (forward and backward, or forward)."""
    let_flex_train(options)
    for length, passes in product(options.sizes.lengths, ("forward and backward", "forward")):
        keys = {"S": length, "passes": passes}
        if not options.measured(**keys):
            kernel_rows = attempt({}, partial(timed, options, length, passes != "forward"))
            for kernel, row in kernel_rows.items():
                yield {**keys, "kernel": kernel, **row} if isinstance(row, dict) else {**keys, kernel: row}


def timed(options: Options, length: int, trains: bool) -> dict[str, Row]:
    """Return kernel -> row of times."""
    (heads, kv_heads, dim), dtype = options.sizes.heads, getattr(torch, options.dtype)
    budget, on_gpu = options.sizes.budget, options.device == "cuda"
    evict_at = evictions("uniform", length, budget, kv_heads, window=16)[None].to(options.device)
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, h, length, dim, generator=generator).to(options.device, dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    )

    def candidate(keywords: Row, kernel_options: Row, *inputs: Any) -> Any:
        with patch.dict(KERNEL_OPTIONS, kernel_options):
            return flex_attend(evict_at, *inputs, dim**-0.5, compiled=on_gpu, **keywords)[0]

    attends: dict[str, Any] = {**attentions(evict_at, dim**-0.5, grouped=on_gpu, compiled=on_gpu)}
    if trains:
        attends |= {name: partial(candidate, *given) for name, given in CANDIDATES.items()}
    for kernel in ("gather", "sdpa"):
        attends[kernel] = partial(masked_attention, lambda: evict_at, scaling=dim**-0.5, kernel=kernel)

    def run(attend: Any) -> None:
        with torch.set_grad_enabled(trains):
            inputs = [x.detach().requires_grad_(trains) for x in (q, k, v)]
            out = attend(*inputs)
            if trains:
                torch.autograd.grad(out, inputs, grad)

    works = {name: partial(run, attend) for name, attend in attends.items()}
    return compared(works, options.sizes.runs, reference="flex")


def topk(options: Options) -> Iterator[Row]:
    """Yield a row for each implementation of running_topk."""
    length, heads = options.sizes.topk
    scores = torch.randn(1, heads, length, generator=torch.Generator().manual_seed(0)).to(options.device)
    given: dict[str, Any] = {"window": min(256, length // 8), "k": min(2016, length // 4)}
    works = {name: partial(running_topk, scores, SINKS, kernel=name, **given) for name in ("torch", "triton")}
    for name, row in compared(works, options.sizes.runs, reference="torch").items():
        yield {"S": length, "kv heads": heads, "k": given["k"], "kernel": name, **row}


def redundancy(options: Options) -> Iterator[Row]:
    """Yield a row for each implementation of mean_similarity."""
    rows, heads, entries, dim = options.sizes.redundancy
    keys = torch.randn(rows, heads, entries, dim, generator=torch.Generator().manual_seed(0))
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float16  # Triton interprets no product of bfloat16
    positions = torch.arange(entries, device=options.device).expand(rows, heads, -1)
    lengths = torch.full((rows,), entries, device=options.device)
    given = keys.to(options.device, dtype), positions, lengths
    works = {name: partial(mean_similarity, *given, name) for name in ("torch", "triton")}
    for name, row in compared(works, options.sizes.runs, reference="torch").items():
        yield {"rows": rows, "kv heads": heads, "entries": entries, "dtype": str(dtype), "kernel": name, **row}


def sampling(options: Options) -> Iterator[Row]:
    """Yield rows of the sampler and its reference for each setting; their tokens are checked to be the same."""
    batch, vocabulary = options.sizes.sampler
    for top_k, top_p in ((None, 1.0), (20, 1.0), (None, 0.95), (20, 0.95)):
        works = sampler(batch, vocabulary, top_k, top_p, options.device)
        for kernel, row in compared(works, options.sizes.runs, reference="reference").items():
            yield {"rows": batch, "vocabulary": vocabulary, "top_k": top_k, "top_p": top_p, "kernel": kernel, **row}
