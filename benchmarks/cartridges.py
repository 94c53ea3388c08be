"""Cartridges (arXiv 2506.06266) compared with Attention Matching.

A cartridge is a compacted context that gradient descent trains. It has as many entries per kv head as a compaction
leaves, and starts as the first tokens of the context or as the result of Attention Matching. Self-study samples texts
after the context. On these texts, Adam minimises KL(full cache || cartridge) per token, through the model's forward
pass. Other texts are judged. Fixed entries, contexts and judged texts are as in benchmarks/one_shot.py.

The learning rate of each start is the best of RATES on other contexts. Seconds are CPU seconds for one context.

    OMP_NUM_THREADS=1 python benchmarks/cartridges.py MODEL     # writes benchmarks/results/cartridges.json
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.one_shot import BEHIND, BOTH, CONTEXT, FIRST, LAST, Judge, configured
from benchmarks.results import write
from rollout import SamplingConfig, make_engine
from rollout.context import Context
from rollout.context.cartridge import Cartridge, beginning, train
from rollout.context.config import CartridgeConfig
from rollout.context.conversations import Conversation
from rollout.context.reader import EngineReader

KEPT = (12, 24, 48)
STEPS = (0, 10, 30, 100, 300)
TEXTS, BATCH = 128, 4  # texts of self-study that are sampled after each context; texts in a step
RATES = (0.01, 0.03, 0.1, 0.3)
TRIED_KEPT, TRIED_CONTEXTS, TRIED_STEPS = 24, 3, 300  # how a start's learning rate is chosen
MATCHING: dict[str, dict[str, Any]] = {
    "am, repeat": {"queries": ["repeat"]},
    "am, self-study and repeat": {"queries": BOTH},
    "am with omp, self-study and repeat": {"queries": BOTH, "select": "omp"},
}
AM = "am, self-study and repeat"  # the row of MATCHING from which a cartridge starts


class Trial:
    """One context, its texts of self-study, and its compaction by each method. Times are CPU seconds."""

    def __init__(self, judge: Judge, number: int, seed: int) -> None:
        self.judge, self.number, self.tokens = judge, number, judge.contexts[number]
        start = time.process_time()
        self.whole = judge.engine.study(self.tokens, configured(KEPT[0], {"queries": ["context"]})).whole
        sampling = SamplingConfig(BEHIND, n=TEXTS, seed=seed, ignore_eos=True)
        answers = judge.engine.generate([self.tokens], sampling)
        self.texts = [Conversation(r.completion_ids[:1], r.completion_ids[1:]) for r in answers]
        self.reader = EngineReader(judge.engine, judge.prompts)
        self.seconds = time.process_time() - start

    def matched(self, name: str, kept: int) -> tuple[Context, float]:
        """Return the context compacted by a row of MATCHING, and the seconds of the compaction."""
        start = time.process_time()
        config = configured(kept, MATCHING[name])
        return self.judge.engine.compact(self.tokens, config, self.judge.prompts), time.process_time() - start

    def trained(
        self, start: Context, seconds: float, rate: float, steps: Sequence[int]
    ) -> Iterator[tuple[int, float, float]]:
        """Train a cartridge from `start`, which took `seconds`. Yield (step, KL, seconds including the start)."""
        cartridge, settings = Cartridge(start, FIRST + LAST), CartridgeConfig(steps=max(steps), batch=BATCH, rate=rate)
        began = time.process_time()
        for step in train(cartridge, self.whole, self.texts, settings, self.reader):
            if step in steps:
                spent = time.process_time() - began
                with torch.no_grad():
                    loss = self.judge.loss(self.number, cartridge.context())
                yield step, loss, seconds + self.seconds + spent
                began = time.process_time() - spent

    def starts(self, kept: int, am: tuple[Context, float]) -> dict[str, tuple[Context, float]]:
        return {"from the first entries": (beginning(self.whole, kept, FIRST, LAST), 0.0), "from am": am}


Found = dict[tuple[str, int, int], list[tuple[float, float]]]  # (method, steps, kept) -> (KL, seconds) of each context


def tried(judge: Judge, seed: int) -> list[dict[str, Any]]:
    """Return the mean KL of each start at each learning rate."""
    trials = [Trial(judge, number, seed + number) for number in range(len(judge.contexts))]
    begun = [trial.starts(TRIED_KEPT, trial.matched(AM, TRIED_KEPT)) for trial in trials]
    rows = []
    for name in begun[0]:
        for rate in RATES:
            losses = [
                list(trial.trained(*starts[name], rate, [TRIED_STEPS]))[-1][1]
                for trial, starts in zip(trials, begun, strict=True)
            ]
            rows.append({"start": name, "rate": rate, "kl": sum(losses) / len(losses)})
            print(rows[-1], flush=True)
    return rows


def measure(trial: Trial, rates: dict[str, float], found: Found) -> None:
    for kept in KEPT:
        matched = {name: trial.matched(name, kept) for name in MATCHING}
        for name, (context, seconds) in matched.items():
            found.setdefault((name, 0, kept), []).append((trial.judge.loss(trial.number, context), seconds))
        for name, start in trial.starts(kept, matched[AM]).items():
            for steps, loss, seconds in trial.trained(*start, rates[name], STEPS):
                found.setdefault((f"cartridge, {name}", steps, kept), []).append((loss, seconds))


def summary(found: Found) -> list[dict[str, Any]]:
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for (method, steps, kept), values in found.items():
        losses, seconds = torch.tensor(values, dtype=torch.float64).T
        row = rows.setdefault((method, steps), {"method": method, "steps": steps})
        error = float(losses.std() / len(losses) ** 0.5)
        row[str(kept)] = {"kl": float(losses.mean()), "error": error, "seconds": float(seconds.mean())}
    return list(rows.values())


def show(rows: list[dict[str, Any]], contexts: int) -> None:
    table = Table(
        title=f"KL to the full cache and CPU seconds; entries left of {CONTEXT - FIRST - LAST}; {contexts} contexts"
    )
    for name in ("method", "steps", *map(str, KEPT)):
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in rows:
        cells = (row[str(kept)] for kept in KEPT)
        texts = (f"{cell['kl']:.4f} ± {cell['error']:.4f}, {cell['seconds']:.2f} s" for cell in cells)
        table.add_row(row["method"], str(row["steps"]), *texts)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="the directory of a small model that tells stories")
    parser.add_argument("--contexts", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cartridges.json"))
    options = parser.parse_args()
    from transformers import AutoTokenizer

    engine = make_engine("hf", model=options.model, policy="full")
    engine.model.requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    others = tried(Judge(engine, tokenizer, TRIED_CONTEXTS, options.seed + 100), options.seed + 2000)
    rates = {row["start"]: row["rate"] for row in sorted(others, key=lambda row: -row["kl"])}  # the lowest KL is last
    judge, losses = Judge(engine, tokenizer, options.contexts, options.seed), Found()
    for number in range(options.contexts):  # the results so far are written after each context
        measure(Trial(judge, number, options.seed + 1000 + number), rates, losses)
        if number:
            rows = summary(losses)
            show(rows, number + 1)
            write(options.out, contexts=number + 1, seed=options.seed, tried=others, rates=rates, rows=rows)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main()
