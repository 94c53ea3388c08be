"""The gap between sampler and replay, by dtype and policy, on two trained models: the source of BOUNDS in
rollout/verify.py.

    OMP_NUM_THREADS=1 python benchmarks/gap.py [--stories DIR]

As a control, the recorded evictions are also replayed one position later and earlier; both gaps must exceed the bound.
Writes benchmarks/results/gap.json, with the largest and the mean gap of each row, in nats.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch

from benchmarks.results import write
from rollout import SamplingConfig, make_engine
from sparse_rl.attention import compute_exactly, replay_logprobs
from sparse_rl.models.load import load_model, load_tokenizer
from sparse_rl.trace import NEVER, EvictionTrace

ROOT = Path(__file__).parents[1]
BUDGET = {"budget": 40}
SCORED = {**BUDGET, "window": 8, "period": 8}
CACHES: list[dict[str, Any]] = [
    {"policy": "full"},
    *({"policy": name, **BUDGET} for name in ("streaming", "h2o", "tova")),
    *({"policy": name, **SCORED} for name in ("snapkv", "gkv", "rkv", "cake")),
    {"policy": "am", **BUDGET, "window": 4},
    {"policy": "clustered", "page": 4, "window": 8, "sinks": 1, "open_pages": 2},
]
DTYPES = [("float32", True), ("float32", False), ("float16", True), ("bfloat16", True)]  # dtype, `rollout.exact`


def main() -> None:
    parser = argparse.ArgumentParser(description="The gap between sampler and replay, by dtype and policy.")
    parser.add_argument("--stories", metavar="DIR", help="a second model, stories260K, as a Hugging Face directory")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gap.json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in filter(None, (str(ROOT / "recipes/quickstart/model"), options.stories)):
        for dtype, exact in DTYPES:
            rows += measure(model, dtype, exact)
    write(options.out, rows=rows)


def measure(path: str, dtype: str, exact: bool) -> list[dict[str, Any]]:
    """Return a row for each cache, measured on 64 problems of the quickstart or on 30 stories of 200 tokens."""
    compute_exactly(exact)
    model, quickstart = load_model(path, dtype).eval(), path.endswith("quickstart/model")
    if quickstart:
        prompts = load_tokenizer(path)(["Qa1b4c0d2e0f3g3h3?", "Qa0b3c3d1e4f2g0h1?"])["input_ids"]
        sampling = SamplingConfig(152, n=32, seed=0)
    else:
        prompts, sampling = [[1], [1, 403, 407], [1, 261, 410, 400]], SamplingConfig(200, n=10, seed=0, ignore_eos=True)
    rows = []
    for cache in CACHES:
        rollouts = make_engine("hf", model=model, policy=cache).generate(prompts, sampling)
        sampled = torch.tensor([one for r in rollouts for one in r.model_logprobs])

        def gap(by: int, rollouts: list[Any] = rollouts, sampled: torch.Tensor = sampled) -> dict[str, float]:
            moved = [torch.where(r.trace.evict_at < NEVER, r.trace.evict_at + by, NEVER).int() for r in rollouts]
            traces = [EvictionTrace(e, r.trace.further, validate=False) for e, r in zip(moved, rollouts, strict=True)]
            changed = [replace(r, trace=trace) for r, trace in zip(rollouts, traces, strict=True)]
            with torch.no_grad():
                gaps = (torch.cat(replay_logprobs(model, changed)) - sampled).abs().double()
            return {"largest": float(gaps.max()), "mean": float(gaps.mean())}

        row = {"model": Path(path).parent.name if quickstart else Path(path).name, "dtype": dtype, "exact": exact}
        row |= {"cache": cache, "tokens": len(sampled), **gap(0)}
        if cache["policy"] in ("streaming", "gkv"):
            row |= {"later": gap(1), "earlier": gap(-1)}
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
