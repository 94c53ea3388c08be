"""running_topk compared with the obvious implementation: a Fenwick tree over ranks, one token at a time.

On S tokens, running_topk does O(S log S) work in ceil(log2 S) parallel passes; the tree does as much work in S
dependent steps. On a CPU the compiled tree is the fastest alternative per core. On a GPU each step waits for memory, so
only parallel passes are fast. The time of running_topk includes the sort that makes the ranks; the time of the trees
does not.

    OMP_NUM_THREADS=1 python benchmarks/topk.py      # writes benchmarks/results/topk.json; a GPU adds the Triton rows
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.results import write
from sparse_rl.kernels import running_topk

SINKS, WINDOW = 4, 256
SIZES = [(4096, 8), (4096, 64), (16384, 8), (16384, 64), (65536, 8), (65536, 64)]
PYTHON_TOKENS = 16384 * 64  # the pure Python tree is not run on more
SOURCE = r"""
#include <cstdint>
#include <vector>
extern "C" void fenwick(const int32_t* ranks, int32_t* cutoff, int64_t rows, int64_t width, int64_t k) {
  int64_t top = 1;
  while (top * 2 <= width) top *= 2;
  std::vector<int32_t> tree(width + 1);
  for (int64_t row = 0; row < rows; ++row) {
    std::fill(tree.begin(), tree.end(), 0);
    for (int64_t t = 0; t < width; ++t) {
      for (int64_t i = ranks[row * width + t] + 1; i <= width; i += i & -i) ++tree[i];
      if (t + 1 < k) continue;
      int64_t place = 0, left = k;
      for (int64_t step = top; step; step /= 2)
        if (place + step <= width && tree[place + step] < left) { place += step; left -= tree[place]; }
      cutoff[row * width + t] = place;
    }
  }
}
"""


def python_fenwick(ranks: list[list[int]], k: int) -> list[list[int]]:
    """Return the rank of the k-th best token of each prefix; -1 for prefixes shorter than k."""
    cutoffs = []
    for row in ranks:
        width = len(row)
        tree, cutoff, top = [0] * (width + 1), [-1] * width, 1 << (width.bit_length() - 1)
        for t, rank in enumerate(row):
            i = rank + 1
            while i <= width:
                tree[i] += 1
                i += i & -i
            if t + 1 < k:
                continue
            place, left, step = 0, k, top
            while step:
                if place + step <= width and tree[place + step] < left:
                    place += step
                    left -= tree[place]
                step //= 2
            cutoff[t] = place
        cutoffs.append(cutoff)
    return cutoffs


def compile_fenwick(folder: Path) -> Any:
    """Return the compiled C++ tree, or None if there is no compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    (folder / "fenwick.cpp").write_text("#include <algorithm>\n" + SOURCE)
    library = folder / "fenwick.so"
    subprocess.run([compiler, "-O3", "-shared", "-fPIC", str(folder / "fenwick.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library)).fenwick


def triton_fenwick() -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Return the Triton tree: one program per row, with the tree in global memory (it fits into the L2 cache)."""
    from benchmarks.fenwick_triton import fenwick  # not on a CPU

    return fenwick


def timed(work: Callable[[], Any], runs: int) -> float:
    """Return the median of milliseconds over `runs` runs, after a warm-up."""
    timings = []
    for _ in range(runs + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        timings.append((time.perf_counter() - start) * 1e3)
    return statistics.median(timings[1:])


def measure(length: int, heads: int, native: Any, runs: int) -> dict[str, Any]:
    """Return the milliseconds of each implementation, after checking that all give the same cutoffs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    k = min(2016, length // 4)
    scores = torch.randn(1, heads, length, generator=torch.Generator().manual_seed(0)).to(device)
    given: dict[str, Any] = {"window": WINDOW, "k": k}
    result: dict[str, Any] = {"S": length, "heads": heads, "k": k}
    wanted = running_topk(scores, SINKS, kernel="torch", **given).cutoff_rank[0, :, SINKS + WINDOW :]
    result["torch"] = timed(lambda: running_topk(scores, SINKS, kernel="torch", **given), runs)
    order = scores[0, :, SINKS : length - WINDOW].sort(dim=-1, descending=True, stable=True).indices
    ranks = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1], device=device).expand_as(order))
    width = ranks.shape[1]
    host = ranks.int().cpu().contiguous()
    if length * heads <= PYTHON_TOKENS:
        lists = host.tolist()
        assert torch.equal(torch.tensor(python_fenwick(lists, k)), wanted.long().cpu())
        result["python Fenwick"] = timed(lambda: python_fenwick(lists, k), 1)
    if native is not None:
        cutoff = torch.full((heads, width), -1, dtype=torch.int32)
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (host, cutoff)]
        sizes = [ctypes.c_int64(x) for x in (heads, width, k)]
        result["C++ Fenwick"] = timed(lambda: native(*pointers, *sizes), runs)
        assert torch.equal(cutoff, wanted.cpu())
    if device == "cuda":
        assert torch.equal(
            running_topk(scores, SINKS, kernel="triton", **given).cutoff_rank[0, :, SINKS + WINDOW :], wanted
        )
        result["triton"] = timed(lambda: running_topk(scores, SINKS, kernel="triton", **given), runs)
        fenwick = triton_fenwick()
        assert torch.equal(fenwick(ranks, k), wanted)
        result["triton Fenwick"] = timed(lambda: fenwick(ranks, k), runs)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/topk.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        native = compile_fenwick(Path(folder))
        rows = [measure(length, heads, native, options.runs) for length, heads in SIZES]
    write(options.out, window=WINDOW, rows=rows)
    kinds = [kind for kind in rows[0] if kind not in ("S", "heads", "k")]
    table = Table(title=f"running_topk, milliseconds ({torch.get_num_threads()} threads); × its torch form")
    for column in ("S", "heads", *kinds):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [f"{row[kind]:.1f} ({row[kind] / row['torch']:.2g} ×)" if kind in row else "" for kind in kinds]
        table.add_row(str(row["S"]), str(row["heads"]), *cells)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
