"""The quickstart: show on a machine without a GPU that training under the recorded evictions improves accuracy.

It uses the same commands, kinds of recipe, engine and trainer as a run with a 7B model:

1. start from the shipped tiny model (recipes/quickstart/model), which solves the running-sum task with a full cache,
   but seldom under a cache with the budget of recipes/quickstart/grpo.yaml;
2. for each seed, run RL-Sparse, RL-Full, and the mismatched control (sparse rollouts, full attention in training);
3. evaluate all models under eviction and with a full cache, on problems used neither in training nor in calibration;
4. write results.json, three pictures and a report, and print one table.

With `--scratch`, a tiny model is first trained for each seed (recipes/quickstart/sft.yaml), and its budget is
calibrated: the smallest budget that lowers the accuracy but leaves enough correct completions to learn from.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rollout.config import ENGINES
from sparse_rl.commands import report as html
from sparse_rl.commands.arguments import file_path, positive
from sparse_rl.commands.console import Session
from sparse_rl.errors import StoppedError
from sparse_rl.methods.config import EvictingConfig
from sparse_rl.metrics import read_metrics
from sparse_rl.progress import Stage, screen, stage
from sparse_rl.recipe import TrainRecipe, load_recipe

ABOUT = "Show on a machine without a GPU that training under the recorded evictions improves accuracy."
BUDGETS = (32, 36, 40, 44, 48, 56, 64)
AIM = (0.25, 0.5)  # accuracy under eviction before RL: low enough to improve, high enough for some rewards
LEAST = 0.18  # runs that start nearer to chance (0.10) often stay there
METHODS = {
    "rl_sparse": "grpo",
    "rl_full": "grpo_full",
    "rl_mismatch": "grpo_mismatch",
}  # name -> recipe, which is also the name of the run's folder
SHIPPED = "quickstart/model"
START = "sft"  # name of the row of results.json with the accuracy before RL
LABELS = {START: "before RL", "rl_sparse": "RL-Sparse", "rl_full": "RL-Full", "rl_mismatch": "RL, mismatched masks"}
DRAWN_AS = {  # name -> method in COLOURS that defines the colour (sparse_rl/analysis/drawing.py)
    START: "sft",
    "rl_sparse": "streaming",
    "rl_full": "full",
    "rl_mismatch": "mismatched",
}
SHOWN = {"reward": "reward", "accuracy_full": "accuracy"}  # metric of a stage -> its label
ROLLOUTS = "rollouts"  # folder of the completions that the report shows
NEWS_SECONDS = 20  # seconds between two progress lines of a running stage
console = Console(highlight=False, soft_wrap=True)


class QuickstartError(StoppedError):
    """The failure of a stage, described in one line with the path of the stage's log."""


@dataclass(frozen=True)
class Start:
    """Starting point of RL.

    model : directory of the model, or name of a shipped model
    folder : output folder of the evaluation before RL
    """

    model: str
    budget: int
    folder: Path


