"""The kernels beside attention: running top-k, the redundancy of keys, and the sampler, each beside its reference."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.shapes import sizes
from benchmarks.gpu.timing import compared
from benchmarks.gpu.worker import FAILURE, Options, Row, attempt
from benchmarks.sampler import SETTINGS, by_scan, in_rows, in_two_levels
from benchmarks.topk import SINKS, WINDOW
from rollout import SamplingConfig
from rollout.sampling import sample
from rollout.sampling_reference import sample_reference
from sparse_rl.kernels import mean_similarity, running_topk
from sparse_rl.kernels.redundancy import redundancy_choice
from sparse_rl.kernels.topk import topk_choice


def topk(device: str, small: bool, options: Options) -> Iterator[Row]:
    """Yield a row for each implementation of running_topk, and on a GPU the implementation that sparse-rl chooses."""
    length, heads = sizes(small).topk
    scores = torch.randn(1, heads, length, generator=torch.Generator().manual_seed(0)).to(device)
    given: dict[str, Any] = {"window": min(WINDOW, length // 8), "k": min(2016, length // 4)}
    works = {name: partial(running_topk, scores, SINKS, kernel=name, **given) for name in ("torch", "triton")}
    keys = {"S": length, "kv heads": heads, "k": given["k"]}
    rows = compared(works, device, sizes(small).runs, reference="torch")
    right = works["torch"]()
    for name, row in rows.items():
        if FAILURE not in row:
            result = works[name]()
            pairs = [(result.evict_at, right.evict_at), (result.cutoff_rank, right.cutoff_rank)]
            row["different numbers"] = sum(int((a != b).sum()) for a, b in pairs)
        yield {**keys, "kernel": name, **row}
    if device == "cuda":
        yield attempt({**keys, "kernel": "choice of the product"}, lambda: {"finding": str(topk_choice())})


def redundancy(device: str, small: bool, options: Options) -> Iterator[Row]:
    """Yield a row for each implementation of mean_similarity, and on a GPU the one that sparse-rl chooses."""
    rows_of_cache, heads, entries, dim = sizes(small).redundancy
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(rows_of_cache, heads, 16, dim, generator=generator)
    cluster = torch.randint(16, (rows_of_cache, heads, entries, 1), generator=generator).expand(-1, -1, -1, dim)
    keys = centres.gather(2, cluster) + torch.randn(rows_of_cache, heads, entries, dim, generator=generator)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16  # Triton's interpreter cannot multiply bfloat16
    keys = keys.to(device, dtype)
    positions = torch.arange(entries, device=device).expand(rows_of_cache, heads, -1)
    lengths = torch.full((rows_of_cache,), entries, device=device)
    works = {name: partial(mean_similarity, keys, positions, lengths, name) for name in ("torch", "triton")}
    shape = {"rows": rows_of_cache, "kv heads": heads, "entries": entries, "head dim": dim, "dtype": str(dtype)}
    rows = compared(works, device, sizes(small).runs, reference="torch")
    right = works["torch"]()
    for name, row in rows.items():
        if FAILURE not in row:
            apart = (works[name]() - right).abs() * entries  # in units of one similarity
            row["largest error"] = float(apart[apart <= 0.4].max())
            row["share decided otherwise"] = float((apart > 0.4).float().mean())  # a cosine near the threshold
        yield {**shape, "kernel": name, **row}
    if device == "cuda":
        choice = partial(redundancy_choice, dtype, dim)
        yield attempt({**shape, "kernel": "choice of the product"}, lambda: {"finding": str(choice())})


def sampler(device: str, small: bool, options: Options) -> Iterator[Row]:
    """Yield rows of the sampler and its reference for each setting, and rows of two ways to draw from the CDF."""
    batch, vocabulary = sizes(small).sampler
    generator, runs = torch.Generator().manual_seed(0), sizes(small).runs
    logits = (3 * torch.randn(batch, vocabulary, generator=generator)).to(device)
    uniform = torch.rand(batch, generator=generator, dtype=torch.float64).to(device)
    size = {"rows": batch, "vocabulary": vocabulary, "dtype": f"float32, computed on {device}"}
    for setting in SETTINGS:
        name = ", ".join(f"{key} {value}" for key, value in setting.items()) or "whole distribution"
        given = logits, SamplingConfig(1, **setting), uniform
        works = {"reference": partial(sample_reference, *given), "sampler": partial(sample, *given)}
        rows = compared(works, device, runs, reference="reference")
        if not any(FAILURE in row for row in rows.values()):
            (tokens, logprobs, _), (right_tokens, right_logprobs, _) = sample(*given), sample_reference(*given)
            same = tokens == right_tokens
            rows["sampler"]["other tokens"] = int((~same).sum())
            rows["sampler"]["error of log-probs"] = float((logprobs - right_logprobs)[same].abs().max())
        for kernel, row in rows.items():
            yield {"setting": name, "kernel": kernel, **row, **size}
    logprobs = logits.log_softmax(-1)
    ways = {"scan": by_scan, "two levels": in_two_levels}
    works = {name: partial(in_rows, way, logprobs, uniform) for name, way in ways.items()}
    for name, row in compared(works, device, runs, reference="scan").items():
        if FAILURE not in row:
            row["other tokens"] = int((works[name]() != works["scan"]()).sum())
        yield {"setting": "CDF", "kernel": name, **row, **size}
