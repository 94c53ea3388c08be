"""The quickstart: on a machine without a GPU, show that training under the recorded evictions pays.

Per seed, through the very same command, recipes, engine and trainer that a 7B run uses:

1. train a tiny model from scratch on the running-sum task (recipes/quickstart/sft.yaml);
2. calibrate the cache budget: the smallest at which that model is hurt but not lost;
3. run RL-Sparse, RL-Full, and the mismatched control (sparse rollouts, full attention in training) under that budget;
4. evaluate all under eviction and with a full cache, on problems that were neither trained nor calibrated on.

Writes results.json, learning_curves.png and replay_gap.png, and prints one table.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rollout.choice import default_engine
from rollout.config import ENGINES
from sparse_rl.commands.console import Session, quiet_loading
from sparse_rl.errors import StoppedError

ABOUT = "On a machine without a GPU: show that training under the recorded evictions pays."
BUDGETS = (32, 36, 40, 44, 48, 56, 64)
AIM = (0.25, 0.5)  # accuracy under eviction before RL: room to learn, and something to reinforce
LEAST = 0.18  # runs that start nearer to chance (0.10) often stay there
RUNS = {"rl_sparse": "quickstart/grpo", "rl_full": "quickstart/grpo_full", "rl_mismatch": "quickstart/grpo_mismatch"}
LABELS = {"sft": "before RL", "rl_sparse": "RL-Sparse", "rl_full": "RL-Full", "rl_mismatch": "RL, mismatched masks"}
console = Console(highlight=False)


class QuickstartError(StoppedError):
    """A stage that failed: one line, and where its log is."""


class Stages:
    """Runs `sparse-rl` stages as processes, as many at a time as there are slots."""

    def __init__(self, slots: int) -> None:
        self.slots = threading.Semaphore(slots)

    def run(self, label: str, folder: Path, arguments: Sequence[str]) -> float:
        """One stage; its output goes to folder/log.txt. Returns its wall seconds."""
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "log.txt"
        with self.slots:
            start = time.monotonic()
            console.print(f"  [dim]start[/]  {label}")
            with log.open("w") as file:
                command = [sys.executable, "-P", "-m", "sparse_rl.cli", *arguments]
                done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            seconds = time.monotonic() - start
            if done.returncode:
                lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
                raise QuickstartError(f"{label} failed (log: {log}): {lines[-1] if lines else 'no output'}")
            console.print(f"  [green]done[/]   {label}  [dim]{seconds:.0f} s[/]")
        return seconds


def run_seed(seed: int, out: Path, stages: Stages, engine: str) -> list[dict[str, Any]]:
    """All stages of one seed after `prepare`; returns its rows of results.json."""
    folder = out / f"seed{seed}"
    common, sampling = [f"seed={seed}"], [f"rollout.engine={engine}"]

    def train(name: str, recipe: str, *more: str) -> None:
        overrides = [*common, f"output_dir={folder / name}", f"data.synthetic.seed={seed}", *more]
        stages.run(f"seed {seed}: {LABELS[name] if name != 'sft' else 'training the tiny model'}", folder / name, [
            "train", recipe, *overrides
        ])  # fmt: skip

    def evaluate(label: str, name: str, model: str, *more: str) -> list[dict[str, Any]]:
        overrides = [*common, *sampling, f"model={folder / model / 'model'}", f"output_dir={folder / name}", *more]
        stages.run(f"seed {seed}: {label}", folder / name, ["eval", "quickstart/eval", *overrides])
        return json.loads((folder / name / "eval.json").read_text())["rows"]

    train("sft", "quickstart/sft", f"model={folder / 'untrained'}")
    sweep = f"sweep.budget=[{','.join(map(str, BUDGETS))}]"
    calibration = evaluate(
        "calibrating the budget", "calibration", "sft", sweep, "tasks.running_sum.synthetic.split=calibration",
        "tasks.running_sum.synthetic.size=512", f"tasks.running_sum.synthetic.seed={1000 + seed}",
    )  # fmt: skip
    budget = choose_budget({row["budget"]: row["accuracy"] for row in calibration})
    tried = ", ".join(f"{r['budget']}: {r['accuracy']:.2f}" for r in calibration)
    console.print(f"  seed {seed}: budget {budget} (accuracy under eviction {tried})")

    start = [f"model={folder / 'sft' / 'model'}", *sampling]
    with ThreadPoolExecutor(len(RUNS)) as pool:
        jobs = [
            pool.submit(train, name, recipe, *start, *([] if name == "rl_full" else [f"cache.budget={budget}"]))
            for name, recipe in RUNS.items()
        ]
        for job in jobs:
            job.result()

    def row(name: str) -> dict[str, Any]:
        points = evaluate(
            f"evaluating {LABELS[name]}", f"eval_{name}", name,
            "sweep.policy=[streaming,full]", f"sweep.budget=[{budget}]",
        )  # fmt: skip
        evicted, full = (next(p for p in points if (p["policy"] == "full") == is_full) for is_full in (False, True))
        return {
            "name": name, "seed": seed, "policy": evicted["policy"], "budget": budget, "n": evicted["problems"],
            "accuracy_evicted": evicted["accuracy"], "accuracy_full": full["accuracy"],
            "standard_error_evicted": evicted["standard_error"], "standard_error_full": full["standard_error"],
            "retention": evicted["retention"], "max_abs_dlogp": largest_gap(folder / name),
        }  # fmt: skip

    with ThreadPoolExecutor(len(LABELS)) as pool:
        return list(pool.map(row, LABELS))


def prepare(seed: int, out: Path) -> None:
    """A clean folder with the untrained model. Not for threads: it draws from torch's global generator."""
    from sparse_rl.data.running_sum import save_untrained

    folder = out / f"seed{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    save_untrained(folder / "untrained", seed)


