"""The cost of eviction in the hf engine: tokens/s with a full cache and under eviction; share of compactions.

A decode step reads all held keys and values, so it reads less under eviction. But every `period` tokens, a compaction
computes the policy's scores and gathers the kept entries. Runs are interleaved and medians are reported, because the
machine may be noisy: compare the ratios.

    python benchmarks/engine.py                 # writes benchmarks/results/engine.json
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.results import write
from rollout import SamplingConfig
from rollout.hf import HFEngine
from sparse_rl.methods.eviction.cache import EvictingCache
from sparse_rl.policies.registry import make_policy

BATCH, PROMPT, GENERATED = 8, 16, 2048
SHAPE = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
GKV = {"policy": "gkv", "budget": 512, "window": 16, "period": 128}
CASES = {
    "full": {"policy": "full"},
    "gkv": {**GKV, "redundancy": False},
    "gkv with redundancy": GKV,
    "am": {"policy": "am", "budget": 512, "window": 16, "period": 128},
    "streaming": {"policy": "streaming", "budget": 512, "period": 128},
}


class TimedCache(EvictingCache):
    """Counts the seconds spent in compactions."""

    seconds = 0.0

    def _compact(self, *args, **kwargs):
        start = now()
        super()._compact(*args, **kwargs)
        TimedCache.seconds += now() - start


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=GENERATED)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/engine.json"))
    options = parser.parse_args()
    import rollout.hf

    rollout.hf.make_cache = TimedCache
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=512, hidden_size=512, intermediate_size=1024, **SHAPE)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Qwen3ForCausalLM(config).to(device).eval()
    prompts = [torch.randint(512, (PROMPT,)).tolist() for _ in range(BATCH)]
    sampling = SamplingConfig(options.tokens, seed=0, ignore_eos=True)
    for policy in CASES.values():  # warm up
        HFEngine(model, make_policy(policy)).generate(prompts, dataclasses.replace(sampling, max_tokens=32))
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    for _ in range(options.runs):
        for name, policy in CASES.items():
            engine = HFEngine(model, make_policy(policy))
            TimedCache.seconds, start = 0.0, now()
            engine.generate(prompts, sampling)
            seconds = now() - start
            seen[name].append({
                "tokens_per_second": BATCH * options.tokens / seconds,
                "compaction_share": TimedCache.seconds / seconds,
                "peak_cache_bytes": engine.peak_cache_bytes,
            })  # fmt: skip
    rows = []
    for name, runs in seen.items():
        median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        pairs = [
            run["tokens_per_second"] / full["tokens_per_second"] for run, full in zip(runs, seen["full"], strict=True)
        ]
        rows.append({"case": name, **median, "ratio_to_full": statistics.median(pairs), "runs": runs})
    shape = {**SHAPE, "batch": BATCH, "prompt": PROMPT, "generated": options.tokens}
    write(options.out, shape=shape, rows=rows)

    table = Table(title=f"Reference engine, {BATCH} x {options.tokens} tokens ({device})", title_justify="left")
    for column in ("cache", "tokens/s", "ratio to full", "compaction", "peak cache"):
        table.add_column(column, justify="left" if column == "cache" else "right")
    for row in rows:
        table.add_row(
            row["case"], f"{row['tokens_per_second']:.0f}", f"{row['ratio_to_full']:.2f}",
            f"{row['compaction_share']:.2%}", f"{row['peak_cache_bytes'] / 2**20:.1f} MiB",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
