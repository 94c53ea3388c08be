"""The cost of compacting a long context: CPU seconds of this process on one thread, and an estimate for an H200.

stages      prefill, reference queries (the context is read a second time) and compaction, in one layer with the shape
            of Qwen2.5-0.5B's layers and random weights, and the process's peak memory
compaction  the compaction alone, with random keys of T tokens, of which t are kept; a fit of c T^a t^b to the seconds
arithmetic  operations, bytes and seconds of each stage on an H200 at the assumed shares of its nominal speed, for all
            layers. Nothing was run on an H200

    OMP_NUM_THREADS=1 python benchmarks/context_stages.py     # writes benchmarks/results/context_stages.json
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.cpu_seconds import seconds, show
from benchmarks.results import Rows, write
from rollout import SamplingConfig, make_engine
from rollout.context import Context, ContextCache, PromptCacheConfig
from rollout.context.cache import LayerEntries
from rollout.context.compact import Stages, Studied, study
from rollout.hf import EngineReader

HIDDEN, INTERMEDIATE, Q_HEADS, KV_HEADS, DIM, LAYERS = 896, 4864, 14, 2, 64, 24
RATIO, CHUNK = 0.05, 4096
QUERIES = {"attention": 2048, "omp": 512}  # for each kv head, few enough for a CPU; the default is 50,000
# The manufacturer's TFLOP/s and TB/s, and the share of them that we assume.
H200 = {"bf16": (989, 0.4), "fp64": (67, 0.5), "memory": (4.8, 0.6)}

LAUNCHES, LAUNCH = 15, 10e-6  # sequential kernels in a step of the pursuit, and the seconds of each kernel


def printed(title: str, rows: Rows) -> None:
    show(title, [{k: f"{v:.3g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows], len(rows[0]))


def configured(select: str, ratio: float = RATIO) -> PromptCacheConfig:
    return PromptCacheConfig(ratio=ratio, select=select, chunk=CHUNK, most_queries=QUERIES[select])


def stage_row(engine: Any, tokens: int) -> dict[str, Any]:
    text = torch.randint(engine.model.config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    reads: list[float] = []

    class Timed(EngineReader):
        def read(self, texts: Sequence[Sequence[int]], cache: ContextCache) -> None:
            start = time.process_time()
            super().read(texts, cache)
            reads.append(time.process_time() - start)

    studied = study(text, configured("attention"), Timed(engine, [], SamplingConfig(1)), lambda stage: None)
    stages = dict(zip(("prefill", "queries"), reads, strict=True))
    for select, count in QUERIES.items():
        fewer = Studied(studied.whole, [q[:, :, :count] for q in studied.queries], studied.scaling, Stages())
        stages[select] = seconds(lambda fewer=fewer, select=select: fewer.compacted(configured(select)), 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"tokens": tokens, **stages, "peak GiB": peak}


def made_up(tokens: int) -> Studied:
    """Return random keys in clusters, as in a text, and queries near the same clusters."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(KV_HEADS, 64, DIM, generator=generator)

    def near(count: int) -> torch.Tensor:
        chosen = centres[:, torch.randint(64, (count,), generator=generator)]
        return (chosen + 0.5 * torch.randn(chosen.shape, generator=generator))[None]

    keys, queries = near(tokens), near(max(QUERIES.values()))
    values = torch.randn(keys.shape, generator=generator)
    positions = torch.arange(tokens).expand(1, KV_HEADS, -1)
    entries = LayerEntries(keys, values, torch.zeros(1, KV_HEADS, tokens), positions)
    return Studied(Context(list(range(tokens)), [entries], False), [queries], DIM**-0.5, Stages())


def compaction_row(select: str, tokens: int, ratio: float, runs: int) -> dict[str, Any]:
    studied, config = made_up(tokens), configured(select, ratio)
    studied.queries = [q[:, :, : QUERIES[select]] for q in studied.queries]
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
    seen = {"prefill": tokens**2 / 2, "queries (repeat)": 3 * tokens**2 / 2}  # pairs of tokens
    rows = []
    for stage, pairs in seen.items():
        per_head = LAYERS * Q_HEADS * pairs
        # The mask is built, repeated for the heads of a group, and read: 8 bytes for each pair and query head.
        rows.append(costed(stage, "bf16", 2 * weights * tokens + 4 * DIM * per_head, 8 * per_head))
    parts = math.ceil(tokens / CHUNK)
    part = tokens / parts
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
    parser.add_argument("--sizes", type=int, nargs="+", default=[8192, 16384, 32768], help="tokens of the contexts")
    parser.add_argument("--runs", type=int, default=2, help="runs of each compaction of random keys")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/context_stages.json"))
    options = parser.parse_args()

    alone = [compaction_row("attention", 2**k, RATIO, options.runs) for k in (13, 14, 15, 16)]
    alone += [compaction_row("attention", 2**14, ratio, options.runs) for ratio in (0.01, 0.02, 0.1, 0.2)]
    alone += [compaction_row("omp", 2**k, RATIO, options.runs) for k in (12, 13, 14)]
    alone += [compaction_row("omp", 2**13, ratio, options.runs) for ratio in (0.02, 0.1)]
    fits = {select: exponents([row for row in alone if row["select"] == select]) for select in QUERIES}
    printed(f"a compaction of made-up keys, {QUERIES} queries of a kv head; fits {fits}", alone)

    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=1024,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=1,
        num_attention_heads=Q_HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=2**17,
        initializer_range=0.05,  # logits with a deviation of about 2
    )
    engine = make_engine("hf", model=Qwen2ForCausalLM(shape).eval(), policy="full")
    stages = [stage_row(engine, tokens) for tokens in options.sizes]
    printed("one layer of Qwen2.5-0.5B's shape, CPU seconds", stages)

    counted = arithmetic(60_000, 50_000)
    printed(f"an H200 by arithmetic, {LAYERS} layers, 60,000 tokens, 50,000 queries of a kv head: {H200}", counted)
    write(options.out, stages=stages, compaction=alone, exponents=fits, arithmetic=counted, assumed=H200)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main()
