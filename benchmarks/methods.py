"""Every method of Attention Matching on two tasks: accuracy, log-perplexity of the full cache's answers, and seconds.

Retrieval: models that were trained by retrieval/short and retrieval/sft, each with its own seed, look up facts in
held-out documents (benchmarks/retrieval.py). Stories: a model of stories gets stories that it has sampled, and must
tell the continuation of each story from continuations of three others, by log-prob (as in QuALITY, four options).
Log-perplexity is the negative log-likelihood per token of the answers that the same model samples with a full cache.

Every method has the settings of the paper's main experiments (section 4, appendix B.3): on-policy queries of self-study
and repetition, head budgets for the fitted methods. Seconds are CPU seconds of one thread for one context: reading,
reference queries and compaction. Summaries are left out, because these models follow no instructions.

    OMP_NUM_THREADS=1 python benchmarks/methods.py --stories MODEL
    OMP_NUM_THREADS=1 python benchmarks/methods.py --retrieval runs/retrieval/sft-0 ... --contexts 2 --calibration 1
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
from torch import Tensor

from benchmarks import retrieval
from benchmarks.results import write
from rollout import SamplingConfig, make_engine
from rollout.context import Context, ContextCache, PromptCacheConfig, budgets
from rollout.context.config import CartridgeConfig
from rollout.context.prompts import ContextPrompts
from rollout.context.reader import EngineReader
from sparse_rl.analysis.drawing import MARKERS, label_ends, method_colours, new_figure, save_figure
from sparse_rl.data.retrieval import ASKED, Retrieval
from sparse_rl.models.directory import model_directory
from sparse_rl.models.load import load_tokenizer

RATIOS = {"retrieval": (2, 5, 10, 20, 50), "stories": (2, 5, 10)}  # factors by which the cache is smaller
CALIBRATED = 10  # head budgets are measured at a cache 10 times smaller
TOKENS, ANSWER, ANSWERS, OPTIONS = 240, 24, 8, 4  # of a story; a continuation; for each story; of a question
BOTH: dict[str, Any] = {"queries": ["self_study", "repeat"], "on_policy": True}
QUESTION: dict[str, Any] = {"policy": "evict", "queries": ["question"], "aggregate": "mean", "pool": 7}
QUESTION |= {"pooling": "max"}
METHODS: dict[str, dict[str, Any]] = {
    "full cache": {"policy": "full"},
    "no context": {"policy": "none"},
    "AM-OMP": {**BOTH, "select": "omp", "budgets": "omp"},
    "AM-OMP, equal heads": {**BOTH, "select": "omp"},
    "AM-OMP-fast": {**BOTH, "select": "omp_fast", "budgets": "omp"},
    "AM-OMP-fast, equal heads": {**BOTH, "select": "omp_fast"},
    "AM-HighestAttnKeys": {**BOTH, "budgets": "attention"},
    "AM-HighestAttnKeys, equal heads": {**BOTH},
    "AM-HighestAttnKeys-fast": {"queries": ["repeat"], "budgets": "attention"},
    "H2O+": {"policy": "evict", "queries": ["context"], "aggregate": "mean"},
    "SnapKV": QUESTION,
    "PyramidKV": {**QUESTION, "heads": "pyramid"},
    "KVzip": {"policy": "evict", "queries": ["repeat"], "aggregate": "max", "heads": "global"},
    "KVzip, equal heads": {"policy": "evict", "queries": ["repeat"], "aggregate": "max"},
    "head partition (DuoAttention)": {
        "policy": "evict", "queries": ["context"], "heads": "partition", "budgets": "attention",
    },
    "Cartridges": {"policy": "cartridge", "study_samples": 24, "cartridge": {"steps": 100, "batch": 8}},
}  # fmt: skip
DRAWN = (
    "AM-OMP", "AM-OMP-fast", "AM-HighestAttnKeys", "AM-HighestAttnKeys-fast", "KVzip", "PyramidKV", "SnapKV", "H2O+",
    "Cartridges",
)  # fmt: skip


class RetrievalTask:
    """Documents with facts, and a question about each fact, whose answer is one token."""

    name = "retrieval"

    def __init__(self, engine: Any, tokenizer: Any, documents: int, split: str) -> None:
        shape = Retrieval(20, 17, Retrieval.filler)
        self.judge = retrieval.Judge(engine, tokenizer, shape, documents, split)
        self.contexts, begins = self.judge.documents, tokenizer.encode(ASKED)

        def starters(answer: Sequence[int]) -> list[list[int]]:
            return [[*begins, answer[place]] for place in range(0, min(len(answer), 6), 2)]  # facts are (name, digit)

        self.prompts = ContextPrompts(requests=[begins], questions=begins, starters=starters)
        self.settings: dict[str, Any] = {"study_tokens": 40, "study_samples": 4, "first": 1, "most_queries": 1024}
        whole = (engine.compact(tokens, PromptCacheConfig(policy="full")) for tokens in self.contexts)
        self.references = [self.judge.logprobs(number, context).argmax(-1) for number, context in enumerate(whole)]

    def loss(self, number: int, context: Context) -> float:
        """Return the NLL per token of the full cache's answers after one compacted context."""
        return self.scores(number, context)[1]

    def scores(self, number: int, context: Context) -> tuple[float, float]:
        """Return the accuracy, and the NLL per token of the full cache's answers, after one compacted context."""
        logprobs = self.judge.logprobs(number, context)
        right = (logprobs.argmax(-1) == self.judge.answers[number]).double().mean()
        return float(right), -float(logprobs.gather(1, self.references[number][:, None]).mean())