def choose_budget(accuracy: dict[int, float]) -> int:
    """The smallest budget whose accuracy under eviction is in AIM; else the nearest to it that is at least LEAST."""
    for budget in sorted(accuracy):
        if AIM[0] <= accuracy[budget] <= AIM[1]:
            return budget
    usable = [b for b in sorted(accuracy) if accuracy[b] >= LEAST]
    if not usable:
        found = ", ".join(f"{b}: {a:.2f}" for b, a in sorted(accuracy.items()))
        raise QuickstartError(
            f"no budget leaves an accuracy of at least {LEAST} under eviction ({found}); try another seed"
        )
    return min(usable, key=lambda b: max(AIM[0] - accuracy[b], accuracy[b] - AIM[1]))


def largest_gap(run: Path) -> float | None:
    """The largest |log p_trainer - log p_sampler| of a run, over all its steps and tokens; None for SFT."""
    from sparse_rl.metrics import read_metrics

    gaps = [line["replay/gap_max"] for line in read_metrics(run) if "replay/gap_max" in line]
    return max(gaps, default=None)


def report(rows: list[dict[str, Any]], out: Path, seconds: float, engine: str) -> None:
    """results.json, the two pictures, and the table."""
    from sparse_rl.analysis.curves import plot_gap, plot_learning

    seeds = sorted({row["seed"] for row in rows})
    gaps = {name: max(r["max_abs_dlogp"] for r in rows if r["name"] == name) for name in RUNS}
    results = {
        "rows": rows,
        "max_abs_dlogp": gaps["rl_sparse"],
        "max_abs_dlogp_by_run": gaps,
        "engine": engine,
        "seconds": round(seconds, 1),
    }
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    runs = {name: [out / f"seed{seed}" / name for seed in seeds] for name in RUNS}
    sampled = {"rl_full": f"{LABELS['rl_full']} (samples with a full cache)"}
    plot_learning({sampled.get(n, LABELS[n]): paths[0] for n, paths in runs.items()}, out / "learning_curves.png")
    plot_gap({LABELS[n]: runs[n][0] for n in ("rl_sparse", "rl_mismatch")}, out / "replay_gap.png")

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
    rise = [by["rl_sparse", s] - by["sft", s] for s in seeds]
    ahead = [by["rl_sparse", s] - by["rl_full", s] for s in seeds]
    control = [by["rl_sparse", s] - by["rl_mismatch", s] for s in seeds]
    middle = statistics.median
    console.print(
        f"RL-Sparse under eviction: {middle(rise):+.2f} over its start, {middle(ahead):+.2f} over RL-Full, "
        f"{middle(control):+.2f} over the mismatched control (median of {len(seeds)} seed{'s' * (len(seeds) > 1)}; "
        f"worst {min(rise):+.2f}, {min(ahead):+.2f}, {min(control):+.2f})"
    )
    console.print(
        f"Sampler against trainer, max |Δlogp|: {gaps['rl_sparse']:.1e} replayed, "
        f"{gaps['rl_mismatch']:.1e} mismatched. "
        f"{seconds / 60:.1f} minutes. {out / 'results.json'}, learning_curves.png, replay_gap.png"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--engine", choices=("auto", *ENGINES), default="auto", help="that samples in stages 2 to 4")
    parser.add_argument("--slots", type=int, default=min(2, os.cpu_count() or 1), help="stages run at a time")


def run(options: argparse.Namespace, session: Session) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread a stage is fastest at this size
    quiet_loading(session.verbose)
    start = time.monotonic()
    engine = default_engine() if options.engine == "auto" else options.engine
    slots = f"{engine} engine, {options.slots} stages at a time"
    console.print(f"sparse-rl quickstart: seeds {options.seeds}, {slots}, in {options.out}")
    stages = Stages(options.slots)
    for seed in options.seeds:
        prepare(seed, options.out)
    with ThreadPoolExecutor(len(options.seeds)) as pool:
        parts = pool.map(lambda seed: run_seed(seed, options.out, stages, engine), options.seeds)
        rows = [row for part in parts for row in part]
    report(rows, options.out, time.monotonic() - start, engine)
    return 0
