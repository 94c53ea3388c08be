"""GRPO under a learned eviction policy, on the quickstart's task: does reward rise, and is what is replayed exact?

Per seed the shipped model is retrofitted with scorers for some steps, under a budget that leaves it room to learn.
From there GRPO: scorers frozen, in both engines; and scorers that go on learning. Beside it GRPO from the shipped model
under streaming and G-KV, with as many entries at their peak. Accuracy is measured before and after, each under its own
cache. A second call goes on where the first one stopped.

    python benchmarks/learned_rl.py      # on two cores; writes benchmarks/results/learned_rl.json
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

from sparse_rl.commands.quickstart import Stages
from sparse_rl.metrics import read_metrics

SHIPPED = "quickstart/model"
LEARN = "scorers={{weight: 1.0, learning_rate: {}, boundary: {{queries: 64}}}}"
RATES = ("1e-3", "1e-4", "1e-5")
RUNS: dict[str, tuple[str, list[str]]] = {  # row -> (the cache it starts from, what its recipe changes)
    "KVpop, scorers frozen, hf": ("kvpop", ["rollout.engine=hf"]),
    "KVpop, scorers frozen, vllm": ("kvpop", ["rollout.engine=vllm", "rollout.kv_cache_gb=0.2"]),
    **{f"KVpop, scorers learn at {at}, hf": ("kvpop", ["rollout.engine=hf", LEARN.format(at)]) for at in RATES},
    "streaming, hf": ("streaming", ["rollout.engine=hf"]),
    "G-KV, hf": ("gkv", ["rollout.engine=hf"]),
}


def caches(budget: int, scorer: str) -> dict[str, str]:
    """Each holds `budget` entries at its peak."""
    return {
        "kvpop": f"{{policy: kvpop, budget: {budget}, sinks: 1, window: {budget // 2}, scorer: {scorer}}}",
        "streaming": f"{{policy: streaming, budget: {budget - 1}, sinks: 1, period: 1}}",
        "gkv": f"{{policy: gkv, budget: {budget - 1}, sinks: 1, window: 8, period: 1}}",
    }


def run_seed(seed: int, stages: Stages, options: argparse.Namespace) -> list[dict[str, Any]]:
    folder, held = options.runs / f"seed{seed}", caches(options.budget, options.scorer)

    def stage(label: str, place: Path, command: str, recipe: str, *keys: str) -> None:
        done = place / ("eval.json" if command == "eval" else "model/config.json")
        if not done.exists():
            words = [command, recipe, f"output_dir={place}", f"seed={seed}", *keys, "--overwrite"]
            stages.run(f"seed {seed}: {label}", place, words if command == "eval" else words[:-1])

    def accuracy(label: str, place: Path, model: str, cache: str) -> float:
        stage(f"evaluating {label}", place, "eval", "quickstart/eval", f"model={model}", f"cache={cache}",
              "rollout.engine=hf", f"tasks.running_sum.synthetic.size={options.problems}")  # fmt: skip
        return json.loads((place / "eval.json").read_text())["rows"][0]["accuracy"]

    retrofit = folder / "retrofit"
    if any(RUNS[name][0] == "kvpop" for name in options.rows):
        keys = [f"cache={held['kvpop']}", f"data.synthetic.seed={seed + 1}", f"max_steps={options.retrofit}"]
        keys += [f"learning_rate={options.learning_rate}", "validation=null"]
        stage("retrofit", retrofit, "train", "quickstart/kvpop", *keys)
    starts = {"kvpop": str(retrofit / "model"), "streaming": SHIPPED, "gkv": SHIPPED}
    rows = []
    for name in options.rows:
        policy, keys = RUNS[name]
        place = folder / name.replace(", ", "-").replace(" ", "-")
        before = accuracy(f"before: {policy}", folder / f"start-{policy}", starts[policy], held[policy])
        stage(name, place, "train", "quickstart/grpo", f"model={starts[policy]}", f"cache={held[policy]}",
              f"data.synthetic.seed={seed + 2}", f"max_steps={options.steps}", *keys)  # fmt: skip
        steps = [line for line in read_metrics(place) if "loss" in line]
        rewards = [line["reward"] for line in steps]
        ends = max(1, min(5, len(steps) // 2))
        agree = [line["cache/decisions_agree"] for line in steps if "cache/decisions_agree" in line]
        rows.append(
            {
                "seed": seed,
                "run": name,
                "accuracy_before": before,
                "accuracy_after": accuracy(name, place / "eval", str(place / "model"), held[policy]),
                "reward_first": statistics.mean(rewards[:ends]),
                "reward_last": statistics.mean(rewards[-ends:]),
                "gap_max": max(line["replay/gap_max"] for line in steps),
                "decisions_agree": min(agree) if agree else None,
                "steps": len(steps),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table(title="GRPO under a learned policy: accuracy under the own cache, mean reward, largest gap")
    for name in ("seed", "run", "before", "after", "reward", "", "gap", "decisions agree"):
        made.add_column(name, justify="left" if name == "run" else "right")
    for row in rows:
        agree = "" if row["decisions_agree"] is None else f"{row['decisions_agree']:.4f}"
        first, last = f"{row['reward_first']:.3f}", f"{row['reward_last']:.3f}"
        before, after = f"{row['accuracy_before']:.3f}", f"{row['accuracy_after']:.3f}"
        made.add_row(str(row["seed"]), row["run"], before, after, first, last, f"{row['gap_max']:.1e}", agree)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=RUNS, default=list(RUNS), help="the others stay as --out has them")
    parser.add_argument("--budget", type=int, default=32, help="entries per kv head, of every cache at its peak")
    parser.add_argument("--scorer", default="mlp")
    parser.add_argument("--retrofit", type=int, default=120, help="steps of it")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="of the model in the retrofit")
    parser.add_argument("--steps", type=int, default=40, help="of GRPO")
    parser.add_argument("--problems", type=int, default=512)
    parser.add_argument("--runs", type=Path, default=Path("runs/learned_rl"))
    parser.add_argument("--slots", type=int, default=min(2, os.cpu_count() or 1), help="stages run at a time")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/learned_rl.json"))
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    stages = Stages(options.slots)
    with ThreadPoolExecutor(len(options.seeds)) as pool:
        rows = [row for found in pool.map(lambda seed: run_seed(seed, stages, options), options.seeds) for row in found]
    known = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    at = {(row["seed"], row["run"]): row for row in [*known, *rows]}
    rows = sorted(at.values(), key=lambda row: (row["seed"], list(RUNS).index(row["run"])))
    Console().print(table(rows))
    settings = {n: str(value) for n, value in vars(options).items() if n not in ("runs", "out", "slots", "rows")}
    options.out.write_text(json.dumps({"settings": settings, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
