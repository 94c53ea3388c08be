"""GRPO under caches that do more than evict, on small tasks: the gain in accuracy, and the replay gap.

The questions are described in docs/benchmarks.md: `learned`, `few_notes` and `looked_up` (KVpop), `matched` (Attention
Matching) and `paged` (clustered attention). The control of KVpop is StreamingLLM+, the same retrofit without a scorer.
Streaming and G-KV start from the model before the retrofit. Except in `paged`, all caches of a question have the same
number of entries at their peak. Accuracy is measured before and after GRPO, under the policy's own cache. Standard
errors are over seeds.

A second call continues where the first stopped; a call with other seeds adds their rows to the file.

    python benchmarks/cache_rl.py learned     # on two cores; writes benchmarks/results/cache_rl_learned.json
    python benchmarks/cache_rl.py looked_up --seeds 0 1 2 3 4
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from rich.table import Table

from benchmarks import kvpop
from benchmarks.entries_read import read_and_held
from benchmarks.results import Rows, over_seeds, show, with_rows_before, write
from benchmarks.staged import StagedSeed
from sparse_rl.commands.quickstart import Stages
from sparse_rl.metrics import read_metrics

HF, VLLM = "rollout.engine=hf", "rollout.engine=vllm rollout.kv_cache_gb=0.2"
LEARN = "scorers={{weight:1.0,learning_rate:{},boundary:{{queries:64}}}}"
RATES = ("1e-3", "1e-4", "1e-5")
NO_RL = None
CONTROL = "StreamingLLM+, hf"  # the same retrofit without a scorer
AGAINST_WINDOW: dict[str, tuple[str, str | None]] = {
    "KVpop, scorers frozen, hf": ("kvpop", HF),
    CONTROL: ("recency", HF),
    "streaming, hf": ("streaming", HF),
    "G-KV, hf": ("gkv", HF),
}


@dataclass(frozen=True)
class Question:
    """The settings of one question.

    runs : name of a row -> name of its cache, and the keys that the row changes in GRPO's recipe; NO_RL means no GRPO
    peak : entries per kv head that a cache holds at its peak (see above for exceptions)
    steps : number of GRPO steps
    synthetic : the task, without split, size and seed
    retrofit : number of steps of the retrofit, and the keys that are changed in the retrofit's recipe
    control : row with which the other rows are compared
    longest : maximum number of tokens of a completion
    reward : reward of GRPO, whose mean is also the accuracy
    """

    runs: dict[str, tuple[str, str | None]]
    peak: int
    steps: int
    synthetic: str = "task: running_sum"
    retrofit: tuple[int, tuple[str, ...]] = (120, ("learning_rate=2e-4",))
    control: str = CONTROL
    longest: int = 152
    reward: str = "boxed"


SLOW = "learning_rate=4e-4"  # 1/12.5 of the scorers' rate, as in kvpop.py
QUESTIONS = {
    "learned": Question(
        {
            **AGAINST_WINDOW,
            "KVpop, scorers frozen, vllm": ("kvpop", VLLM),
            **{f"KVpop, scorers learn at {at}, hf": ("kvpop", f"{HF} {LEARN.format(at)}") for at in RATES},
        },
        peak=32, steps=40,
    ),
    "few_notes": Question(
        AGAINST_WINDOW, peak=48, steps=40, synthetic="task: running_sum, n: 12, note_probability: 0.1",
        retrofit=(200, (SLOW, "max_length=320")), longest=280,
    ),
    "looked_up": Question(
        AGAINST_WINDOW, peak=24, steps=40, synthetic="task: retrieval, facts: 8, restated: 1, filler: 5",
        retrofit=(200, (SLOW,)), longest=24, reward="benchmarks/facts_said.py:facts_said",
    ),
    "matched": Question(
        {
            "Attention Matching, hf": ("am", HF),
            "Attention Matching, vllm": ("am", VLLM),
            "Attention Matching, constants, hf": ("am", f"{HF} match_gradient=constant"),
            "streaming, hf": ("streaming", HF),
            "G-KV, hf": ("gkv", HF),
            "streaming, period 1, hf": ("streaming-always", HF),
            "G-KV, period 1, hf": ("gkv-always", HF),
        },
        peak=44, steps=24, control="streaming, period 1, hf",
    ),
    "paged": Question(
        {
            "clustered, replayed": ("clustered", HF),
            "clustered, trained under full attention": ("clustered", f"{HF} train_attention=full"),
            "streaming, as many read on average": ("streaming", HF),
            "G-KV, as many read on average": ("gkv", HF),
            "streaming, as many read at most": ("streaming-most", HF),
            "G-KV, as many read at most": ("gkv-most", HF),
            "streaming, as many held": ("streaming-held", NO_RL),
            "G-KV, as many held": ("gkv-held", NO_RL),
        },
        peak=32, steps=24, control="streaming, as many read at most",
    ),
}  # fmt: skip
CLUSTERED = "{policy: clustered, page: 8, window: 6, sinks: 1, open_pages: 2}"
MOST_READ, HELD = 48, 170  # entries under CLUSTERED, for 18 tokens of prompt and 152 of completion


def caches(name: str) -> dict[str, str]:
    """Return name -> cache block of the recipe, for the caches of the question `name`."""
    peak, period = QUESTIONS[name].peak, 16 if name == "matched" else 1
    budget = peak - period
    baselines = {
        f"{policy}-{size}": f"{{policy: {policy}, budget: {entries - 1}, sinks: 1, period: 1{window}}}"
        for policy, window in (("streaming", ""), ("gkv", ", window: 8"))
        for size, entries in (("most", MOST_READ), ("held", HELD), ("always", peak))
    }
    learned = f"policy: kvpop, budget: {peak}, sinks: 1, window: {peak // 2}"
    return {
        **baselines,
        "clustered": CLUSTERED,
        "kvpop": f"{{{learned}, scorer: mlp}}",
        "recency": f"{{{learned}, scorer: recency}}",
        "am": f"{{policy: am, budget: {budget}, sinks: 1, window: 8, period: {period}, reference_queries: {peak - 4}}}",
        "streaming": f"{{policy: streaming, budget: {budget}, sinks: 1, period: {period}}}",
        "gkv": f"{{policy: gkv, budget: {budget}, sinks: 1, window: 8, period: {period}}}",
    }


def key(row: dict[str, Any]) -> tuple[int, str]:
    return row["seed"], row["run"]


class Seed(StagedSeed):
    def __init__(self, seed: int, stages: Stages, options: argparse.Namespace) -> None:
        super().__init__(seed, stages, options.runs / options.question)
        self.options, self.question, self.caches = options, QUESTIONS[options.question], caches(options.question)

    def synthetic(self, size: int, split: str, seed: int) -> str:
        return f"{{{self.question.synthetic}, size: {size}, split: {split}, seed: {seed}}}"

    def taught(self) -> str:
        """Return the directory of the model from which all runs start, after training it if necessary."""
        if self.options.question == "few_notes":
            taught = kvpop.Taught(self.seed, self.stages, notes=0.1)
            taught.teach()
            return str(taught.start)
        if self.options.question == "looked_up":
            short, folder = self.folder / "short", self.folder / "sft"
            self.stage("short documents", short, "train", "retrieval/short")
            data = f"data.synthetic={self.synthetic(25600, 'train', self.seed)}"
            self.stage("the task", folder, "train", "retrieval/sft", f"model={short / 'model'}", data,
                       "max_steps=400", "per_device_train_batch_size=64")  # fmt: skip
            return str(folder / "model")
        return "quickstart/model"

    def retrofitted(self, start: str, cache: str) -> str:
        steps, changes = self.question.retrofit
        folder = self.folder / f"retrofit-{cache}"
        self.stage(f"retrofit, {cache}", folder, "train", "quickstart/kvpop", f"model={start}", f"max_steps={steps}",
                   f"data.synthetic={self.synthetic(20000, 'train', self.seed + 1)}", f"cache={self.caches[cache]}",
                   "validation=null", *changes)  # fmt: skip
        return str(folder / "model")

    def evaluated(self, label: str, place: Path, model: str, cache: str) -> dict[str, Any]:
        task = f"tasks={{facts: {{synthetic: {self.synthetic(self.options.problems, 'evaluation', 0)}}}}}"
        self.stage(f"evaluating {label}", place, "eval", "quickstart/eval", f"model={model}", HF, task,
                   f"cache={self.caches[cache]}", f"accuracy={self.question.reward}",
                   f"max_completion_length={self.question.longest}")  # fmt: skip
        row = json.loads((place / "eval.json").read_text())["rows"][0]
        lines = [json.loads(line) for line in (place / "eval_completions.jsonl").read_text().splitlines()]
        right = statistics.mean(line["reward"] for line in lines)
        return {"accuracy": right, "read": mean_read(row, [line["tokens"] for line in lines])}

    def run(self) -> Rows:
        rows, taught = [], self.taught()
        for name in self.options.rows:
            cache, changes = self.question.runs[name]
            start = self.retrofitted(taught, cache) if cache in ("kvpop", "recency") else taught
            before = self.evaluated(f"before: {cache}", self.folder / f"start-{cache}", start, cache)
            row = {"seed": self.seed, "run": name, "cache": self.caches[cache]}
            rows.append(row | {"accuracy_before": before["accuracy"], "read_before": before["read"]})
            if changes is not NO_RL:
                rows[-1] |= self.trained(name, start, cache, changes.split())
        return rows

    def trained(self, name: str, start: str, cache: str, changes: Sequence[str]) -> dict[str, Any]:
        place = self.folder / name.replace(", ", "-").replace(" ", "-")
        self.stage(name, place, "train", "quickstart/grpo", f"model={start}", f"cache={self.caches[cache]}",
                   f"data.synthetic={self.synthetic(20000, 'train', self.seed + 2)}", f"max_steps={self.options.steps}",
                   f"rewards=[{self.question.reward}]", f"max_completion_length={self.question.longest}",
                   *changes)  # fmt: skip
        after = self.evaluated(name, place / "eval", str(place / "model"), cache)
        steps = [line for line in read_metrics(place) if "loss" in line]
        rewards = [line["reward"] for line in steps]
        ends = max(1, min(5, len(steps) // 2))
        agree = [line["cache/decisions_agree"] for line in steps if "cache/decisions_agree" in line]
        return {
            "accuracy_after": after["accuracy"],
            "read_after": after["read"],
            "reward_first": statistics.mean(rewards[:ends]),
            "reward_last": statistics.mean(rewards[-ends:]),
            "gap_max": max(line["replay/gap_max"] for line in steps),
            "decisions_agree": min(agree) if agree else None,
            "steps": len(steps),
        }


def mean_read(row: dict[str, Any], lengths: Sequence[int]) -> float:
    """Return the mean number of entries per kv head that a decoding query reads. Prompts of a task are equally long."""
    prompt = row["longest_prompt"]
    queries = torch.cat([torch.arange(prompt, prompt + length - 1) for length in lengths])
    return read_and_held({"policy": row["policy"], **row["parameters"]}, prompt, queries)[0].mean().item()


def table(question: str, rows: Rows) -> Table:
    """Return a table with a row per run: accuracy before and after GRPO for each seed, and means over the seeds."""
    asked, seeds = QUESTIONS[question], sorted({row["seed"] for row in rows})
    named = {(row["run"], row["seed"]): row for row in rows}
    rendered = Table(
        title=f"{question}: accuracy under the run's own cache, before → after GRPO; ± standard error over seeds"
    )
    rendered.add_column("run")
    for name in (
        *(f"seed {seed}" for seed in seeds),
        "after",
        f"over {asked.control}",
        "reward",
        "gap",
        "agree",
        "read",
    ):
        rendered.add_column(name, justify="right")
    for run in (name for name in asked.runs if (name, seeds[0]) in named):
        of_seeds = [named[run, seed] for seed in seeds if (run, seed) in named]
        before_after = [
            " → ".join(f"{row[at]:.3f}" for at in ("accuracy_before", "accuracy_after") if at in row)
            for row in of_seeds
        ]
        cells = [""] * 5
        if all("accuracy_after" in row for row in of_seeds):
            after = [row["accuracy_after"] for row in of_seeds]
            control = [named.get((asked.control, row["seed"])) for row in of_seeds]
            pairs = zip(after, control, strict=True)
            over = [value - other["accuracy_after"] for value, other in pairs if other and run != asked.control]
            cells = [
                "{:.3f} ± {:.3f}".format(*over_seeds(after)),
                "{:+.3f} ± {:.3f}".format(*over_seeds(over)) if over else "",
                "{:+.3f} ± {:.3f}".format(*over_seeds([row["reward_last"] - row["reward_first"] for row in of_seeds])),
                f"{max(row['gap_max'] for row in of_seeds):.1e}",
                f"{min(agree):.4f}" if all(agree := [row["decisions_agree"] for row in of_seeds]) else "",
            ]
        rendered.add_row(
            run,
            *before_after,
            *[""] * (len(seeds) - len(of_seeds)),
            *cells,
            *(f"{row['read_before']:.1f}" for row in of_seeds[:1] if "read_before" in row),
        )
    return rendered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument(
        "--seeds", type=int, nargs="*", default=[0, 1, 2], help="if empty, only the rows of the file are shown"
    )
    parser.add_argument("--rows", nargs="+", help="rows to measure; the others stay in the file")
    parser.add_argument("--steps", type=int, help="number of GRPO steps")
    parser.add_argument("--problems", type=int, default=512)
    parser.add_argument("--runs", type=Path, default=Path("runs/cache_rl"))
    parser.add_argument("--slots", type=int, default=min(2, os.cpu_count() or 1), help="stages run at a time")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    asked = QUESTIONS[options.question]
    options.rows, options.steps = options.rows or list(asked.runs), options.steps or asked.steps
    options.out = options.out or Path(f"benchmarks/results/cache_rl_{options.question}.json")
    settings = {
        "question": options.question, "peak": asked.peak, "steps": options.steps, "problems": options.problems,
        "task": asked.synthetic, "retrofit": list(asked.retrofit), "reward": asked.reward,
    }  # fmt: skip
    with_rows_before(options.out, settings, [], key)  # before hours of work
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    stages = Stages(options.slots)
    with ThreadPoolExecutor(max(1, len(options.seeds))) as pool:
        rows = [row for rows in pool.map(lambda seed: Seed(seed, stages, options).run(), options.seeds) for row in rows]
    order = list(asked.runs)
    rows = sorted(
        with_rows_before(options.out, settings, rows, key), key=lambda row: (row["seed"], order.index(row["run"]))
    )
    show([table(options.question, rows)], options.markdown)
    if options.seeds:
        write(options.out, settings=settings, rows=rows)


if __name__ == "__main__":
    main()
