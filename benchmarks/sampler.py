"""The sampler against its plain reference, which sorts the vocabulary; and the sampler's CDF against a two-level CDF.

The sampler's CDF is one scan over the vocabulary. The two-level CDF sums chunks of the vocabulary, and then scans one
chunk. Its rounding differs: a row whose draw is too close to a border between two tokens is drawn again by the scan. To
find such rows, a GPU must be synchronised in every step. The last measurement counts how often top-p would keep other
tokens if the ranked probabilities were not normalised first.

    OMP_NUM_THREADS=1 python benchmarks/sampler.py      # writes benchmarks/results/sampler.json; takes minutes
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from benchmarks.results import write
from rollout import SamplingConfig
from rollout.sampling import AT_ONCE, ranking, sample
from rollout.sampling_reference import sample_reference

SIZES = [(64, 151_936), (8, 32_000), (64, 64)]
SETTINGS: list[dict[str, Any]] = [{}, {"top_k": 20}, {"top_p": 0.95}, {"top_k": 20, "top_p": 0.95}]
CHUNK = 512


def timed(work: Callable[[], Any], runs: int) -> float:
    """Return the median of milliseconds after a warm-up: wall-clock time on a GPU, CPU time on a CPU."""
    cuda = torch.cuda.is_available()
    clock, times = time.perf_counter if cuda else time.process_time, []
    for _ in range(runs + 1):
        if cuda:
            torch.cuda.synchronize()
        start = clock()
        work()
        if cuda:
            torch.cuda.synchronize()
        times.append((clock() - start) * 1e3)
    return statistics.median(times[1:])


def by_scan(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return tokens int64 [B], drawn as the sampler draws them."""
    cdf = logprobs.double().exp_().cumsum_(-1)
    return torch.searchsorted(cdf, (uniform * cdf[:, -1])[:, None], right=True)[:, 0]


def in_two_levels(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the tokens of `by_scan`. In any order, sums of V numbers >= 0 differ by less than V 2^-52 of the total."""
    rows, size = logprobs.shape
    mass = logprobs.new_zeros(rows, -(-size // CHUNK) * CHUNK, dtype=torch.float64)
    mass[:, :size].copy_(logprobs).exp_()
    mass = mass.view(rows, -1, CHUNK)
    ends = F.pad(mass.sum(-1).cumsum(-1), (1, 0))  # chunk c spans ends[c] to ends[c + 1]
    total = ends[:, -1:]
    target = uniform[:, None] * total
    chunk = (torch.searchsorted(ends, target, right=True) - 1).clamp(max=mass.shape[1] - 1)
    held_mass = mass[torch.arange(rows, device=mass.device), chunk[:, 0]]
    inside = torch.cat([ends.gather(-1, chunk), held_mass], -1).cumsum_(-1)
    place = (torch.searchsorted(inside, target, right=True) - 1).clamp(max=CHUNK - 1)
    below, above = inside.gather(-1, place), inside.gather(-1, place + 1)
    doubt = (size + 16) * 2.0**-51 * total  # rounding of two sums, and of the target
    clear = (target - below > doubt) & (above - target > doubt)
    tokens = (chunk * CHUNK + place)[:, 0]
    for row, sure in enumerate(clear[:, 0].tolist()):
        if not sure:
            tokens[row] = by_scan(logprobs[row : row + 1], uniform[row : row + 1])[0]
    return tokens


def in_rows(draw: Callable[..., torch.Tensor], logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Apply `draw` to as many rows at a time as the sampler processes."""
    rows = max(1, AT_ONCE // logprobs.shape[-1]) if logprobs.is_cpu else len(logprobs)
    return torch.cat([draw(*part) for part in zip(logprobs.split(rows), uniform.split(rows), strict=True)])


def measure(rows: int, size: int, runs: int) -> dict[str, Any]:
    """Return the milliseconds of each implementation, after checking that all draw the same tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(rows, size, generator=generator)).to(device)
    uniform = torch.rand(rows, generator=generator, dtype=torch.float64).to(device)
    logprobs = logits.log_softmax(-1)
    ways = {"scan": by_scan, "two levels": in_two_levels}
    assert torch.equal(*(in_rows(draw, logprobs, uniform) for draw in ways.values()))
    cdf = {name: timed(lambda draw=draw: in_rows(draw, logprobs, uniform), runs) for name, draw in ways.items()}
    settings = []
    for setting in SETTINGS:
        given = logits, SamplingConfig(1, **setting), uniform
        assert torch.equal(sample(*given)[0], sample_reference(*given)[0])
        pair = {"reference": partial(sample_reference, *given), "sampler": partial(sample, *given)}
        settings.append({**setting, **{name: timed(work, runs) for name, work in pair.items()}})
    return {"B": rows, "V": size, "settings": settings, "cdf": cdf}


def cut_elsewhere(deviation: float, rows: int = 192, size: int = 151_936, top_p: float = 0.95) -> int:
    """Return the number of rows in which top-p keeps other tokens if the ranked list is not normalised before."""
    generator, count = torch.Generator().manual_seed(0), 0
    for _ in range(rows):
        logprobs = (deviation * torch.randn(1, size, generator=generator)).log_softmax(-1)
        ranked = logprobs.gather(-1, ranking(logprobs, size))
        lengths = [int((mass.cumsum(-1) - mass < top_p).sum()) for mass in (ranked.log_softmax(-1).exp(), ranked.exp())]
        count += lengths[0] != lengths[1]
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sampler.json"))
    options = parser.parse_args()
    results = [measure(rows, size, options.runs) for rows, size in SIZES]
    cuts = {str(deviation): cut_elsewhere(deviation) for deviation in (2, 3, 5)}
    write(options.out, sizes=results, cut_elsewhere_of_192=cuts)
    table = Table(title=f"One token per row, milliseconds ({torch.get_num_threads()} threads)")
    for column in ("B x V", "setting", "reference", "sampler", "times faster"):
        table.add_column(column, justify="right")
    for result in results:
        size = f"{result['B']} x {result['V']}"
        for row in result["settings"]:
            filters = ", ".join(f"{key} {row[key]}" for key in ("top_k", "top_p") if key in row) or "whole distribution"
            numbers = row["reference"], row["sampler"], row["reference"] / row["sampler"]
            table.add_row(size, filters, *(f"{number:.3g}" for number in numbers))
        scan, levels = result["cdf"]["scan"], result["cdf"]["two levels"]
        table.add_row(size, "its CDF: scan, two levels", f"{scan:.3g}", f"{levels:.3g}", f"{scan / levels:.3g}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print("Rows of 192 that top-p 0.95 cuts elsewhere if the list is not normalised, by deviation:", cuts)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
