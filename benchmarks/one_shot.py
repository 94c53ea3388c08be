"""One-shot compaction of a context: KL to the full cache on continuations, by method and by the number of kept entries.

A model samples stories. The first CONTEXT tokens of a story are a context, in which the first token and the last four
are always kept. The rest of a story is judged after each compacted context: KL(full cache || compacted) per token, in
nats. If a method always keeps more tokens at the end, they count as kept entries, and the method has no result at small
sizes. Head budgets come from sensitivity curves over other contexts (rollout/context/budgets.py).

    OMP_NUM_THREADS=1 python benchmarks/one_shot.py MODEL     # writes benchmarks/results/one_shot.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.results import Rows, over_seeds, write
from rollout import SamplingConfig, make_engine
from rollout.context import Context, ContextCache, PromptCacheConfig, budgets
from rollout.context.prompts import ContextPrompts
from sparse_rl.attention.interface import NO_MASK

CONTEXT, BEHIND, FIRST, LAST = 192, 96, 1, 4
KEPT = (6, 12, 24, 48, 96)
BEGINNINGS = ("He", "She", "They", "One day")  # from which self-study continues
BOTH = ["self_study", "repeat"]
SNAPKV = {"policy": "evict", "aggregate": "mean", "queries": ["window"], "window": 32, "pool": 5}
METHODS: dict[str, dict[str, Any]] = {
    "no context": {"policy": "none"},
    "evict, mean of context (H2O+)": {"policy": "evict", "aggregate": "mean", "queries": ["context"]},
    "evict, max of repeat (KVzip-like)": {"policy": "evict", "aggregate": "max", "queries": ["repeat"]},
    "evict, SnapKV": SNAPKV,
    "evict, SnapKV whose window stays": {**SNAPKV, "last": 32},
    "evict, PyramidKV": {**SNAPKV, "heads": "pyramid"},
    "evict, PyramidKV whose window stays": {**SNAPKV, "heads": "pyramid", "last": 32},
    "evict, mean of self-study and repeat": {"policy": "evict", "aggregate": "mean", "queries": BOTH},
    "evict, max of self-study and repeat": {"policy": "evict", "aggregate": "max", "queries": BOTH},
    "evict, rms of self-study and repeat": {"policy": "evict", "queries": BOTH},
    "am, attention": {"queries": BOTH},
    "am, attention, two parts": {"queries": BOTH, "chunk": 94},
    "am, attention, four parts": {"queries": BOTH, "chunk": 47},
    "am, attention, two parts, read alone": {"queries": BOTH, "chunk": 94, "chunking": "text"},
    "am, attention, four parts, read alone": {"queries": BOTH, "chunk": 47, "chunking": "text"},
    "am, attention, on-policy": {"queries": BOTH, "on_policy": True},
    "am, attention, repeat": {"queries": ["repeat"]},
    "am, attention, context": {"queries": ["context"]},
    "am, attention, random": {"queries": ["random"]},
    "am, attention, the paper's solvers": {"queries": BOTH, "fit": "paper"},
    "am, omp": {"queries": BOTH, "select": "omp"},
    "am, omp, repeat": {"queries": ["repeat"], "select": "omp"},
    "am, omp, on-policy": {"queries": BOTH, "select": "omp", "on_policy": True},
    "am, omp_fast": {"queries": BOTH, "select": "omp_fast"},
    "am, omp_fast, on-policy": {"queries": BOTH, "select": "omp_fast", "on_policy": True},
    "am, omp, the paper's solvers": {"queries": BOTH, "select": "omp", "fit": "paper"},
}

BUDGETED = {
    "am, attention, head budgets": {"queries": BOTH},
    "evict, rms of self-study and repeat, head budgets": {"policy": "evict", "queries": BOTH},
}
METHODS |= BUDGETED


class Judge:
    """Contexts of a model and their continuations, on which compactions are judged by KL."""

    def __init__(self, engine: Any, tokenizer: Any, contexts: int, seed: int) -> None:
        self.engine, self.model, self.tokenizer = engine, engine.model, tokenizer
        sampling = SamplingConfig(CONTEXT + BEHIND - 1, n=contexts, seed=seed, ignore_eos=True)
        texts = [[*r.prompt_ids, *r.completion_ids] for r in engine.generate([[tokenizer.bos_token_id]], sampling)]
        self.contexts, self.behind = [t[:CONTEXT] for t in texts], [t[CONTEXT:] for t in texts]
        self.prompts = ContextPrompts(
            requests=[tokenizer.encode(text, add_special_tokens=False) for text in BEGINNINGS]
        )
        self.full = [self.logprobs(None, [*c, *b])[CONTEXT:] for c, b in zip(self.contexts, self.behind, strict=True)]

    @torch.no_grad()
    def logprobs(self, context: Context | None, tokens: list[int]) -> torch.Tensor:
        """Return the log-probs of the next token after each token, float64 [tokens, vocabulary]."""
        cache = ContextCache(context)
        cache.begin_prefill([len(tokens)], torch.device("cpu"))
        places = torch.arange(len(tokens))[None] + cache.past
        out = self.model(
            input_ids=torch.tensor([tokens]),
            position_ids=places,
            attention_mask=NO_MASK,
            kv_view=cache,
            use_cache=False,
        )
        return out.logits[0].double().log_softmax(-1)

    def loss(self, number: int, context: Context) -> float:
        """Return KL(full || compacted) per token of the continuation of one context."""
        own, full = self.logprobs(context, self.behind[number]), self.full[number]
        return float((full.exp() * (full - own)).sum(-1).mean())

    def kl(self, kept: int, settings: dict[str, Any], shares: torch.Tensor | None = None) -> list[float]:
        """Return the KL of each context. shares : each head's share of the entries; None means equal shares"""
        config = configured(kept, settings)
        counts = None if shares is None else budgets.counts(shares, config.ratio, CONTEXT, config)
        contexts = (self.engine.compact(tokens, config, self.prompts, counts) for tokens in self.contexts)
        return [self.loss(number, context) for number, context in enumerate(contexts)]

    def shares(self, settings: dict[str, Any], ratio: float) -> torch.Tensor:
        """Return each head's share of the entries at a ratio, from sensitivity curves over these contexts."""
        config = configured(24, settings)
        studied = [self.engine.study(tokens, config, self.prompts) for tokens in self.contexts]
        curves = budgets.sensitivity(studied, config, self.loss)
        return budgets.allocate(curves, budgets.RATIOS, ratio)


