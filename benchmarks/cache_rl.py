"""GRPO under a cache that is more than eviction, on the quickstart's task: does it pay, and is what is replayed exact?

    learned    KVpop. Per seed the shipped model is retrofitted with scorers for some steps, under a budget that leaves
               it room to learn; from there GRPO with scorers frozen, in both engines, and with scorers that learn on
    matched    Attention Matching, from the shipped model, in both engines; with gradients through what compactions fit,
               and with these as constants
    paged      clustered attention, from the shipped model: GRPO with the recorded pages replayed, and trained under
               full attention on samples of the same kind. Others have as many entries as it reads on average, or at
               most; and, before RL alone, as many as it holds, which is all

Beside each GRPO from the shipped model under streaming and G-KV with as many entries at their peak, or as `paged` says.
Accuracy is measured before and after, each under its own cache. A second call goes on where the first one stopped.

    python benchmarks/cache_rl.py learned     # on two cores; writes benchmarks/results/cache_rl_learned.json
    python benchmarks/cache_rl.py matched
    python benchmarks/cache_rl.py paged
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

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.entries_read import read_and_held
from sparse_rl.commands.quickstart import Stages
from sparse_rl.metrics import read_metrics

SHIPPED = "quickstart/model"
HF, VLLM = "rollout.engine=hf", "rollout.engine=vllm rollout.kv_cache_gb=0.2"
LEARN = "scorers={{weight:1.0,learning_rate:{},boundary:{{queries:64}}}}"
RATES = ("1e-3", "1e-4", "1e-5")
NO_RL = None
RUNS: dict[str, dict[str, tuple[str, str | None]]] = {  # question -> row -> (cache, what the recipe changes)
    "learned": {
        "KVpop, scorers frozen, hf": ("kvpop", HF),
        "KVpop, scorers frozen, vllm": ("kvpop", VLLM),
        **{f"KVpop, scorers learn at {at}, hf": ("kvpop", f"{HF} {LEARN.format(at)}") for at in RATES},
        "streaming, hf": ("streaming", HF),
        "G-KV, hf": ("gkv", HF),
    },
    "matched": {
        "Attention Matching, hf": ("am", HF),
        "Attention Matching, vllm": ("am", VLLM),
        "Attention Matching, constants, hf": ("am", f"{HF} match_gradient=constant"),
        "streaming, hf": ("streaming", HF),
        "G-KV, hf": ("gkv", HF),
    },
    "paged": {
        "clustered, replayed": ("clustered", HF),
        "clustered, trained under full attention": ("clustered", f"{HF} train_attention=full"),
        "streaming, as many read on average": ("streaming", HF),
        "G-KV, as many read on average": ("gkv", HF),
        "streaming, as many read at most": ("streaming-most", HF),
        "G-KV, as many read at most": ("gkv-most", HF),
        "streaming, as many held": ("streaming-held", NO_RL),
        "G-KV, as many held": ("gkv-held", NO_RL),
    },
}
STEPS = {"learned": 40, "matched": 24, "paged": 24}
PEAK = {"learned": 32, "matched": 44, "paged": 32}
CLUSTERED = "{policy: clustered, page: 8, window: 6, sinks: 1, open_pages: 2}"
MOST_READ, HELD = 48, 170  # of CLUSTERED, in 18 tokens of prompt and 152 of completion


def caches(question: str, peak: int, scorer: str) -> dict[str, str]:
    """Each holds `peak` entries at its peak, where its name or the policy does not say otherwise."""
    period = 16 if question == "matched" else 1
    budget = peak - period
    more = {
        f"{policy}-{name}": f"{{policy: {policy}, budget: {entries - 1}, sinks: 1, period: 1{window}}}"
        for policy, window in (("streaming", ""), ("gkv", ", window: 8"))
        for name, entries in (("most", MOST_READ), ("held", HELD))
    }
    return {
        **more,
        "clustered": CLUSTERED,
        "kvpop": f"{{policy: kvpop, budget: {peak}, sinks: 1, window: {peak // 2}, scorer: {scorer}}}",
        "am": f"{{policy: am, budget: {budget}, sinks: 1, window: 8, period: {period}, reference_queries: {peak - 4}}}",
        "streaming": f"{{policy: streaming, budget: {budget}, sinks: 1, period: {period}}}",
        "gkv": f"{{policy: gkv, budget: {budget}, sinks: 1, window: 8, period: {period}}}",
    }


def run_seed(seed: int, stages: Stages, options: argparse.Namespace) -> list[dict[str, Any]]:
    folder, held = options.runs / f"seed{seed}", caches(options.question, options.peak, options.scorer)

    def stage(label: str, place: Path, command: str, recipe: str, *keys: str) -> None:
        done = place / ("eval.json" if command == "eval" else "model/config.json")
        if not done.exists():
            words = [command, recipe, f"output_dir={place}", f"seed={seed}", *keys, "--overwrite"]
            stages.run(f"seed {seed}: {label}", place, words if command == "eval" else words[:-1])

    def evaluated(label: str, place: Path, model: str, cache: str) -> dict[str, Any]:
        stage(f"evaluating {label}", place, "eval", "quickstart/eval", f"model={model}", f"cache={cache}",
              HF, f"tasks.running_sum.synthetic.size={options.problems}")  # fmt: skip
        row = json.loads((place / "eval.json").read_text())["rows"][0]
        return {**row, "read": mean_read(place, row)}

    retrofit = folder / "retrofit"
    if any(RUNS[options.question][name][0] == "kvpop" for name in options.rows):
        keys = [f"cache={held['kvpop']}", f"data.synthetic.seed={seed + 1}", f"max_steps={options.retrofit}"]
        keys += [f"learning_rate={options.learning_rate}", "validation=null"]
        stage("retrofit", retrofit, "train", "quickstart/kvpop", *keys)
    rows = []
    for name in options.rows:
        policy, changes = RUNS[options.question][name]
        start = str(retrofit / "model") if policy == "kvpop" else SHIPPED
        before = evaluated(f"before: {policy}", folder / f"start-{policy}", start, held[policy])
        row = {"seed": seed, "run": name, "cache": held[policy]}
        row |= {"accuracy_before": before["accuracy"], "read_before": before["read"]}
        rows.append(row)
        if changes is NO_RL:
            continue
        place = folder / name.replace(", ", "-").replace(" ", "-")
        stage(name, place, "train", "quickstart/grpo", f"model={start}", f"cache={held[policy]}",
              f"data.synthetic.seed={seed + 2}", f"max_steps={options.steps}", *changes.split())  # fmt: skip
        after = evaluated(name, place / "eval", str(place / "model"), held[policy])
        steps = [line for line in read_metrics(place) if "loss" in line]
        rewards = [line["reward"] for line in steps]
        ends = max(1, min(5, len(steps) // 2))
        agree = [line["cache/decisions_agree"] for line in steps if "cache/decisions_agree" in line]
        row |= {
            "accuracy_after": after["accuracy"],
            "read_after": after["read"],
            "reward_first": statistics.mean(rewards[:ends]),
            "reward_last": statistics.mean(rewards[-ends:]),
            "gap_max": max(line["replay/gap_max"] for line in steps),
            "decisions_agree": min(agree) if agree else None,
            "steps": len(steps),
        }
    return rows


def mean_read(place: Path, row: dict[str, Any]) -> float:
    """Entries of a kv head that a query of decoding reads, over all queries of an evaluation.

    All prompts of the task have as many tokens.
    """
    lines = (place / "eval_completions.jsonl").read_text().splitlines()
    prompt, lengths = row["longest_prompt"], [json.loads(line)["tokens"] for line in lines]
    queries = torch.cat([torch.arange(prompt, prompt + length - 1) for length in lengths])
    return read_and_held({"policy": row["policy"], **row["parameters"]}, prompt, queries)[0].mean().item()


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table(title="GRPO under several caches: accuracy under the own cache, mean reward, largest gap")
    for name in ("seed", "run", "before", "after", "read before", "after", "reward", "", "gap", "decisions agree"):
        made.add_column(name, justify="left" if name == "run" else "right")
    shown = {
        "accuracy_before": ".3f", "accuracy_after": ".3f", "read_before": ".1f", "read_after": ".1f",
        "reward_first": ".3f", "reward_last": ".3f", "gap_max": ".1e", "decisions_agree": ".4f",
    }  # fmt: skip
    for row in rows:
        cells = ["" if row.get(name) is None else format(row[name], how) for name, how in shown.items()]
        made.add_row(str(row["seed"]), row["run"], *cells)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", choices=RUNS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", help="the others stay as --out has them")
    parser.add_argument("--peak", type=int, help="entries per kv head, of every cache at its peak")
    parser.add_argument("--scorer", default="mlp")
    parser.add_argument("--retrofit", type=int, default=120, help="steps of it")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="of the model in the retrofit")
    parser.add_argument("--steps", type=int, help="of GRPO")
    parser.add_argument("--problems", type=int, default=512)
    parser.add_argument("--runs", type=Path, default=Path("runs/cache_rl"))
    parser.add_argument("--slots", type=int, default=min(2, os.cpu_count() or 1), help="stages run at a time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    asked = options.question
    options.rows = options.rows or list(RUNS[asked])
    options.peak, options.steps = options.peak or PEAK[asked], options.steps or STEPS[asked]
    options.out = options.out or Path(f"benchmarks/results/cache_rl_{asked}.json")
    options.runs /= asked
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    stages = Stages(options.slots)
    with ThreadPoolExecutor(len(options.seeds)) as pool:
        rows = [row for found in pool.map(lambda seed: run_seed(seed, stages, options), options.seeds) for row in found]
    known = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    at = {(row["seed"], row["run"]): row for row in [*known, *rows]}
    rows = sorted(at.values(), key=lambda row: (row["seed"], list(RUNS[asked]).index(row["run"])))
    Console(width=None if sys.stdout.isatty() else 160).print(table(rows))
    settings = {n: str(value) for n, value in vars(options).items() if n not in ("runs", "out", "slots", "rows")}
    options.out.write_text(json.dumps({"settings": settings, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