class Stages:
    """Run `sparse-rl` stages as processes, at most `slots` at a time. A stage that fails stops all others.

    shown : display that counts finished stages out of `total`, without an estimate of the remaining time, because
        training takes longer than evaluation; None means no display
    """

    def __init__(self, slots: int, shown: Stage | None = None, total: int = 0) -> None:
        self.slots, self.all, self.total = threading.Semaphore(slots), shown, total
        self._count(0)
        self.failure: QuickstartError | None = None

    def run(self, label: str, folder: Path, arguments: Sequence[str], steps: int | None = None) -> None:
        """Run one stage and write its output to folder/log.txt. Without a terminal, print its progress at intervals.

        arguments : command line of the stage, without `sparse-rl`
        steps : number of training steps; None for an evaluation
        """
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "log.txt"
        with self.slots, log.open("w") as file:
            if self.failure is not None:
                raise self.failure
            start = last_news = time.monotonic()
            console.print(f"  [dim]start[/]  {label}")
            command = [sys.executable, "-P", "-m", "sparse_rl.cli", *arguments]
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            try:
                with stage(label, total=steps, unit="step") as row:
                    while process.poll() is None and self.failure is None:
                        time.sleep(0.2)
                        step, news = how_far(folder)
                        row.advance(step - row.done)
                        row.tell(news)
                        if step and screen.drawn is None and time.monotonic() - last_news >= NEWS_SECONDS:
                            console.print(f"         {label}  [dim]step {step}  {news}[/]")
                            last_news = time.monotonic()
            finally:
                process.terminate()
                process.wait()
        if process.returncode and self.failure is None:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            self.failure = QuickstartError(f"{label} failed (log: {log}): {lines[-1] if lines else 'no output'}")
        if self.failure is not None:
            raise self.failure
        step, news = how_far(folder)
        done = "  ".join([*([f"step {step}", news] if step else []), f"{time.monotonic() - start:.0f} s"])
        self._count(1)
        console.print(f"  [green]done[/]   {label}  [dim]{done}[/]")

    def _count(self, more: int) -> None:
        if self.all is None:
            return
        self.all.advance(more)
        self.all.tell(f"{self.all.done}/{self.total} stages")


def how_far(folder: Path) -> tuple[int, str]:
    """Return (last logged step of a training run, text with the last reward or accuracy); (0, "") without logs."""
    lines = read_metrics(folder)
    values = {key: value for line in lines for key, value in line.items()}  # metric -> last logged value
    shown = [f"{label} {values[key]:.2f}" for key, label in SHOWN.items() if key in values]
    return values.get("step", 0), "  ".join(shown)


class Quickstart:
    """Runs the stages of all seeds, with their results in the folder `out`."""

    def __init__(self, out: Path, stages: Stages, engine: str) -> None:
        self.out, self.stages, self.engine = out, stages, engine

    def train(self, label: str, folder: Path, recipe: str, seed: int, *more: str) -> None:
        overrides = [f"seed={seed}", f"output_dir={folder}", f"data.synthetic.seed={seed}", *more]
        steps = load_recipe(f"quickstart/{recipe}").expect(TrainRecipe).training.max_steps
        self.stages.run(label, folder, ["train", f"quickstart/{recipe}", *overrides], steps)

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
        console.print(f"  seed {seed}: budget {budget} (accuracy under eviction {tried})")
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
        with ThreadPoolExecutor(len(seeds) * (len(METHODS) + 1)) as pool:
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
    assert isinstance(cache, EvictingConfig)
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
    console.print(
        f"{seconds / 60:.1f} minutes. Written to {out}: results.json, accuracy.png, learning_curves.png, replay_gap.png"
    )
    runs = " ".join(str(out / f"seed{min(r['seed'] for r in rows)}" / METHODS[n]) for n in ("rl_sparse", "rl_full"))
    console.print("Next steps, for example:")
    console.print(f"  sparse-rl plot {runs} --metric retention")
    console.print("  sparse-rl train quickstart/grpo cache.budget=32 output_dir=runs/quickstart/budget32")


