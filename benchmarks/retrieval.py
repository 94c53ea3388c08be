"""Facts looked up in a compacted document: accuracy by method and by ratio, over some models.

Each model was trained by retrieval/short and retrieval/sft, with its own seed. Held-out documents have 20 facts, each
stated 17 times. Each question is asked alone after the compacted document, and its most likely next token is judged. In
self-study the model asks and answers its own questions after "asked:". The first token is always kept. Head budgets
come from sensitivity curves over documents of another split, compacted to 1/10 (rollout/context/budgets.py).

    OMP_NUM_THREADS=1 python benchmarks/retrieval.py runs/retrieval/sft ...   # writes benchmarks/results/retrieval.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.results import write
from rollout import make_engine
from rollout.context import Context, PromptCacheConfig, budgets
from rollout.context.compact import Studied
from rollout.context.prompts import ContextPrompts
from sparse_rl.analysis.drawing import COLOURS, MARKERS, label_ends, method_colours, new_figure, save_figure
from sparse_rl.data.retrieval import ASKED, Retrieval, rows
from sparse_rl.models.directory import model_directory
from sparse_rl.models.load import load_tokenizer

TIMES = (2, 5, 10, 20, 50)  # factors by which the cache is smaller than the document
QUERIES = 1024  # for each kv head, drawn from about 2,400
BOTH = ["self_study", "repeat"]
SNAPKV = {"policy": "evict", "aggregate": "mean", "queries": ["window"], "window": 32, "pool": 5}
METHODS: dict[str, dict[str, Any]] = {
    "full cache": {"policy": "full"},
    "no document": {"policy": "none"},
    "evict, mean of the document (H2O+)": {"policy": "evict", "aggregate": "mean", "queries": ["context"]},
    "evict, SnapKV": SNAPKV,
    "evict, PyramidKV": {**SNAPKV, "layers": "pyramid"},
    "evict, max of repeat (KVzip-like)": {"policy": "evict", "aggregate": "max", "queries": ["repeat"]},
    "evict, mean of self-study and repeat": {"policy": "evict", "aggregate": "mean", "queries": BOTH},
    "evict, max of self-study and repeat": {"policy": "evict", "aggregate": "max", "queries": BOTH},
    "evict, rms of self-study and repeat": {"policy": "evict", "queries": BOTH},
    "evict, max of self-study": {"policy": "evict", "aggregate": "max", "queries": ["self_study"]},
    "evict, rms of self-study": {"policy": "evict", "queries": ["self_study"]},
    "am, attention": {"queries": BOTH},
    "am, omp": {"queries": BOTH, "select": "omp"},
    "am, omp, self-study": {"queries": ["self_study"], "select": "omp"},
}
BUDGETED = {
    f"{name}, head budgets": METHODS[name]
    for name in ("evict, rms of self-study and repeat", "evict, max of self-study", "am, attention", "am, omp")
}
METHODS |= BUDGETED
DRAWN = {  # a row -> its name in the figure
    "am, omp, head budgets": "am, omp, head budgets",
    "am, omp": "am, omp",
    "am, attention": "am, attention",
    "evict, PyramidKV": "evict, PyramidKV",
    "evict, max of self-study": "evict, max of self-study",
    "evict, max of repeat (KVzip-like)": "evict, KVzip-like",
    "evict, mean of the document (H2O+)": "evict, H2O+",
}


class Judge:
    """Judges a model's answers to all questions about some documents, which are compacted first."""

    def __init__(self, engine: Any, tokenizer: Any, task: Retrieval, documents: int, split: str) -> None:
        self.engine = engine
        examples = rows(split, documents, 0, True, task)
        self.documents, self.questions, self.answers = [], [], []
        for row in examples:
            document, first = row["prompt"].split(f" {ASKED} ")
            asked = tokenizer.encode(first + row["completion"])
            self.documents.append(tokenizer.encode(document))
            self.questions.append(torch.tensor(asked[::2]))
            self.answers.append(torch.tensor(asked[1::2]))
        self.begins = tokenizer.encode(ASKED)
        self.studies: dict[tuple[str, ...], list[Studied]] = {}

    def studied(self, config: PromptCacheConfig) -> list[Studied]:
        """Return the documents with a method's reference queries. Each set of queries is made only once."""
        key = tuple(config.queries) if config.chooses else ()
        if key not in self.studies:
            self.studies[key] = [
                self.engine.study(tokens, config, ContextPrompts(requests=[self.begins])) for tokens in self.documents
            ]
        return self.studies[key]

    @torch.no_grad()
    def logprobs(self, number: int, context: Context) -> torch.Tensor:
        """Return the log-probs of the next token after each question about a document, [questions, vocabulary]."""
        asked = self.questions[number]
        tokens = torch.tensor(self.begins).expand(len(asked), -1)
        tokens = torch.cat([tokens, asked[:, None]], dim=1)
        prefilled = self.engine.prefill(tokens.tolist(), context)
        return self.engine.model.get_output_embeddings()(prefilled.hidden).log_softmax(-1)

    def loss(self, number: int, context: Context) -> float:
        """Return the mean negative log-prob of the right answers, in nats."""
        answers = self.answers[number]
        return -float(self.logprobs(number, context).gather(1, answers[:, None]).mean())

    def accuracy(self, config: PromptCacheConfig, shares: torch.Tensor | None = None) -> float:
        """Return the accuracy over documents and questions. shares : each head's share of the entries; None: equal"""
        right = []
        for number, studied in enumerate(self.studied(config)):
            tokens = studied.length
            counts = None if shares is None else budgets.counts(shares, config.ratio, tokens, config)
            context = studied.compacted(config, counts)
            right.append((self.logprobs(number, context).argmax(-1) == self.answers[number]).double().mean())
        return float(torch.stack(right).mean())

    def shares(self, config: PromptCacheConfig) -> torch.Tensor:
        """Return each head's share of the entries at the configuration's ratio, from these documents."""
        curves = budgets.sensitivity(self.studied(config), config, self.loss, base=config.ratio)
        return budgets.allocate(curves, budgets.RATIOS, config.ratio)