class StoryTask:
    """Stories that the model has sampled, and continuations of them that it has sampled with the full cache."""

    name = "stories"

    def __init__(self, engine: Any, tokenizer: Any, stories: int, seed: int) -> None:
        self.reader = EngineReader(engine, ContextPrompts())
        sampled_as = SamplingConfig(TOKENS - 1, n=stories, seed=seed, ignore_eos=True)
        texts = engine.generate([[tokenizer.bos_token_id]], sampled_as)
        self.contexts = [[*r.prompt_ids, *r.completion_ids] for r in texts]
        sampling = SamplingConfig(ANSWER + 1, n=ANSWERS, seed=seed + 1, ignore_eos=True)
        self.answers = [[r.completion_ids for r in engine.generate([tokens], sampling)] for tokens in self.contexts]
        begins = [tokenizer.encode(text, add_special_tokens=False) for text in ("He", "She", "They", "One day")]

        def starters(answer: Sequence[int]) -> list[list[int]]:
            return [list(answer[place : place + 8]) for place in range(0, min(len(answer), 24), 8)]

        self.prompts = ContextPrompts(requests=begins, questions=begins[0], starters=starters)
        self.settings: dict[str, Any] = {"study_tokens": 96, "study_samples": 4, "first": 1, "last": 4}
        self.settings["most_queries"] = 2048

    def nlls(self, context: Context, answers: Sequence[list[int]]) -> Tensor:
        """Return the NLL per token of each answer after a context. An answer's first token is not judged."""
        with torch.no_grad():
            logits = torch.stack(self.reader.logits(answers, ContextCache(context)))
        tokens = torch.tensor(answers)[:, 1:, None]
        return -logits[:, :-1].double().log_softmax(-1).gather(2, tokens)[..., 0].mean(1)

    def loss(self, number: int, context: Context) -> float:
        """Return the NLL per token of the full cache's answers after one compacted context."""
        return float(self.nlls(context, self.answers[number]).mean())

    def scores(self, number: int, context: Context) -> tuple[float, float]:
        """Return the accuracy, and the NLL per token of the full cache's answers, after one compacted context."""
        others = [(number + step) % len(self.contexts) for step in range(OPTIONS)]
        nlls = torch.stack([self.nlls(context, self.answers[other]) for other in others])
        return float((nlls.argmin(0) == 0).double().mean()), float(nlls[0].mean())


Task = RetrievalTask | StoryTask


