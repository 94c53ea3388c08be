"""The quickstart: show on a machine without a GPU that training under the recorded evictions improves accuracy.

Three methods (RL-Sparse, RL-Full, Mismatched) start from the shipped tiny model (recipes/quickstart), which solves the
running-sum task with a full cache, but seldom under a small one. All models are evaluated under both. With
`--scratch`, a tiny model is first trained for each seed, and its budget is calibrated: the smallest one that lowers the
accuracy but leaves enough correct completions to learn from.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from sparse_rl.commands import report as html
from sparse_rl.commands.arguments import file_path, positive
from sparse_rl.commands.console import Session, print_table
from sparse_rl.errors import StoppedError
from sparse_rl.methods.config import EvictingConfig
from sparse_rl.metrics import read_metrics
from sparse_rl.progress import stage
from sparse_rl.recipe import load_recipe

ABOUT = "Show on a machine without a GPU that training under the recorded evictions improves accuracy."
BUDGETS = (32, 36, 40, 44, 48, 56, 64)
AIM = (0.25, 0.5)  # accuracy under eviction before RL: low enough to improve, high enough for some rewards
LEAST = 0.18  # runs that start nearer to chance (0.10) often stay there
# name -> recipe, which is also the name of the run's folder
METHODS = {"rl_sparse": "grpo", "rl_full": "grpo_full", "rl_mismatch": "grpo_mismatch"}
SHIPPED = "quickstart/model"
START = "sft"  # name of the row of results.json with the accuracy before RL
LABELS = {START: "before RL", "rl_sparse": "RL-Sparse", "rl_full": "RL-Full", "rl_mismatch": "Mismatched"}
# name -> method in COLOURS that defines the colour (sparse_rl/analysis/drawing.py)
DRAWN_AS = {START: "sft", "rl_sparse": "streaming", "rl_full": "full", "rl_mismatch": "mismatched"}
ROLLOUTS = "rollouts"  # folder of the completions that the report shows


class QuickstartError(StoppedError):
    """The failure of a stage, described in one line with the path of the stage's log."""


class Start(NamedTuple):
    """Starting point of RL: a model, its budget, and the folder of its evaluation before RL."""

    model: str
    budget: int
    folder: Path