def configured(times: int, settings: dict[str, Any], task: Retrieval) -> PromptCacheConfig:
    """Return the configuration for a cache of 1/`times` of the document. Self-study asks one question per fact."""
    return PromptCacheConfig(
        ratio=1 / times, study_samples=4, study_tokens=2 * task.facts, most_queries=QUERIES, **settings
    )


def judged(model: str, task: Retrieval, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return method -> the accuracy at each ratio. A method that chooses no entries has one accuracy at all ratios."""
    engine = make_engine("hf", model=model_directory(model), policy="full", max_batch=128)
    tokenizer = load_tokenizer(model_directory(model))
    judge = Judge(engine, tokenizer, task, options.documents, "evaluation")
    calibration = Judge(engine, tokenizer, task, options.calibration, "calibration")
    accuracies = {}
    for name, settings in METHODS.items():
        if options.only not in name:
            continue
        start = time.process_time()
        shares = calibration.shares(configured(10, settings, task)) if name in BUDGETED else None
        chooses = configured(10, settings, task).chooses
        times = options.times if chooses else options.times[:1]
        values = [judge.accuracy(configured(ratio, settings, task), shares) for ratio in times]
        accuracies[name] = values if chooses else values * len(options.times)
        texts = " ".join(f"{value:.3f}" for value in accuracies[name])
        print(f"{model}: {name}: {texts}  ({time.process_time() - start:.0f} CPU seconds)", flush=True)
    return accuracies


def show(accuracies: dict[str, list[list[float]]], times: Sequence[int]) -> None:
    """Print the table. accuracies : method -> for each model, the accuracy at each of `times`"""
    table = Table(title="share of questions answered; mean over models (least to most)")
    for name in ("method", *(f"{ratio} times" for ratio in times)):
        table.add_column(name, justify="left" if name == "method" else "right")
    for name, values in accuracies.items():
        columns = zip(*values, strict=True)
        table.add_row(name, *(f"{mean(column):.3f} ({min(column):.2f}-{max(column):.2f})" for column in columns))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def draw(accuracies: dict[str, list[list[float]]], times: Sequence[int], out: Path) -> None:
    """Draw a line for each method of DRAWN, the mean over models, with a band from the worst to the best model."""
    figure, axes = new_figure("Facts looked up behind a compacted document")
    drawn = {label: accuracies[name] for name, label in DRAWN.items() if name in accuracies}
    ends = []
    methods = [label.partition(",")[0] for label in drawn]
    for line, (colour, (label, values)) in enumerate(zip(method_colours(methods), drawn.items(), strict=True)):
        marker = MARKERS[methods[:line].count(methods[line])]
        columns = list(zip(*values, strict=True))
        middle = [mean(column) for column in columns]
        axes.plot(times, middle, color=colour, marker=marker, linestyle="--" if label.startswith("evict") else "-")
        axes.fill_between(times, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.15)
        ends.append((times[-1], middle[-1], label, colour))
    for name, colour in (("full cache", COLOURS["full"]), ("no document", COLOURS["none"])):
        if name in accuracies:
            level = mean(values[0] for values in accuracies[name])
            axes.axhline(level, color=colour, linewidth=1, linestyle=":")
            ends.append((times[-1], level, name, colour))
    axes.set_xscale("log")
    axes.set_xticks(times, [f"{ratio}×" for ratio in times])
    axes.minorticks_off()
    axes.set_ylim(0, 1.02)
    label_ends(axes, ends)
    axes.set_xlabel("how many times smaller than the document the cache is")
    axes.set_ylabel("share of questions answered")
    save_figure(figure, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="runs of retrieval/sft; if empty, only the figure is drawn")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--calibration", type=int, default=2, help="number of documents for head budgets")
    parser.add_argument("--facts", type=int, default=20)
    parser.add_argument("--restated", type=int, default=17)
    parser.add_argument("--filler", type=int, default=Retrieval.filler)
    parser.add_argument("--times", type=int, nargs="+", default=TIMES, help="how many times smaller the cache is")
    parser.add_argument(
        "--only", default="", help="measure only rows whose name has this text; the others stay in the file"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/retrieval.json"))
    parser.add_argument("--figure", type=Path, default=Path("docs/retrieval.png"))
    options = parser.parse_args()
    task = Retrieval(options.facts, options.restated, options.filler)
    judged_models = [judged(model, task, options) for model in options.models]
    stored = json.loads(options.out.read_text()) if options.only or not judged_models else {"accuracies": {}}
    times = options.times if judged_models else stored["times"]
    merged = stored["accuracies"] | {
        name: [one[name] for one in judged_models] for name in (judged_models[0] if judged_models else ())
    }
    accuracies = {name: merged[name] for name in METHODS if name in merged}
    show(accuracies, times)
    if judged_models:
        settings = {"documents": options.documents, "facts": task.facts, "restated": task.restated}
        write(options.out, **settings, filler=task.filler, times=times, accuracies=accuracies)
    draw(accuracies, times, options.figure)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main()