def draw(rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Draw accuracy.png over all seeds, and learning_curves.png and replay_gap.png of the first seed."""
    from sparse_rl.analysis.accuracy import plot_accuracy
    from sparse_rl.analysis.curves import plot_gap, plot_metric

    seed = min(row["seed"] for row in rows)
    first = {LABELS[name]: out / f"seed{seed}" / recipe for name, recipe in METHODS.items()}
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
    full = f"{LABELS['rl_full']} (samples with a full cache)"
    curves = {full if label == LABELS["rl_full"] else label: folder for label, folder in first.items()}
    title = f"Reward during training, seed {seed}: each run under the cache it samples with"
    plot_metric(curves, out / "learning_curves.png", "reward", title, {**method_of, full: DRAWN_AS["rl_full"]})
    compared = {LABELS[name]: first[LABELS[name]] for name in ("rl_sparse", "rl_mismatch")}
    title = f"Does the trainer see what the sampler saw? Seed {seed}"
    plot_gap(compared, out / "replay_gap.png", title, method_of)


def show(rows: Sequence[dict[str, Any]], gaps: Mapping[str, float]) -> None:
    """Print the table of the results, and its summary."""
    seeds = sorted({row["seed"] for row in rows})
    table = Table(title="Running sums, held-out problems: accuracy (± standard error)", title_justify="left")
    for column in ("", "seed", "budget", "under eviction", "full cache", "max |Δlogp|"):
        table.add_column(column, justify="left" if not column else "right")
    for row in sorted(rows, key=lambda r: (r["seed"], list(LABELS).index(r["name"]))):
        gap = "" if row["max_abs_dlogp"] is None else f"{row['max_abs_dlogp']:.1e}"
        table.add_row(
            LABELS[row["name"]], str(row["seed"]), str(row["budget"]),
            f"{row['accuracy_evicted']:.3f} ± {row['standard_error_evicted']:.3f}",
            f"{row['accuracy_full']:.3f} ± {row['standard_error_full']:.3f}", gap,
            style="bold" if row["name"] == "rl_sparse" else None, end_section=row["name"] == list(LABELS)[-1],
        )  # fmt: skip
    console.print()
    console.print(table)
    by = {(r["name"], r["seed"]): r["accuracy_evicted"] for r in rows}
    rise = [by["rl_sparse", s] - by[START, s] for s in seeds]
    ahead = [by["rl_sparse", s] - by["rl_full", s] for s in seeds]
    control = [by["rl_sparse", s] - by["rl_mismatch", s] for s in seeds]
    middle = statistics.median
    console.print(
        f"Accuracy of RL-Sparse under eviction: {middle(rise):+.2f} over its start, {middle(ahead):+.2f} over RL-Full, "
        f"{middle(control):+.2f} over the mismatched control (median of {len(seeds)} seed{'s' * (len(seeds) > 1)}; "
        f"worst {min(rise):+.2f}, {min(ahead):+.2f}, {min(control):+.2f})"
    )
    console.print(
        f"Max |Δlogp|, sampler against trainer: {gaps['rl_sparse']:.1e} replayed, {gaps['rl_mismatch']:.1e} mismatched."
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=file_path, default=Path("runs/quickstart"))
    parser.add_argument("--engine", choices=ENGINES, default="hf", help="engine that samples; hf starts faster")
    parser.add_argument("--scratch", action="store_true", help="also train the tiny model, one for each seed")
    parser.add_argument(
        "--slots", type=positive, default=min(2, os.cpu_count() or 1), help="number of stages that run at a time"
    )


def run(options: argparse.Namespace, session: Session) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per stage is fastest for a model of this size
    start = time.monotonic()
    screen.heard()  # the stages print their own progress
    slots = f"{options.engine} engine, {options.slots} stages at a time"
    console.print(f"sparse-rl quickstart: seeds {options.seeds}, {slots}, in {options.out}")
    seeds = list(dict.fromkeys(options.seeds))
    for name in ["eval_before_rl", ROLLOUTS, *(f"seed{seed}" for seed in seeds)]:
        shutil.rmtree(options.out / name, ignore_errors=True)
    stages = len(seeds) * 2 * len(METHODS) + (len(seeds) * 3 if options.scratch else 1) + 1
    with stage("quickstart") as shown:
        rows = Quickstart(options.out, Stages(options.slots, shown, stages), options.engine).run(seeds, options.scratch)
    report(rows, options.out, time.monotonic() - start, options.engine)
    page = options.out / html.OUT
    html.write(html.find([options.out]), page, str(options.out))
    console.print(f"Open {page} in a browser: all results in one page, and completions with the cache that they had.")
    return 0
