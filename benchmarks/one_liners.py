"""GRPO with the reward `code` under a small cache: a tiny model writes programs (sparse_rl/data/one_liners.py).

For each seed, one_liners/sft trains a model with a full cache. Three runs of one_liners/grpo start from it: one with
replay, one without (mismatched), and one with a full cache. Measured is pass@1 on functions that no training used, with
the recipe's small cache and with a full cache. Errors are over seeds.

    python benchmarks/one_liners.py     # writes benchmarks/results/one_liners.json; a second call continues the first
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

from rich.table import Table

from benchmarks.results import Rows, over_seeds, show, with_rows_before, write
from benchmarks.staged import StagedSeed
from sparse_rl.commands.quickstart import Stages, largest_gap
from sparse_rl.metrics import read_metrics
from sparse_rl.recipe import load_recipe

START = "before RL"
ARMS = {"RL-Sparse": [], "Mismatched": ["train_attention=full"], "RL-Full": ["cache={policy: full}"]}
SMALL, FULL = "small", "full"  # the caches of the evaluation


class Seed(StagedSeed):
    def __init__(self, seed: int, stages: Stages, runs: Path, problems: int) -> None:
        super().__init__(seed, stages, runs)
        self.problems = problems

    def evaluated(self, label: str, run: Path) -> dict[str, Any]:
        """Return pass@1 of a run's model with both caches, and means over its completions."""
        out: dict[str, Any] = {}
        for name, keys in ((SMALL, []), (FULL, ["cache={policy: full}"])):
            place = run.with_name(f"eval_{run.name}_{name}")
            size = f"tasks.one_liners.synthetic.size={self.problems}"
            self.stage(
                f"{label}, {name} cache", place, "eval", "one_liners/eval", f"model={run / 'model'}", size, *keys
            )
            lines = [json.loads(line) for line in (place / "eval_completions.jsonl").read_text().splitlines()]
            texts = [line["completion"] for line in lines]
            out[name] = {
                "pass": statistics.mean(line["correct"] for line in lines),
                "tokens": statistics.mean(line["tokens"] for line in lines),
                "ideas": statistics.mean(text.count("?") for text in texts),
                "notes": statistics.mean(text.count("[") - text.count("[b]") for text in texts),
            }
        return out

    def run(self) -> Rows:
        start = self.folder / "sft"
        self.stage("the task", start, "train", "one_liners/sft", f"data.synthetic.seed={self.seed}")
        rows = [{"seed": self.seed, "run": START, "seconds": seconds(start), **self.evaluated(START, start)}]
        for name, keys in ARMS.items():
            place = self.folder / name.lower()
            data = f"data.synthetic.seed={self.seed + 1}"
            self.stage(name, place, "train", "one_liners/grpo", f"model={start / 'model'}", data, *keys)
            measured = {"seconds": seconds(place), "gap_max": largest_gap(place), **rewards(place)}
            rows.append({"seed": self.seed, "run": name, **measured, **self.evaluated(name, place)})
        return rows


def seconds(run: Path) -> float:
    return next(line["train_runtime"] for line in read_metrics(run) if "train_runtime" in line)


def rewards(run: Path) -> dict[str, float]:
    """Return the mean reward of the first five and of the last five steps, and the share of time that rewards take."""
    steps = [line for line in read_metrics(run) if "reward" in line]
    values = [line["reward"] for line in steps]
    share = sum(line["time/rewards"] for line in steps) / sum(line["time/step"] for line in steps)
    return {
        "reward_first": statistics.mean(values[:5]), "reward_last": statistics.mean(values[-5:]),
        "rewards_share": share,
    }  # fmt: skip


def table(rows: Rows) -> Table:
    """Return a table with a row per run: pass@1 with the small and with the full cache, and how the model works."""
    seeds = sorted({row["seed"] for row in rows})
    named = {(row["run"], row["seed"]): row for row in rows}
    rendered = Table(title="pass@1 with the small cache / with a full cache; ± standard error over seeds")
    for name in ("training", *(f"seed {seed}" for seed in seeds), "small cache", "full cache", "over the start",
                 "tokens", "ideas", "notes", "largest gap"):  # fmt: skip
        rendered.add_column(name, justify="left" if name == "training" else "right")
    for run in (START, *ARMS):
        of_seeds = [named[run, seed] for seed in seeds]
        rise = [row[SMALL]["pass"] - named[START, row["seed"]][SMALL]["pass"] for row in of_seeds]
        rendered.add_row(
            run,
            *(f"{row[SMALL]['pass']:.3f} / {row[FULL]['pass']:.3f}" for row in of_seeds),
            *(
                "{:.3f} ± {:.3f}".format(*over_seeds([row[cache]["pass"] for row in of_seeds]))
                for cache in (SMALL, FULL)
            ),
            "" if run == START else "{:+.3f} ± {:.3f}".format(*over_seeds(rise)),
            *(f"{statistics.mean(row[SMALL][key] for row in of_seeds):.1f}" for key in ("tokens", "ideas", "notes")),
            "" if run == START else f"{max(row['gap_max'] for row in of_seeds):.1e}",
        )
    return rendered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="if empty, the file's rows are shown")
    parser.add_argument("--problems", type=int, default=1024)
    parser.add_argument("--runs", type=Path, default=Path("runs/one_liners"))
    parser.add_argument("--slots", type=int, default=min(2, os.cpu_count() or 1), help="stages run at a time")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/one_liners.json"))
    options = parser.parse_args()
    recipes = {name: load_recipe(f"one_liners/{name}").resolved() for name in ("sft", "grpo")}
    settings = {
        "problems": options.problems, "cache": recipes["grpo"]["cache"],
        **{f"{name}_steps": recipe["max_steps"] for name, recipe in recipes.items()},
    }  # fmt: skip
    with_rows_before(options.out, settings, [], lambda row: (row["seed"], row["run"]))  # before an hour of work
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    stages = Stages(options.slots)
    with ThreadPoolExecutor(max(1, len(options.seeds))) as pool:
        jobs = [pool.submit(Seed(seed, stages, options.runs, options.problems).run) for seed in options.seeds]
        new = [row for job in jobs for row in job.result()]
    rows = with_rows_before(options.out, settings, new, lambda row: (row["seed"], row["run"]))
    if new:
        write(options.out, settings=settings, rows=rows)
    show([table(rows)], options.markdown)


if __name__ == "__main__":
    main()
