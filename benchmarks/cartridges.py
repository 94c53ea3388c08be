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
from rollout.context import Context, ContextCache
from rollout.context.cache import LayerEntries
from sparse_rl.attention.interface import NO_MASK
from sparse_rl.methods.eviction.cache import at_slots

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


class Prefix:
    """The entries of a context, all trained except the first `fixed`. Biases are trained only if they were fitted.

    of_layer : for each layer, the entries after `fixed`: keys, values [1, Hkv, N - fixed, D], bias [1, Hkv, N - fixed]
    """

    def __init__(self, start: Context, fixed: int) -> None:
        self.start, self.fixed = start, fixed
        self.of_layer = [
            [x[:, :, fixed:].clone().requires_grad_(x is not layer.bias or start.fitted) for x in parts(layer)]
            for layer in start.layers
        ]

    def parameters(self) -> list[torch.Tensor]:
        return [x for layer in self.of_layer for x in layer if x.requires_grad]

    def context(self) -> Context:
        """Return the current context, with its entries in the autograd graph."""
        layers = []
        for layer, trained in zip(self.start.layers, self.of_layer, strict=True):
            now = [torch.cat([x[:, :, : self.fixed], y], dim=2) for x, y in zip(parts(layer), trained, strict=True)]
            layers.append(LayerEntries(*now, layer.positions))
        return Context(self.start.tokens, layers, self.start.fitted)


def parts(layer: LayerEntries) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return layer.keys, layer.values, layer.bias


def beginning(whole: Context, kept: int, first: int, last: int) -> Context:
    """Return the fixed entries (`first` at the start, `last` at the end) and then the first `kept` other entries."""
    count = len(whole.tokens)
    stays = torch.tensor([*range(first), *range(count - last, count), *range(first, first + kept)])
    layers = []
    for layer in whole.layers:
        index = stays.expand(*layer.keys.shape[:2], -1)
        bias, positions = layer.bias.gather(2, index), layer.positions.gather(2, index)
        layers.append(LayerEntries(at_slots(layer.keys, index), at_slots(layer.values, index), bias, positions))
    return Context(whole.tokens, layers, False)


def logprobs(model: Any, context: Context, texts: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of the next token at each token of texts that follow a context, float32 [B, S, V]."""
    cache = ContextCache(context)
    cache.begin_prefill([texts.shape[1]] * len(texts), texts.device)
    places = torch.arange(texts.shape[1])[None] + cache.past
    out = model(input_ids=texts, position_ids=places, attention_mask=NO_MASK, kv_view=cache, use_cache=False)
    return out.logits.log_softmax(-1)


def divergence(full: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return KL(full || own) per token, for log-probs [B, S, V]."""
    return (full.exp() * (full - own)).sum(-1).mean()


def train(
    model: Any, prefix: Prefix, texts: torch.Tensor, full: torch.Tensor, rate: float, steps: Sequence[int], batch: int
) -> Iterator[tuple[int, float]]:
    """Train the prefix with Adam. Yield (step, CPU seconds so far) at each step in `steps`.

    texts : int64 [n, S]; a step takes `batch` of them
    full : log-probs after the whole context, [n, S, V]
    """
    generator, order = torch.Generator().manual_seed(0), torch.zeros(0, dtype=torch.long)
    adam, seconds = torch.optim.Adam(prefix.parameters(), lr=rate), 0.0
    for step in range(max(steps) + 1):
        if step:
            start = time.process_time()
            if len(order) < batch:
                order = torch.randperm(len(texts), generator=generator)
            rows, order = order[:batch], order[batch:]
            adam.zero_grad()
            divergence(full[rows], logprobs(model, prefix.context(), texts[rows])).backward()
            adam.step()
            seconds += time.process_time() - start
        if step in steps:
            yield step, seconds


class Trial:
    """One context, its texts of self-study, and its compaction by each method. Times are CPU seconds."""

    def __init__(self, judge: Judge, number: int, seed: int) -> None:
        self.judge, self.number, self.tokens = judge, number, judge.contexts[number]
        start = time.process_time()
        self.whole = judge.engine.study(self.tokens, configured(KEPT[0], {"queries": ["context"]})).whole
        sampling = SamplingConfig(BEHIND, n=TEXTS, seed=seed, ignore_eos=True)
        self.texts = torch.tensor([r.completion_ids for r in judge.engine.generate([self.tokens], sampling)])
        with torch.no_grad():
            self.full = logprobs(judge.model, self.whole, self.texts)
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
        prefix = Prefix(start, FIRST + LAST)
        for step, spent in train(self.judge.model, prefix, self.texts, self.full, rate, steps, BATCH):
            with torch.no_grad():
                loss = self.judge.loss(self.number, prefix.context())
            yield step, loss, seconds + self.seconds + spent

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
