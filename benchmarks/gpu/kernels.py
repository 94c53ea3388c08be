"""Kernels beside their references: attention under evictions, running top-k, redundancy of keys, sampler."""

from __future__ import annotations

import importlib
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.stages import sizes
from benchmarks.gpu.worker import FAILURE, Options, Row, attempt, in_a_line
from benchmarks.speed import SINKS, attentions, evictions, sampler
from sparse_rl.kernels import mean_similarity, running_topk
from sparse_rl.kernels.flex import make_tiles, padded, segment_of
from sparse_rl.kernels.masked import make_chunks, masked_attention, visited_share
from sparse_rl.kernels.parity import check_parity


def seconds(work: Callable[[], Any]) -> float:
    """Return the duration of one run, after a GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


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
    for name, all_runs in times.items():
        if name not in rows:
            own = all_runs[2:]
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
    heads, kv_heads, dim = sizes(options).heads
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}

    def row(kernel: str, length: int) -> Row:
        result = check_parity(kernel, options.device, getattr(torch, options.dtype), length=length, **shape)
        if not result.errors:
            raise RuntimeError(result.failure)
        errors = {name: f"{error:.1e} / {allowed:.1e}" for name, (error, allowed) in result.errors.items()}
        return {"exact": result.failure is None, "largest error": max(e for e, _ in result.errors.values()), **errors}

    for length in sorted(length for length in sizes(options).lengths if length <= sizes(options).dense):
        for kernel in ("flex_sorted", "flex"):
            if not options.measured(kernel=kernel, S=length):
                yield attempt({"kernel": kernel, "S": length}, partial(row, kernel, length))


def speed(options: Options) -> Iterator[Row]:
    """Yield a row for each length, kernel, and passes (forward and backward, or forward)."""
    let_flex_train(options)
    for length in sizes(options).lengths:
        for passes in ("forward and backward", "forward"):
            keys = {"S": length, "passes": passes}
            if not options.measured(**keys):
                kernel_rows = attempt({}, partial(timed, options, length, passes != "forward"))
                for kernel, row in kernel_rows.items():
                    yield {**keys, "kernel": kernel, **row} if isinstance(row, dict) else {**keys, kernel: row}


def timed(options: Options, length: int, trains: bool) -> dict[str, Row]:
    """Return kernel -> row with times and tiles (of gather: pairs)."""
    (heads, kv_heads, dim), dtype = sizes(options).heads, getattr(torch, options.dtype)
    budget, on_gpu = sizes(options).budget, options.device == "cuda"
    evict_at = evictions("uniform", length, budget, kv_heads, window=16)[None].to(options.device)
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, h, length, dim, generator=generator).to(options.device, dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    attends: dict[str, Any] = {**attentions(evict_at, dim**-0.5, grouped=on_gpu, compiled=on_gpu)}
    for kernel in ("gather", "sdpa"):
        attends[kernel] = partial(masked_attention, lambda: evict_at, scaling=dim**-0.5, kernel=kernel)

    def run(attend: Any) -> None:
        with torch.set_grad_enabled(trains):
            inputs = [x.detach().requires_grad_(trains) for x in (q, k, v)]
            out = attend(*inputs)
            if trains:
                torch.autograd.grad(out, inputs, grad)

    works = {name: partial(run, attend) for name, attend in attends.items()}
    rows = compared(works, sizes(options).runs, reference="flex")
    width = padded(length)
    rows["flex_sorted"]["tiles"] = make_tiles(evict_at[0], width, segment_of(width)).visited
    rows["flex"]["tiles"] = make_tiles(evict_at[0], width).visited
    rows["gather"]["tiles"] = visited_share(make_chunks(evict_at[0]))
    return rows


def topk(options: Options) -> Iterator[Row]:
    """Yield a row for each implementation of running_topk."""
    length, heads = sizes(options).topk
    scores = torch.randn(1, heads, length, generator=torch.Generator().manual_seed(0)).to(options.device)
    given: dict[str, Any] = {"window": min(256, length // 8), "k": min(2016, length // 4)}
    works = {name: partial(running_topk, scores, SINKS, kernel=name, **given) for name in ("torch", "triton")}
    for name, row in compared(works, sizes(options).runs, reference="torch").items():
        yield {"S": length, "kv heads": heads, "k": given["k"], "kernel": name, **row}


def redundancy(options: Options) -> Iterator[Row]:
    """Yield a row for each implementation of mean_similarity, on keys in clusters."""
    rows, heads, entries, dim = sizes(options).redundancy
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(rows, heads, 16, dim, generator=generator)
    cluster = torch.randint(16, (rows, heads, entries, 1), generator=generator).expand(-1, -1, -1, dim)
    keys = centres.gather(2, cluster) + torch.randn(rows, heads, entries, dim, generator=generator)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float16  # Triton interprets no product of bfloat16
    positions = torch.arange(entries, device=options.device).expand(rows, heads, -1)
    lengths = torch.full((rows,), entries, device=options.device)
    given = keys.to(options.device, dtype), positions, lengths
    works = {name: partial(mean_similarity, *given, name) for name in ("torch", "triton")}
    for name, row in compared(works, sizes(options).runs, reference="torch").items():
        yield {"rows": rows, "kv heads": heads, "entries": entries, "dtype": str(dtype), "kernel": name, **row}


def sampling(options: Options) -> Iterator[Row]:
    """Yield rows of the sampler and its reference for each setting; their tokens are checked to be the same."""
    batch, vocabulary = sizes(options).sampler
    for top_k, top_p in ((None, 1.0), (20, 1.0), (None, 0.95), (20, 0.95)):
        works = sampler(batch, vocabulary, top_k, top_p, options.device)
        for kernel, row in compared(works, sizes(options).runs, reference="reference").items():
            yield {"rows": batch, "vocabulary": vocabulary, "top_k": top_k, "top_p": top_p, "kernel": kernel, **row}
