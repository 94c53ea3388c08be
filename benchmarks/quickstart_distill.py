"""Distillation on the quickstart's task, and GRPO after it.

For each seed, quickstart/distill and then quickstart/grpo start from the model and the budget of `make quickstart`.
The models are compared with the quickstart's GRPO alone, and with GRPO that has as many updates as both trainings (the
control). Measured are the held-out KL to the full cache, and accuracies under eviction; errors are over seeds.

    make quickstart SEEDS="0 1 2"
    python benchmarks/quickstart_distill.py         # writes benchmarks/results/quickstart_distill.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from rich.console import Console
from rich.table import Table

from benchmarks.results import over_seeds, write
from sparse_rl.commands.quickstart import Stages
from sparse_rl.metrics import read_metrics

STEPS, FIRST = 40, 10


def run_seed(seed: int, budget: int, source: Path, out: Path, stages: Stages, engine: str) -> dict[str, Any]:
    folder = out / f"seed{seed}"
    common = [f"seed={seed}", f"rollout.engine={engine}"]

    def train(name: str, recipe: str, model: str | Path, *more: str, steps: int = STEPS) -> None:
        keys = [
            f"model={model}",
            f"output_dir={folder / name}",
            f"cache.budget={budget}",
            f"data.synthetic.seed={seed}",
            f"max_steps={steps}",
        ]
        stages.run(f"seed {seed}: {name}", folder / name, ["train", recipe, *common, *keys, *more])

    def evaluate(name: str) -> dict[str, Any]:
        keys = [f"model={folder / name / 'model'}", f"output_dir={folder / ('eval_' + name)}", f"cache.budget={budget}"]
        stages.run(
            f"seed {seed}: evaluating {name}",
            folder / f"eval_{name}",
            ["eval", "quickstart/eval", *common, *keys, "--overwrite"],
        )
        (row,) = json.loads((folder / f"eval_{name}" / "eval.json").read_text())["rows"]
        return {key: row[key] for key in ("accuracy", "standard_error", "problems")}

    train("distill", "quickstart/distill", "quickstart/model", f"validation.every={STEPS}")
    train("distill_grpo", "quickstart/grpo", folder / "distill" / "model")
    train("grpo_long", "quickstart/grpo", "quickstart/model", steps=2 * STEPS)
    kl = [line["eval_kl"] for line in read_metrics(folder / "distill") if "eval_kl" in line]
    early = {
        name: statistics.mean(
            line["reward"] for line in read_metrics(run) if 0 < line["step"] <= FIRST and "reward" in line
        )
        for name, run in (("grpo", source / f"seed{seed}" / "grpo"), ("distill_grpo", folder / "distill_grpo"))
    }
    return {
        "seed": seed, "budget": budget, "kl_before": kl[0], "kl_after": kl[-1], "early_reward": early,
        "distill": evaluate("distill"), "distill_grpo": evaluate("distill_grpo"), "grpo_long": evaluate("grpo_long"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quickstart", type=Path, default=Path("runs/quickstart"), help="where make quickstart ran")
    parser.add_argument("--runs", type=Path, default=Path("runs/quickstart_distill"))
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--slots", type=int, default=min(2, os.cpu_count() or 1), help="stages run at a time")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/quickstart_distill.json"))
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    stored = json.loads((options.quickstart / "results.json").read_text())["rows"]
    budgets = {row["seed"]: row["budget"] for row in stored}
    stages = Stages(options.slots)
    with ThreadPoolExecutor(len(budgets)) as pool:
        jobs = [
            pool.submit(run_seed, seed, budget, options.quickstart, options.runs, stages, options.engine)
            for seed, budget in budgets.items()
        ]
        rows = [job.result() for job in jobs]
    for row in rows:
        for ours, name in (("before", "sft"), ("grpo", "rl_sparse")):
            (match,) = (r for r in stored if (r["name"], r["seed"]) == (name, row["seed"]))
            row[ours] = {
                "accuracy": match["accuracy_evicted"], "standard_error": match["standard_error_evicted"],
                "problems": match["n"],
            }  # fmt: skip
    write(options.out, steps=STEPS, early=FIRST, rows=rows)

    arms = {"before": "before", "distill": "distill", "grpo": "GRPO", "distill_grpo": "distill, GRPO",
            "grpo_long": f"GRPO, {2 * STEPS}"}  # fmt: skip
    table = Table(title=f"Running sums under eviction, {STEPS} updates each", title_justify="left")
    for column in ("seed", "KL before", "after", *arms.values(), f"reward, steps 1-{FIRST}"):
        table.add_column(column, justify="right")
    for row in rows:
        accuracies = (f"{row[name]['accuracy']:.3f} ± {row[name]['standard_error']:.3f}" for name in arms)
        early = f"{row['early_reward']['grpo']:.2f}, {row['early_reward']['distill_grpo']:.2f}"
        table.add_row(str(row["seed"]), f"{row['kl_before']:.3f}", f"{row['kl_after']:.4f}", *accuracies, early)
    over = {name: [row[name]["accuracy"] - row["grpo_long"]["accuracy"] for row in rows] for name in arms}
    cells = ("" if name == "grpo_long" else "{:+.3f} ± {:.3f}".format(*over_seeds(over[name])) for name in arms)
    table.add_row(f"over GRPO, {2 * STEPS}", "", "", *cells, "")
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    main()