def configured(task: Task, times: int, settings: dict[str, Any]) -> PromptCacheConfig:
    """Return the configuration of a method for a cache of 1/`times` of the context."""
    own = {name: value for name, value in settings.items() if name not in ("budgets", "heads", "cartridge")}
    if settings.get("heads", "partition") != "partition":
        own["heads"] = settings["heads"]
    if "cartridge" in settings:
        own["cartridge"] = CartridgeConfig(**settings["cartridge"])
    return PromptCacheConfig(ratio=1 / times, **{**task.settings, **own})


def head_shares(engine: Any, task: Task, select: str) -> Tensor:
    """Return head budgets [L, Hkv] from sensitivity curves over a task's contexts (algorithm 4)."""
    config = configured(task, CALIBRATED, {"queries": BOTH["queries"], "select": select})
    studied = [engine.study(tokens, config, task.prompts) for tokens in task.contexts]
    curves = budgets.sensitivity(studied, config, task.loss, base=config.ratio)
    return budgets.allocate(curves, budgets.RATIOS, config.ratio)


def measure(engine: Any, task: Task, shares: dict[str, Tensor], only: str) -> dict[str, list[list[float]]]:
    """Return method -> for each ratio: accuracy, log-perplexity and CPU seconds, means over the contexts."""
    measured = {}
    for name, settings in METHODS.items():
        if only not in name:
            continue
        times = RATIOS[task.name] if configured(task, 2, settings).sized else RATIOS[task.name][:1]
        values: dict[int, list[tuple[float, float, float]]] = {ratio: [] for ratio in times}
        for number, tokens in enumerate(task.contexts):
            start = time.process_time()
            studied = engine.study(tokens, configured(task, times[0], settings), task.prompts)
            reading = time.process_time() - start
            for ratio in times:
                config, counts = configured(task, ratio, settings), None
                if "budgets" in settings:
                    own = shares[settings["budgets"]]
                    between = config.between(len(tokens))
                    partition = settings.get("heads") == "partition"
                    counts = budgets.partition(own, config.ratio, between) if partition else None
                    counts = counts or budgets.counts(own, config.ratio, len(tokens), config)
                start = time.process_time()
                context = studied.compacted(config, counts)
                seconds = reading + time.process_time() - start
                values[ratio].append((*task.scores(number, context), seconds))
        rows = [[mean(column) for column in zip(*values[ratio], strict=True)] for ratio in times]
        measured[name] = rows if len(rows) > 1 else rows * len(RATIOS[task.name])
        texts = "  ".join(f"{accuracy:.2f} {nll:.3f} {seconds:.2f}s" for accuracy, nll, seconds in rows)
        print(f"{task.name}: {name}: {texts}", flush=True)
    return measured


Results = dict[str, dict[str, list[list[list[float]]]]]  # task -> method -> for each model or seed -> for each ratio


def show(results: Results) -> None:
    """Print a table for each task: accuracy, log-perplexity and seconds of each method at each ratio."""
    for task, methods in results.items():
        table = Table(title=f"{task}: accuracy, log-perplexity of the full cache's answers, ± error over seeds")
        for column in ("method", *(f"{ratio}×" for ratio in RATIOS[task]), "seconds"):
            table.add_column(column, justify="left" if column == "method" else "right")
        for name, seeds in methods.items():
            cells = []
            for place in range(len(RATIOS[task])):
                accuracies, nlls = zip(*(rows[place][:2] for rows in seeds), strict=True)
                cells.append(f"{_spread(accuracies, 2)}, {_spread(nlls, 3)}")
            seconds = [row[2] for rows in seeds for row in rows]
            table.add_row(name, *cells, f"{min(seconds):.2g} to {max(seconds):.2g}")
        Console(width=None if sys.stdout.isatty() else 200).print(table)


def _spread(values: Sequence[float], digits: int) -> str:
    error = float(torch.tensor(values, dtype=torch.float64).std()) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{mean(values):.{digits}f} ± {error:.{digits}f}"