class Stages:
    """Runs `sparse-rl` stages as processes. A stage that fails stops all others."""

    failure: QuickstartError | None = None

    def run(self, label: str, folder: Path, arguments: Sequence[str]) -> None:
        """Run one stage, whose command line is `arguments`, and write its output to folder/log.txt."""
        folder.mkdir(parents=True, exist_ok=True)
        log, start = folder / "log.txt", time.monotonic()
        command = [sys.executable, "-P", "-m", "sparse_rl.cli", *arguments]
        streams: Any = {"stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        print(f"  start  {label}", flush=True)
        with stage(label), log.open("w") as file, subprocess.Popen(command, stdout=file, **streams) as process:
            while process.poll() is None and self.failure is None:
                time.sleep(0.2)
            process.terminate()
        if process.returncode and self.failure is None:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            self.failure = QuickstartError(f"{label} failed (log: {log}): {lines[-1] if lines else 'no output'}")
        if self.failure is not None:
            raise self.failure
        print(f"  done   {label}  {time.monotonic() - start:.0f} s", flush=True)


class Quickstart:
    """Runs the stages of all seeds, `slots` at a time, with their results in the folder `out`."""

    def __init__(self, out: Path, engine: str, slots: int) -> None:
        self.out, self.stages, self.engine, self.slots = out, Stages(), engine, slots

    def train(self, label: str, folder: Path, recipe: str, seed: int, *more: str) -> None:
        overrides = [f"seed={seed}", f"output_dir={folder}", f"data.synthetic.seed={seed}", *more]
        self.stages.run(label, folder, ["train", f"quickstart/{recipe}", *overrides])

    def evaluate(self, label: str, folder: Path, seed: int, *more: str) -> list[dict[str, Any]]:
        """Run an evaluation and return its rows. `more` are overrides of the recipe, including the model."""
        overrides = [f"seed={seed}", f"rollout.engine={self.engine}", f"output_dir={folder}", *more]
        self.stages.run(label, folder, ["eval", "quickstart/eval", *overrides])
        return json.loads((folder / "eval.json").read_text())["rows"]

    def from_scratch(self, seed: int) -> Start:
        """Train a tiny model with the seed, and calibrate the budget that lowers the model's accuracy."""
        folder = self.out / f"seed{seed}"
        self.train(f"seed {seed}: training the tiny model", folder / "sft", "sft", seed)
        model = folder / "sft/model"
        rows = self.evaluate(
            f"seed {seed}: calibrating the budget", folder / "calibration", seed, f"model={model}",
            f"sweep.cache.budget=[{','.join(map(str, BUDGETS))}]", "tasks.running_sum.synthetic.split=calibration",
            "tasks.running_sum.synthetic.size=512", f"tasks.running_sum.synthetic.seed={1000 + seed}",
        )  # fmt: skip
        budget = choose_budget({row["budget"]: row["accuracy"] for row in rows})
        tried = ", ".join(f"{row['budget']}: {row['accuracy']:.2f}" for row in rows)
        print(f"  seed {seed}: budget {budget} (accuracy under eviction {tried})")
        return Start(str(model), budget, folder / "eval_before_rl")

    def row(self, name: str, seed: int, start: Start, run: Path | None) -> dict[str, Any]:
        """Evaluate the model of a run (None: the model before RL) under both caches. Return its row of results.json."""
        model = start.model if run is None else run
        folder = start.folder if run is None else run.with_name(f"eval_{run.name}")
        sweep = ["sweep.policy=[streaming,full]", f"sweep.cache.budget=[{start.budget}]"]
        points = self.evaluate(f"seed {seed}: evaluating {LABELS[name]}", folder, seed, f"model={model}", *sweep)
        evicted, full = (next(p for p in points if (p["policy"] == "full") == is_full) for is_full in (False, True))
        return {
            "name": name, "seed": seed, "policy": evicted["policy"], "budget": start.budget, "n": evicted["problems"],
            "accuracy_evicted": evicted["accuracy"], "accuracy_full": full["accuracy"],
            "standard_error_evicted": evicted["standard_error"], "standard_error_full": full["standard_error"],
            "retention": evicted["retention"], "max_abs_dlogp": None if run is None else largest_gap(run),
        }  # fmt: skip

    def method(self, name: str, seed: int, start: Start) -> dict[str, Any]:
        """Train with one method, evaluate the model, and return its row of results.json."""
        recipe = METHODS[name]
        folder = self.out / f"seed{seed}" / recipe
        budget = [] if name == "rl_full" else [f"cache.budget={start.budget}"]
        engine = f"rollout.engine={self.engine}"
        self.train(f"seed {seed}: {LABELS[name]}", folder, recipe, seed, engine, f"model={start.model}", *budget)
        return self.row(name, seed, start, folder)

    def sample(self, seed: int, budget: int) -> None:
        """Sample some completions from the model of RL-Sparse, which the report shows with their cache."""
        model, folder = self.out / f"seed{seed}" / METHODS["rl_sparse"], self.out / ROLLOUTS
        overrides = [f"model={model}", f"cache.budget={budget}", f"rollout.engine={self.engine}", "num_generations=2"]
        command = ["rollout", "quickstart/grpo", *overrides, "--problems", "8", "--out", str(folder)]
        self.stages.run("sampling for the report", folder, command)

    def run(self, seeds: Sequence[int], scratch: bool) -> list[dict[str, Any]]:
        """Return the rows of results.json. Without `scratch`, all seeds share one start, which is evaluated once."""
        with ThreadPoolExecutor(self.slots) as pool:
            if scratch:
                starts = dict(zip(seeds, pool.map(self.from_scratch, seeds), strict=True))
                begun = [pool.submit(self.row, START, seed, starts[seed], None) for seed in seeds]
            else:
                shared = Start(SHIPPED, shipped_budget(), self.out / "eval_before_rl")
                starts = dict.fromkeys(seeds, shared)
                begun = [pool.submit(self.row, START, seeds[0], shared, None)]
            trained = [pool.submit(self.method, name, seed, starts[seed]) for seed in seeds for name in METHODS]
            before = [job.result() for job in begun]
            rows = [job.result() for job in trained]
        self.sample(seeds[0], starts[seeds[0]].budget)
        return [*(before if scratch else ({**before[0], "seed": seed} for seed in seeds)), *rows]


def shipped_budget() -> int:
    """Return the budget of quickstart/grpo, which was calibrated on the shipped model as in `from_scratch`."""
    cache = load_recipe("quickstart/grpo").caches()[0]
    assert isinstance(cache, EvictingConfig) and isinstance(cache.budget, int)
    return cache.budget


def choose_budget(accuracy: dict[int, float]) -> int:
    """Return the smallest budget with an accuracy in AIM. If none has, take the accuracy nearest to AIM, if >= LEAST.

    accuracy : budget -> accuracy under eviction
    """
    for budget in sorted(accuracy):
        if AIM[0] <= accuracy[budget] <= AIM[1]:
            return budget
    usable = [b for b in sorted(accuracy) if accuracy[b] >= LEAST]
    if not usable:
        accuracies = ", ".join(f"{b}: {a:.2f}" for b, a in sorted(accuracy.items()))
        raise QuickstartError(
            f"no budget reaches an accuracy of {LEAST} under eviction ({accuracies}); try another seed"
        )
    return min(usable, key=lambda b: max(AIM[0] - accuracy[b], accuracy[b] - AIM[1]))


def largest_gap(run: Path) -> float | None:
    """Return the largest |log p_trainer - log p_sampler| over all steps and tokens; None for SFT, which logs no gap."""
    gaps = [line["replay/gap_max"] for line in read_metrics(run) if "replay/gap_max" in line]
    return max(gaps, default=None)


def report(rows: list[dict[str, Any]], out: Path, seconds: float, engine: str) -> None:
    """Write results.json and the three pictures, and print the table."""
    gaps = {name: max(r["max_abs_dlogp"] for r in rows if r["name"] == name) for name in METHODS}
    results = {
        "rows": rows,
        "max_abs_dlogp": gaps["rl_sparse"],
        "max_abs_dlogp_by_run": gaps,
        "engine": engine,
        "seconds": round(seconds, 1),
    }
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    draw(rows, out)
    show(rows, gaps)
    print(
        f"{seconds / 60:.1f} minutes. Written to {out}: results.json, accuracy.png, learning_curves.png, replay_gap.png"
    )


def draw(rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Draw accuracy.png over all seeds, and learning_curves.png and replay_gap.png of the first seed."""
    from sparse_rl.analysis.results import Group, plot_accuracy, plot_gap, plot_metric

    seed = min(row["seed"] for row in rows)
    first = {name: [out / f"seed{seed}" / recipe] for name, recipe in METHODS.items()}
    budgets = sorted({row["budget"] for row in rows})
    title = f"Accuracy on {rows[0]['n']:,} problems of about 100 tokens each;"
    title += f"\nthe small cache has a budget of {' or '.join(map(str, budgets))}"
    accuracies = {
        label: (
            [row["accuracy_evicted"] for row in rows if row["name"] == name],
            [row["accuracy_full"] for row in rows if row["name"] == name],
        )
        for name, label in LABELS.items()
    }
    method_of = {label: DRAWN_AS[name] for name, label in LABELS.items()}
    plot_accuracy(accuracies, out / "accuracy.png", title, method_of)
    labels = LABELS | {"rl_full": f"{LABELS['rl_full']} (samples with a full cache)"}
    curves = [Group(labels[name], folders, DRAWN_AS[name]) for name, folders in first.items()]
    title = f"Reward during training, seed {seed}: each run under the cache it samples with"
    plot_metric(curves, out / "learning_curves.png", "reward", title)
    compared = [Group(LABELS[name], first[name], DRAWN_AS[name]) for name in ("rl_sparse", "rl_mismatch")]
    plot_gap(compared, out / "replay_gap.png", f"Does the trainer see what the sampler saw? Seed {seed}")


def show(rows: Sequence[dict[str, Any]], gaps: Mapping[str, float]) -> None:
    from sparse_rl.analysis.tables import table

    seeds = sorted({row["seed"] for row in rows})
    headings = ["", "seed", "budget", "under eviction", "full cache", "max |Δlogp|"]
    cells = [
        [
            *(LABELS[row["name"]], str(row["seed"]), str(row["budget"])),
            *(f"{row[f'accuracy_{c}']:.3f} ± {row[f'standard_error_{c}']:.3f}" for c in ("evicted", "full")),
            "" if row["max_abs_dlogp"] is None else f"{row['max_abs_dlogp']:.1e}",
        ]
        for row in sorted(rows, key=lambda r: (r["seed"], list(LABELS).index(r["name"])))
    ]
    print()
    print_table(table("Running sums, held-out problems: accuracy (± standard error)", headings, cells))
    by = {(r["name"], r["seed"]): r["accuracy_evicted"] for r in rows}
    others = {START: "its start", "rl_full": "RL-Full", "rl_mismatch": "Mismatched"}
    ahead = {words: [by["rl_sparse", s] - by[name, s] for s in seeds] for name, words in others.items()}
    compared = ", ".join(
        f"{statistics.median(gains):+.2f} over {words} (worst {min(gains):+.2f})" for words, gains in ahead.items()
    )
    print(f"Accuracy of RL-Sparse under eviction, median of {len(seeds)} seed{'s' * (len(seeds) > 1)}: {compared}")
    print(
        f"Max |Δlogp|, sampler against trainer: {gaps['rl_sparse']:.1e} replayed, {gaps['rl_mismatch']:.1e} mismatched."
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=file_path, default=Path("runs/quickstart"))
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf", help="engine that samples; hf starts faster")
    parser.add_argument("--scratch", action="store_true", help="also train the tiny model, one for each seed")
    parser.add_argument(
        "--slots", type=positive, default=min(2, os.cpu_count() or 1), help="number of stages that run at a time"
    )


def run(options: argparse.Namespace, session: Session) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per stage is fastest for a model of this size
    start = time.monotonic()
    slots = f"{options.engine} engine, {options.slots} stages at a time"
    print(f"sparse-rl quickstart: seeds {options.seeds}, {slots}, in {options.out}")
    seeds = list(dict.fromkeys(options.seeds))
    for name in ["eval_before_rl", ROLLOUTS, *(f"seed{seed}" for seed in seeds)]:
        shutil.rmtree(options.out / name, ignore_errors=True)
    rows = Quickstart(options.out, options.engine, options.slots).run(seeds, options.scratch)
    report(rows, options.out, time.monotonic() - start, options.engine)
    page = options.out / html.OUT
    html.write(html.find([options.out]), page, str(options.out))
    print(f"Open {page} in a browser: all results in one page, and completions with the cache that they had.")
    return 0