def configured(kept: int, settings: dict[str, Any]) -> PromptCacheConfig:
    settings = {"last": LAST, **settings}
    ratio = chosen(kept, settings) / (CONTEXT - FIRST - settings["last"])
    return PromptCacheConfig(ratio=ratio, first=FIRST, study_samples=4, study_tokens=BEHIND, **settings)


def chosen(kept: int, settings: dict[str, Any]) -> int:
    """Return how many of the `kept` entries a method chooses. The others are additional tokens at the end."""
    return kept - (settings.get("last", LAST) - LAST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="the directory of a small model that tells stories")
    parser.add_argument("--contexts", type=int, default=16)
    parser.add_argument("--calibration", type=int, default=10, help="number of contexts for head budgets")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", default="", help="measure only rows whose name has this text; the others stay in the file"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/one_shot.json"))
    options = parser.parse_args()
    from transformers import AutoTokenizer

    engine = make_engine("hf", model=options.model, policy="full")
    judge = Judge(engine, AutoTokenizer.from_pretrained(options.model), options.contexts, options.seed)
    rows = []
    for name, settings in METHODS.items():
        if options.only not in name:
            continue
        start = time.process_time()
        shares = None
        if name in BUDGETED:
            calibration = Judge(engine, judge.tokenizer, options.calibration, options.seed + 100)
            shares = calibration.shares(settings, budgets.BASE)
        kls = {str(k): judge.kl(k, settings, shares) for k in KEPT if chosen(k, settings) > 0}
        rows.append({"method": name, "kl": kls, "seconds": time.process_time() - start})
        print(f"{name}: {rows[-1]['seconds']:.0f} s", flush=True)
    stored = json.loads(options.out.read_text())["rows"] if options.only and options.out.is_file() else []
    rows = [row for row in stored if row["method"] not in {new["method"] for new in rows}] + rows
    rows.sort(key=lambda row: list(METHODS).index(row["method"]))
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in tables(rows):
        console.print(table)
    write(options.out, contexts=options.contexts, seed=options.seed, rows=rows)


def tables(rows: Rows) -> list[Table]:
    """Return a table of each method's KL, and one that compares fitted methods with the best eviction per context."""
    printed = Table(title=f"KL to the full cache, ± standard error; entries left of {CONTEXT - FIRST - LAST}")
    against = Table(title="KL / KL of the best eviction without head budgets, and the difference ± standard error")
    for table in (printed, against):
        for name in ("method", *map(str, KEPT), "seconds"):
            table.add_column(name, justify="left" if name == "method" else "right")
    evictions = [row for row in rows if row["method"].startswith("evict") and row["method"] not in BUDGETED]
    for row in rows:
        cells = [
            "{:.4f} ± {:.4f}".format(*over_seeds(row["kl"][k])) if (k := str(n)) in row["kl"] else "" for n in KEPT
        ]
        printed.add_row(row["method"], *cells, f"{row['seconds']:.0f}")
        if row["method"].startswith("am") and evictions:
            cells = []
            for size in map(str, KEPT):
                best = min((e["kl"][size] for e in evictions if size in e["kl"]), key=sum)
                differences = [own - theirs for own, theirs in zip(row["kl"][size], best, strict=True)]
                cells.append(
                    "{:.2f}, {:+.4f} ± {:.4f}".format(sum(row["kl"][size]) / sum(best), *over_seeds(differences))
                )
            against.add_row(row["method"], *cells, "")
    return [printed, against]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main()
