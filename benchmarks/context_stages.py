"""The cost of compacting a long context: CPU seconds of this process on one thread, and an estimate for an H200.
`python benchmarks/timing.py --questions contexts` measures its stages.

compaction  the compaction alone, with random keys of T tokens, of which t are kept; a fit of c T^a t^b to the seconds
arithmetic  operations, bytes and seconds of each stage on an H200 at the assumed shares of its nominal speed, for all
            layers. Nothing was run on an H200

    OMP_NUM_THREADS=1 python benchmarks/context_stages.py     # writes benchmarks/results/context_stages.json
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any, cast

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch

from benchmarks.cpu_seconds import seconds, show
from benchmarks.results import Rows, write
from rollout.context import Context, PromptCacheConfig
from rollout.context.cache import LayerEntries
from rollout.context.chunks import StudiedParts
from rollout.context.compact import Studied
from rollout.context.conversations import Reader
from rollout.context.stages import Stages

HIDDEN, INTERMEDIATE, Q_HEADS, KV_HEADS, DIM, LAYERS = 896, 4864, 14, 2, 64, 24
RATIO, CHUNK = 0.05, 4096
QUERIES = {
    "attention": 2048,
    "omp": 512,
    "omp_fast": 512,
}  # for each kv head, few enough for a CPU; the default is 50,000
# The manufacturer's TFLOP/s and TB/s, and the share of them that we assume.
H200 = {"bf16": (989, 0.4), "fp64": (67, 0.5), "memory": (4.8, 0.6)}

LAUNCHES, LAUNCH = 15, 10e-6  # sequential kernels in a step of the pursuit, and the seconds of each kernel


def printed(title: str, rows: Rows) -> None:
    show(title, [{k: f"{v:.3g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows], len(rows[0]))


def configured(select: str, ratio: float = RATIO) -> PromptCacheConfig:
    return PromptCacheConfig(ratio=ratio, select=select, chunk=CHUNK, most_queries=QUERIES[select])


def made_up(tokens: int, config: PromptCacheConfig) -> StudiedParts:
    """Return random keys in clusters, as in a text, and queries near the same clusters, which serve every part."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(KV_HEADS, 64, DIM, generator=generator)

    def near(count: int) -> torch.Tensor:
        chosen = centres[:, torch.randint(64, (count,), generator=generator)]
        return (chosen + 0.5 * torch.randn(chosen.shape, generator=generator))[None]

    keys, queries = near(tokens), near(config.most_queries)
    values = torch.randn(keys.shape, generator=generator)
    positions = torch.arange(tokens).expand(1, KV_HEADS, -1)
    bias, ids, reader = torch.zeros(1, KV_HEADS, tokens), list(range(tokens)), cast(Reader, None)
    whole = LayerEntries(keys, values, bias, positions)
    parts = []
    for part in config.parts(tokens):
        own = LayerEntries(*(x[:, :, config.first + part.start : config.first + part.end] for x in whole))
        first = LayerEntries(*(x[:, :, : config.first] for x in whole))
        entries = LayerEntries(*(torch.cat(pair, dim=2) for pair in zip(first, own, strict=True)))
        studied = Studied(Context(ids, [entries], False), [queries], DIM**-0.5, Stages(), reader)
        parts.append((part, studied))
    return StudiedParts(ids, config.first, config.last, parts, reader, Stages(), Context(ids, [whole], False))


def compaction_row(select: str, tokens: int, ratio: float, runs: int) -> dict[str, Any]:
    config = configured(select, ratio)
    studied = made_up(tokens, config)
    left = config.kept(tokens)
    stages = seconds(lambda: studied.compacted(config), runs)
    return {"select": select, "T": tokens, "t": left, "seconds": stages, "ns / (T t)": stages / tokens / left * 1e9}


def exponents(rows: Rows) -> dict[str, float]:
    """Return a and b of seconds = c T^a t^b, fitted by least squares on logarithms."""
    x = torch.tensor([[1.0, math.log(row["T"]), math.log(row["t"])] for row in rows], dtype=torch.float64)
    y = torch.tensor([[math.log(row["seconds"])] for row in rows], dtype=torch.float64)
    _, a, b = torch.linalg.lstsq(x, y).solution[:, 0].tolist()
    return {"T": a, "t": b}


def arithmetic(tokens: int, queries: int) -> Rows:
    """Return the costs of all layers, in bfloat16 except for the fits. queries : their number for each kv head"""
    weights = LAYERS * HIDDEN * (2 * HIDDEN + 2 * KV_HEADS * DIM + 3 * INTERMEDIATE)
    parts = math.ceil(tokens / CHUNK)
    part = tokens / parts
    seen = {"prefill": tokens**2 / 2, "queries (repeat)": parts * 3 * part**2 / 2}  # pairs of tokens
    rows = []
    for stage, pairs in seen.items():
        per_head = LAYERS * Q_HEADS * pairs
        # The mask is built, repeated for the heads of a group, and read: 8 bytes for each pair and query head.
        rows.append(costed(stage, "bf16", 2 * weights * tokens + 4 * DIM * per_head, 8 * per_head))
    left, heads = RATIO * part, LAYERS * KV_HEADS * parts
    # Two products for logits and one for the output; two Gram matrices of the kept entries; about 28 passes over
    # float64 logits.
    fit = 6 * queries * part * DIM + 4 * queries * left**2
    rows.append(costed("compaction, attention", "fp64", heads * fit, heads * queries * part * 28 * 8))
    gram = 2 * queries * part**2
    rows.append(costed("compaction, omp, without its steps", "fp64", heads * (fit + gram), rows[-1]["bytes"]))
    launches = heads * left * LAUNCHES
    steps = {"operations": launches, "bytes": 0.0, "seconds": launches * LAUNCH}
    return [*rows, {"stage": "the steps of omp, without a restart", "in": "kernel launches", **steps}]


def costed(stage: str, kind: str, operations: float, moved: float) -> dict[str, Any]:
    peak, share = H200[kind]
    bandwidth, of_it = H200["memory"]
    computing, moving = operations / (peak * 1e12 * share), moved / (bandwidth * 1e12 * of_it)
    return {"stage": stage, "in": kind, "operations": operations, "bytes": moved, "seconds": max(computing, moving)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2, help="runs of each compaction of random keys")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/context_stages.json"))
    options = parser.parse_args()

    alone = [compaction_row("attention", 2**k, RATIO, options.runs) for k in (13, 14, 15, 16)]
    alone += [compaction_row("attention", 2**14, ratio, options.runs) for ratio in (0.01, 0.02, 0.1, 0.2)]
    for select in ("omp", "omp_fast"):
        alone += [compaction_row(select, 2**k, RATIO, options.runs) for k in (12, 13, 14, 15, 16)]
        alone += [compaction_row(select, 2**13, ratio, options.runs) for ratio in (0.02, 0.1)]
    fits = {select: exponents([row for row in alone if row["select"] == select]) for select in QUERIES}
    printed(f"a compaction of made-up keys, {QUERIES} queries of a kv head; fits {fits}", alone)

    counted = arithmetic(60_000, 50_000)
    printed(f"an H200 by arithmetic, {LAYERS} layers, 60,000 tokens, 50,000 queries of a kv head: {H200}", counted)
    write(options.out, compaction=alone, exponents=fits, arithmetic=counted, assumed=H200)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main()
