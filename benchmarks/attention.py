"""Replay attention: the tiles that a layer visits, its memory and its speed; on a GPU also its exactness.

The cost is the number of 128 x 128 tiles in which a query sees a key. On S tokens, a budget B leaves about S * B such
pairs, but evictions scatter the pairs over many more tiles than needed. Sorting the keys in segments helps. Measured:

    tiles       the share of visited tiles, with keys in natural order and sorted; as the ideal, the share of visible
                pairs; for `gather`, the share of computed pairs; and the memory of one layer beside q, k and v
    building    the lists of tiles from evict_at, against torch's create_block_mask
    speed       flex_sorted, flex in natural order (with the same direct lists), flex with create_block_mask, and dense
                causal SDPA (flash): forward and backward; on a CPU, where FlexAttention has no backward, forward
    parity      on a GPU: output, gradients and log-sum-exp at production shapes (sparse_rl/attention/parity.py)
    target      the target of KVpop's scorers, one layer of an 8B model: visited tiles; on a GPU speed and exactness

    OMP_NUM_THREADS=1 python benchmarks/attention.py     # writes benchmarks/results/attention.json; a GPU: 8 minutes
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.results import write
from sparse_rl.attention.future import attention_lse, future_attention_mass
from sparse_rl.attention.future_parity import check_target
from sparse_rl.attention.kernels import flex
from sparse_rl.attention.kernels.flex import flex_attend
from sparse_rl.attention.kernels.gather import make_chunks, visited_share
from sparse_rl.attention.kernels.masked import masked_attention
from sparse_rl.attention.kernels.tiles import make_tiles, segment_of, tile_tests, visible_share
from sparse_rl.attention.parity import check_parity
from sparse_rl.kernels import running_topk

SINKS, WINDOW = 4, 256
TILES = [(4096, 1024), (16384, 2048), (32768, 2048), (65536, 2048)]
SPEED = {  # (S, B); heads, kv heads, head dim; dtype
    "cuda": ([(s, b) for s in (4096, 16384, 32768, 65536) for b in (512, 2048)], (28, 4, 128), torch.bfloat16),
    "cpu": ([(4096, 512), (4096, 1024), (16384, 512), (16384, 2048)], (4, 2, 64), torch.float32),
}
PARITY = [(4096, 28, 4), (4096, 32, 8), (16384, 28, 4), (16384, 32, 8)]
TARGET = (16384, 2048, (32, 8, 128))  # S, B, shape
BUILD = (16384, 8)  # S, kv heads
MASK_BYTES = 4e9  # create_block_mask is not run for more pairs


def evictions(kind: str, length: int, budget: int, heads: int, device: str) -> torch.Tensor:
    """Return evict_at, int32 [heads, S], if the best random scores are kept. kind "recency" favours recent tokens."""
    scores = torch.randn(1, heads, length, generator=torch.Generator().manual_seed(0))
    if kind == "recency":
        scores = scores + torch.arange(length) / budget
    topk = running_topk(scores.to(device), SINKS, window=WINDOW, k=budget - SINKS - WINDOW)
    return topk.evict_at[0]


def tiles_row(kind: str, length: int, budget: int, device: str) -> dict[str, Any]:
    evict_at = evictions(kind, length, budget, 4, device)
    natural, ordered = (make_tiles(evict_at, length, segment) for segment in (None, segment_of(length)))
    keys = 2 * 4 * length * 128 * 2  # 4 kv heads of 128, bfloat16
    return {
        "scores": kind, "S": length, "B": budget, "ideal": visible_share(evict_at), "natural": natural.visited,
        "sorted": ordered.visited, "gathered": visited_share(make_chunks(evict_at)),
        "evict_at_bytes": evict_at.nbytes, "tiles_bytes": ordered.nbytes + 4 * length * 8,
        "sorted_keys_bytes": keys, "mask_bytes": 4 * length**2,
    }  # fmt: skip


def building(device: str, runs: int) -> dict[str, Any]:
    """Return the milliseconds to build one layer's lists of tiles, after checking them against create_block_mask."""
    length, heads = BUILD
    evict_at = evictions("uniform", length, 2048, heads, device)

    def visible(row: torch.Tensor, _: torch.Tensor, q: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (t <= q) & (q < evict_at[row, t])

    def torch_mask() -> Any:
        return create_block_mask(visible, heads, None, length, length, device=device)

    tiles = make_tiles(evict_at, length)
    start = time.perf_counter()
    theirs = torch_mask()
    seconds = time.perf_counter() - start  # a single run: it takes a minute on a CPU
    assert torch.equal(tiles.partial_count, theirs.kv_num_blocks) and torch.equal(tiles.partial, theirs.kv_indices)
    assert torch.equal(tiles.full_count, theirs.full_kv_num_blocks)
    return {
        "S": length, "heads": heads,
        "natural": timed(lambda: make_tiles(evict_at, length), runs, device),
        "sorted": timed(lambda: make_tiles(evict_at, length, segment_of(length)), runs, device),
        "create_block_mask": timed(torch_mask, 1, device) if device == "cuda" else seconds * 1e3,
    }  # fmt: skip


def timed(work: Callable[[], Any], runs: int, device: str) -> float:
    """Return the median of milliseconds over `runs` runs, after a warm-up."""
    timings = []
    for _ in range(runs + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        timings.append((time.perf_counter() - start) * 1e3)
    return statistics.median(timings[1:])


def attentions(
    evict_at: torch.Tensor, scaling: float, *, grouped: bool, compiled: bool = True
) -> dict[str, Callable[..., torch.Tensor]]:
    """Return name -> attend(q, k, v): FlexAttention under evict_at [1, Hkv, S] and without evictions, and flash SDPA.

    grouped : False repeats the kv heads for SDPA, because a CPU has flash attention only for equal numbers of heads
    compiled : False uses FlexAttention's plain operator
    """
    everything, group = torch.full_like(evict_at, 2 * evict_at.shape[-1]), evict_at.shape[1]

    def ours(which: torch.Tensor, in_segments: bool) -> Callable[..., torch.Tensor]:
        options: dict[str, Any] = {"in_segments": in_segments, "compiled": compiled}
        return lambda q, k, v: flex_attend(which, q, k, v, scaling, **options)[0]

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not grouped:
            k, v = (x.repeat_interleave(q.shape[1] // group, 1) for x in (k, v))
        attend = torch.nn.functional.scaled_dot_product_attention
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            return attend(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)

    return {
        "sorted": ours(evict_at, True),
        "natural": ours(evict_at, False),
        "causal flex": ours(everything, False),
        "causal SDPA": dense,
    }


def with_torch_mask(evict_at: torch.Tensor, scaling: float) -> Callable[..., torch.Tensor]:
    """Return attend(q, k, v): plain FlexAttention with create_block_mask. evict_at : [1, Hkv, S]"""
    kv_heads, length = evict_at.shape[1:]
    compiled = torch.compile(flex_attention, dynamic=False)

    def visible(row: torch.Tensor, _: torch.Tensor, i: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (t <= i) & (i < evict_at[0, row, t])

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = create_block_mask(visible, kv_heads, None, length, length, device=str(evict_at.device))
        options: dict[str, Any] = {"scale": scaling, "enable_gqa": True, "kernel_options": dict(flex.KERNEL_OPTIONS)}
        grouped = q.view(kv_heads, -1, length, q.shape[-1])
        return compiled(grouped, k[0, :, None], v[0, :, None], block_mask=mask, **options).view(q.shape)

    return attend


def speed(length: int, budget: int, device: str, runs: int) -> dict[str, Any]:
    """Return the milliseconds of one layer on one sequence: forward and backward on a GPU, forward on a CPU."""
    _, (heads, kv_heads, dim), dtype = SPEED[device]
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, h, length, dim, generator=generator).to(device, dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    evict_at = evictions("uniform", length, budget, kv_heads, device)[None]
    everything = torch.full_like(evict_at, 2 * length)
    trains = device == "cuda"

    def run(attend: Callable[..., torch.Tensor]) -> Callable[[], Any]:
        def work() -> None:
            given = [x.detach().requires_grad_(trains) for x in (q, k, v)]
            out = attend(*given)
            if trains:
                torch.autograd.grad(out, given, grad)

        return work

    kinds = attentions(evict_at, dim**-0.5, grouped=trains)
    if trains and kv_heads * length**2 <= MASK_BYTES:
        kinds["natural, create_block_mask"] = with_torch_mask(evict_at, dim**-0.5)
    if trains and length <= 16384:  # it needs S x S masks, and computes in float64 on a CPU
        kinds["SDPA, masks"] = lambda q, k, v: masked_attention(lambda: evict_at, q, k, v, dim**-0.5)
    timing: dict[str, Any] = {"S": length, "B": budget}
    with torch.set_grad_enabled(trains):
        timing |= {kind: timed(run(attend), runs, device) for kind, attend in kinds.items()}
    if trains:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(kinds["sorted"])()
        timing["peak bytes of sorted"] = torch.cuda.max_memory_allocated() - before
    causal, ideal = visible_share(everything[0]), visible_share(evict_at[0])
    timing["saving realised"] = (1 - timing["sorted"] / timing["causal flex"]) / (1 - ideal / causal)
    return timing


def parity_row(length: int, heads: int, kv_heads: int, kernel: str) -> dict[str, Any]:
    parity = check_parity(kernel, "cuda", torch.bfloat16, heads=heads, kv_heads=kv_heads, head_dim=128, length=length)
    return {"S": length, "heads": heads, "kv_heads": kv_heads, "kernel": kernel, "failure": parity.failure,
            "errors": parity.errors}  # fmt: skip


def target(device: str, runs: int) -> dict[str, Any]:
    """Return the cost of the scorers' target: the log-sum-exp of the queries, and the attention mass of the keys."""
    length, budget, (heads, kv_heads, dim) = TARGET
    evict_at = evictions("uniform", length, budget, kv_heads, device)[None]
    place = torch.arange(length, dtype=torch.int32, device=device)[None]
    result: dict[str, Any] = {
        "S": length, "B": budget, "heads": heads, "kv_heads": kv_heads, "head_dim": dim,
        "tiles of the mass": float(tile_tests(place + WINDOW, torch.full_like(place, length))[0].float().mean()),
        "tiles of the log-sum-exp": make_tiles(evict_at[0], length, segment_of(length)).visited,
    }  # fmt: skip
    if device == "cpu":
        return result
    result["parity"] = str(check_target(torch.device("cuda", 0), torch.bfloat16, TARGET[2], length))
    query, key = (torch.randn(1, h, length, dim, device=device, dtype=torch.bfloat16) for h in (heads, kv_heads))
    scaling = dim**-0.5
    for kernel in ("torch", "flex"):

        def work(kernel: Any = kernel) -> None:
            lse = attention_lse(query, key, scaling=scaling, evict_at=evict_at, kernel=kernel)
            options: dict[str, Any] = {"log_sum_exp": lse, "group": "max", "floor": 1e-6, "kernel": kernel}
            future_attention_mass(query, key, window=WINDOW, scaling=scaling, **options)

        result[kernel] = timed(work, runs, device)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/attention.json"))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    content: dict[str, Any] = {
        "tiles": [tiles_row(kind, s, b, device) for s, b in TILES for kind in ("uniform", "recency")],
        "building": building(device, options.runs),
        "parity": [parity_row(*shape, kernel) for shape in PARITY for kernel in ("flex", "flex_sorted")]
        if device == "cuda"
        else [],
        "target": target(device, options.runs),
    }
    shape = dict(zip(("heads", "kv_heads", "head_dim"), SPEED[device][1], strict=True))
    content["speed"] = {
        "of": {**shape, "dtype": str(SPEED[device][2]).removeprefix("torch."), "sequences": 1,
               "passes": "forward and backward" if device == "cuda" else "forward"},
        "rows": [speed(s, b, device, options.runs) for s, b in SPEED[device][0]],
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }  # fmt: skip
    write(options.out, **content)
    show(content, Console(width=None if sys.stdout.isatty() else 150))


def show(content: dict[str, Any], console: Console) -> None:
    table = Table(
        title="Tiles visited, and what a layer of 4 kv heads of 128 holds beside q, k, v", title_justify="left"
    )
    sizes = ("evict_at", "tiles", "keys sorted", "S x S mask instead")
    for column in ("scores", "S", "B", "ideal", "natural", "sorted", "gathered", *sizes):
        table.add_column(column, justify="left" if column == "scores" else "right")
    for row in content["tiles"]:
        shares = [f"{row[key]:.1%}" for key in ("ideal", "natural", "sorted", "gathered")]
        names = ("evict_at_bytes", "tiles_bytes", "sorted_keys_bytes", "mask_bytes")
        held = [f"{row[name] / 1e6:.1f} MB" for name in names]
        table.add_row(row["scores"], str(row["S"]), str(row["B"]), *shares, *held)
    console.print(table)
    built = content["building"]
    ratio = built["create_block_mask"] / built["natural"]
    console.print(
        f"One layer's lists, {built['S']} x {built['heads']} kv heads: natural {built['natural']:.1f} ms, sorted "
        f"{built['sorted']:.1f} ms, create_block_mask {built['create_block_mask']:.0f} ms ({ratio:.0f} x)"
    )
    mass = content["target"]
    took = f"; {mass['flex']:.1f} ms by FlexAttention, {mass['torch']:.0f} ms by the loop" if "flex" in mass else ""
    console.print(
        f"The scorers' target, {mass['S']} tokens, budget {mass['B']}: {mass['tiles of the mass']:.1%} of the tiles "
        f"for the mass, {mass['tiles of the log-sum-exp']:.1%} for the log-sum-exp{took}"
    )
    of, rows = content["speed"]["of"], content["speed"]["rows"]
    kinds = [kind for kind in rows[0] if kind not in ("S", "B", "saving realised", "peak bytes of sorted")]
    title = f"Milliseconds, {of['passes']}, {of['heads']}/{of['kv_heads']} heads of {of['head_dim']}, {of['dtype']}"
    table = Table(title=f"{title} ; × sorted", title_justify="left")
    for column in ("S", "B", *kinds, "saving realised"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [f"{row[kind]:.1f} ({row[kind] / row['sorted']:.2g} ×)" if kind in row else "" for kind in kinds]
        table.add_row(str(row["S"]), str(row["B"]), *cells, f"{row['saving realised']:.0%}")
    console.print(table)
    for row in content["parity"]:
        outcome = row["failure"] or ", ".join(f"{k} {a:.1e} / {b:.1e}" for k, (a, b) in row["errors"].items())
        console.print(f"parity {row['kernel']}, S {row['S']}, {row['heads']}/{row['kv_heads']} heads: {outcome}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