def draw(results: Results, out: Path) -> None:
    """Draw log-perplexity against the ratio for the methods of DRAWN, one panel for each task."""
    figure, axes = new_figure("")
    axes.remove()
    figure.set_size_inches(8 * len(results), 6)
    for number, (task, methods) in enumerate(results.items(), start=1):
        axes = figure.add_subplot(1, len(results), number)
        axes.spines[["top", "right"]].set_visible(False)
        drawn = [name for name in DRAWN if name in methods]
        families = [
            "am" if name.startswith("AM") else "cartridge" if name == "Cartridges" else "evict" for name in drawn
        ]
        ends = []
        for line, (name, colour) in enumerate(zip(drawn, method_colours(families), strict=True)):
            levels = [mean(rows[place][1] for rows in methods[name]) for place in range(len(RATIOS[task]))]
            marker = MARKERS[families[:line].count(families[line]) % len(MARKERS)]
            style = "--" if families[line] == "evict" else "-"
            axes.plot(RATIOS[task], levels, color=colour, marker=marker, linestyle=style)
            ends.append((RATIOS[task][-1], levels[-1], name, colour))
        full = mean(rows[0][1] for rows in methods["full cache"])
        axes.axhline(full, color="0.4", linewidth=1, linestyle=":")
        ends.append((RATIOS[task][-1], full, "full cache", "0.4"))
        axes.set_xscale("log")
        axes.set_xticks(RATIOS[task], [f"{ratio}×" for ratio in RATIOS[task]])
        axes.minorticks_off()
        label_ends(axes, ends)
        axes.set_title(task)
        axes.set_xlabel("how many times smaller than the context the cache is")
        axes.set_ylabel("log-perplexity of the full cache's answers, nats per token")
    save_figure(figure, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stories", help="the directory of a small model that tells stories")
    parser.add_argument("--retrieval", nargs="*", default=[], help="runs of retrieval/sft, one for each seed")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds of the stories")
    parser.add_argument("--contexts", type=int, default=4, help="number of contexts for each seed")
    parser.add_argument("--calibration", type=int, default=2, help="number of contexts for head budgets")
    parser.add_argument("--only", default="", help="measure only methods whose name has this text")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of methods_TASK.json")
    parser.add_argument("--figure", type=Path, default=Path("docs/methods.png"))
    options = parser.parse_args()
    files = {task: options.out / f"methods_{task}.json" for task in RATIOS}
    stored = {task: json.loads(file.read_text())["results"] for task, file in files.items() if file.is_file()}
    results: Results = {task: methods for of_task in stored.values() for task, methods in of_task.items()}

    def run(engine: Any, tasks: Sequence[Task], place: int) -> None:
        task, calibration = tasks
        start = time.process_time()
        shares = {select: head_shares(engine, calibration, select) for select in ("attention", "omp")}
        print(f"{task.name}: head budgets: {time.process_time() - start:.0f} CPU seconds", flush=True)
        for name, rows in measure(engine, task, shares, options.only).items():
            seeds = results.setdefault(task.name, {}).setdefault(name, [])
            seeds[place : place + 1] = [rows]
        show({task.name: results[task.name]})
        own = {task.name: results[task.name]}
        write(files[task.name], contexts=options.contexts, calibration=options.calibration, results=own)

    for place, model in enumerate(options.retrieval):
        engine = make_engine("hf", model=model_directory(model), policy="full", max_batch=128)
        tokenizer = load_tokenizer(model_directory(model))
        sizes = ((options.contexts, "evaluation"), (options.calibration, "calibration"))
        run(engine, [RetrievalTask(engine, tokenizer, *size) for size in sizes], place)
    for seed in range(options.seeds if options.stories else 0):
        engine = make_engine("hf", model=options.stories, policy="full")
        tokenizer = load_tokenizer(options.stories)
        sizes = ((options.contexts, 100 * seed + 1), (options.calibration, 100 * seed + 51))
        run(engine, [StoryTask(engine, tokenizer, *size) for size in sizes], seed)
    if not options.stories and not options.retrieval:
        show(results)
    draw(results, options.figure)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main()
