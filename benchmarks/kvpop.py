"""KVpop's retrofit on a longer running sum, measured by decoding: do learned evictions beat caches that do not learn?

docs/benchmarks.md describes the comparison. For each seed, a model of the task with 12 labels is trained with a full
cache. The smaller budget is the smallest at which streaming has an accuracy of 0.25 to 0.5 on the split `calibration`;
the larger budget is 1.25 times the smaller. A seed without such a budget is passed over and reported. All caches get
the same problems.

The model's learning rate is 1/12.5 of the scorers', as in the papers: a tiny model that learns fast adapts to any mask.
The oracle is the taught model under the best evictions, chosen by the attention that each token receives after it has
left the window.

A second call continues where the first stopped; a call with other seeds adds their rows to the file.

    python benchmarks/kvpop.py         # 100 minutes on two cores; writes benchmarks/results/kvpop.json
    python benchmarks/kvpop.py --taught-notes 0.1 --budgets 1 --out benchmarks/results/kvpop_few_notes.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from rich.table import Table

from benchmarks.results import Rows, over_seeds, show, with_rows_before, write
from benchmarks.staged import StagedSeed
from rollout import make_engine
from sparse_rl.attention.families import cache_shape
from sparse_rl.attention.oracle import oracle_trace
from sparse_rl.commands.checks import prepare_training
from sparse_rl.commands.examples import taught_examples
from sparse_rl.commands.quickstart import AIM, Stages
from sparse_rl.data.running_sum import save_untrained
from sparse_rl.methods.config import KVpopPolicyConfig
from sparse_rl.models.load import load_model
from sparse_rl.policies import make_policy
from sparse_rl.policies.cache import cache_bytes, state_bytes
from sparse_rl.recipe import load_recipe
from trainer.batches import Batch
from trainer.examples import Example
from trainer.losses.config import DistillationLossConfig
from trainer.losses.distillation import DistillationLoss

LABELS, NOTES, BUDGETS = 12, 0.1, (40, 44, 48, 52, 56, 60, 64)  # a text has about 130 tokens
LEARNING_RATE = 4e-4  # of the model; the scorers have 5e-3
TASK = "tasks.running_sum.synthetic"
UNTRAINED = Lock()  # guards torch's global generator, from which an untrained model is drawn
NOTES_IN_TEXT = {"0-1": 1, "2-3": 3, "4-": 999}  # label -> maximum number of notes
BASELINES = ("StreamingLLM+", "G-KV, distilled")
ARMS: dict[str, str | None] = {  # name -> recipe of its training; None means no training
    "streaming": None,
    "G-KV": None,
    "StreamingLLM+": "kvpop",
    "G-KV, distilled": "distill",
    "DMS": "kvpop",
    "KVpop, MLP": "kvpop",
    "KVpop, mLSTM": "kvpop",
    "KVpop, mLSTM immediate": "kvpop",
}


def key(row: dict[str, Any]) -> tuple[int, str, str]:
    return row["seed"], row["size"], row["arm"]


def in_order(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["size"] != "smaller", list(ARMS).index(row["arm"]) if row["arm"] else -1, row["seed"]


def caches(budget: int, length: float, shape: tuple[int, int, int]) -> dict[str, dict[str, Any]]:
    """Return the cache of each arm, for a model of `shape` (layers, kv heads, head dim).

    A cache holds `budget` entries at its peak. If scorers have a state, the cache holds fewer entries, by the bytes of
    the state. DMS aims at `budget` entries on average at the end of a text of `length` tokens.
    """
    window = budget // 2
    learned = {"policy": "kvpop", "sinks": 1, "window": window, "budget": budget}
    at_peak = {"sinks": 1, "budget": budget - 1, "period": 1}
    compression = (length - window) / (budget - window)  # only tokens that have left the window can be evicted
    state = state_bytes(make_policy({**learned, "scorer": "mlstm"}), 0, *shape)
    stateful = {**learned, "state_entries": -(-state // cache_bytes(1, *shape, itemsize=4))}
    return {
        "streaming": {"policy": "streaming", **at_peak},
        "G-KV": {"policy": "gkv", "window": 8, **at_peak},
        "StreamingLLM+": {**learned, "scorer": "recency"},
        "G-KV, distilled": {"policy": "gkv", "window": 8, **at_peak},
        "DMS": {"policy": "dms", "sinks": 1, "window": window, "compression": compression, "scorer": "mlp"},
        "KVpop, MLP": {**learned, "scorer": "mlp"},
        "KVpop, mLSTM": {**stateful, "scorer": "mlstm"},
        "KVpop, mLSTM immediate": {**stateful, "scorer": {"name": "mlstm", "readout": "immediate"}},
    }


@torch.no_grad()
def divergences(model: Path, cache: dict[str, Any], teacher: Any, rows: Sequence[Example]) -> list[float]:
    """Return KL(teacher || student) per token of each row's completion, decoded under the evictions of the cache."""
    student = load_model(model)
    engine = make_engine("hf", model=student, policy=cache, max_batch=64, progress=False)
    sums = torch.zeros(len(rows), dtype=torch.float64)
    for start in range(0, len(rows), 64):
        part = rows[start : start + 64]
        rollouts = engine.simulate([row.prompt for row in part], [row.completion for row in part])
        batch = Batch.make([Example.from_rollout(rollout) for rollout in rollouts], torch.device("cpu"))
        teacher_hidden, student_hidden = batch.hidden(teacher, replayed=False), batch.hidden(student, replayed=True)
        token_losses = DistillationLoss(DistillationLossConfig()).per_token(
            student.get_output_embeddings()(student_hidden), teacher.get_output_embeddings()(teacher_hidden)
        )
        row = start + batch.where[0]
        sums.index_add_(0, row, token_losses.double() / torch.bincount(row, minlength=len(rows))[row])
    return sums.tolist()


def by_notes(lines: Rows) -> dict[str, tuple[int, int]]:
    """Return label of NOTES_IN_TEXT -> the numbers of correct and of all completions with that number of notes."""
    counts = dict.fromkeys(NOTES_IN_TEXT, (0, 0))
    for line in lines:
        notes = line["completion"].count("[")
        label = next(label for label, most in NOTES_IN_TEXT.items() if notes <= most)
        right, asked = counts[label]
        counts[label] = (right + bool(line["correct"]), asked + 1)
    return counts


@torch.no_grad()
def oracle_divergences(teacher: Any, cache: dict[str, Any], rows: Sequence[Example]) -> list[float]:
    """Return each row's KL(teacher || teacher under the best evictions) per token, with the sizes of `cache`."""
    policy, results = make_policy(cache).config, []
    assert isinstance(policy, KVpopPolicyConfig)
    for row in rows:
        trace = oracle_trace(teacher, [*row.prompt, *row.completion], len(row.prompt), policy)
        batch = Batch.make([replace(row, trace=trace)], torch.device("cpu"))
        full, evicted = (
            teacher.get_output_embeddings()(batch.hidden(teacher, replayed=replayed)) for replayed in (False, True)
        )
        results.append(DistillationLoss(DistillationLossConfig()).per_token(evicted, full).mean().item())
    return results


class Taught(StagedSeed):
    """The model that is taught the task with a full cache. notes : probability of a note before each line"""

    def __init__(self, seed: int, stages: Stages, notes: float) -> None:
        super().__init__(seed, stages, Path(f"runs/kvpop/notes-{notes}"))
        self.notes, self.start = notes, self.folder / "sft" / "model"

    def teach(self) -> None:
        """Train a model of 0.2M parameters on the task, with a full cache."""
        with UNTRAINED:
            if not (untrained := self.folder / "untrained").exists():
                save_untrained(untrained, self.seed, hidden=96, intermediate=192)
        keys = [f"model={untrained}", f"data.synthetic.n={LABELS}", f"data.synthetic.seed={self.seed}"]
        keys += [f"data.synthetic.note_probability={self.notes}", "learning_rate=3e-3", "max_steps=2000"]
        self.stage("the task", self.start.parent, "train", "quickstart/sft", *keys)


class Seed(Taught):
    def __init__(self, seed: int, stages: Stages, options: argparse.Namespace) -> None:
        super().__init__(seed, stages, options.taught_notes)
        self.options = options

    def evaluate(self, label: str, place: Path, model: Path, split: str, size: int, *keys: str) -> list[dict[str, Any]]:
        """Return the rows of an evaluation that samples with the hf engine."""
        self.stage(label, place, "eval", "quickstart/eval", f"model={model}", "rollout.engine=hf",
                   f"{TASK}.split={split}", f"{TASK}.n={LABELS}", f"{TASK}.size={size}", "max_completion_length=280",
                   *keys)  # fmt: skip
        return json.loads((place / "eval.json").read_text())["rows"]

    def calibrate(self) -> dict[int, float]:
        """Return budget -> accuracy of streaming, on the problems of the split `calibration`."""
        budgets = ",".join(str(budget - 1) for budget in BUDGETS)  # at period 1 the peak is one more
        rows = self.evaluate("calibrating", self.folder / "calibration", self.start, "calibration", 256,
                             "cache={policy: streaming, sinks: 1, budget: 39, period: 1}",
                             f"sweep.cache.budget=[{budgets}]", "sweep.policy=[streaming]")  # fmt: skip
        return {row["budget"] + 1: row["accuracy"] for row in rows}

    def held_out(self) -> list[Example]:
        synthetic = f"{{task: running_sum, n: {LABELS}, size: {self.options.problems}, split: evaluation, "
        synthetic += f"seed: {self.seed + 3}, note_probability: {NOTES}}}"
        keys = [f"model={self.start}", "max_length=320", f"data.synthetic={synthetic}"]
        recipe = load_recipe("quickstart/kvpop", keys)
        return taught_examples(prepare_training(recipe, here=False))[0]

    def train(self, arm: str, place: Path, cache: dict[str, Any]) -> Path:
        """Return the directory of the arm's model. An arm without training has the taught model."""
        recipe, steps = ARMS[arm], self.options.steps
        if recipe is None:
            return self.start
        keys = [
            f"model={self.start}", f"data.synthetic.n={LABELS}", f"data.synthetic.seed={self.seed + 1}",
            f"data.synthetic.note_probability={NOTES}", f"cache={json.dumps(cache)}", "per_device_train_batch_size=32",
            f"max_steps={steps}", f"learning_rate={self.options.learning_rate}", "validation=null",
        ]  # fmt: skip
        if recipe == "distill":  # with the settings of the retrofit
            keys += ["lr_scheduler_type=cosine", "weight_decay=1e-4", "max_completion_length=280", "rollout.engine=hf"]
        else:
            keys += ["max_length=320"]
        if arm == "DMS":
            keys += [f"gates.anneal_steps={steps // 2}"]
        self.stage(f"{arm}, {place.parent.name}", place, "train", f"quickstart/{recipe}", *keys)
        return place / "model"

    def run(self) -> list[dict[str, Any]]:
        """Return a row per budget and arm, or one row with the accuracy at each budget if the seed is passed over."""
        self.teach()
        accuracy = self.calibrate()
        smaller = next((budget for budget in BUDGETS if AIM[0] <= accuracy[budget] <= AIM[1]), None)
        if smaller is None:
            return [{"seed": self.seed, "size": "", "arm": "", "passed_over": accuracy}]
        rows, teacher, losses = self.held_out(), load_model(self.start), []
        length, shape = statistics.mean(row.length for row in rows), cache_shape(teacher.config)
        for size, budget in (("smaller", smaller), ("larger", round(1.25 * smaller)))[: self.options.budgets]:
            each_cache = caches(budget, length, shape)
            oracle = self.folder / f"budget{budget}" / "oracle.json"
            if not oracle.exists():
                oracle.parent.mkdir(parents=True, exist_ok=True)
                with self.stages.slots:
                    oracle.write_text(json.dumps(oracle_divergences(teacher, each_cache["KVpop, MLP"], rows)))
            for arm in self.options.arms:
                cache = each_cache[arm]
                place = self.folder / f"budget{budget}" / arm.replace(", ", "-").replace(" ", "-")
                model = self.train(arm, place, cache)
                (row,) = self.evaluate(f"{arm}, {budget}: accuracy", place / "eval", model, "evaluation",
                                       self.options.problems, f"cache={json.dumps(cache)}")  # fmt: skip
                lines = [json.loads(line) for line in (place / "eval" / "eval_completions.jsonl").open()]
                if not (place / "kl.json").exists():
                    with self.stages.slots:
                        (place / "kl.json").write_text(json.dumps(divergences(model, cache, teacher, rows)))
                memory = state_bytes(make_policy(cache), 0, *shape)
                losses.append(
                    {
                        "seed": self.seed,
                        "size": size,
                        "budget": budget,
                        "arm": arm,
                        "cache": cache,
                        "peak_entries": row["peak_entries"],
                        "mean_peak_entries": row["mean_peak_entries"],
                        "state_bytes": memory,
                        "tokens": row["length"],
                        "accuracy": row["accuracy"],
                        "by_notes": by_notes(lines),
                        "kl": statistics.mean(json.loads((place / "kl.json").read_text())),
                        "oracle_kl": statistics.mean(json.loads(oracle.read_text())),
                    }
                )
        return losses


def summarized(rows: Rows) -> Rows:
    """Return for each size and arm: the seeds, means with their errors, and differences to each baseline."""
    at = {key(row): row for row in rows}
    groups = []
    for size, arm in dict.fromkeys((row["size"], row["arm"]) for row in rows):
        arm_rows = [row for row in rows if (row["size"], row["arm"]) == (size, arm)]
        one: dict[str, Any] = {"size": size, "arm": arm, "seeds": [row["seed"] for row in arm_rows]}
        for what in ("accuracy", "kl"):
            values = [row[what] for row in arm_rows]
            one[what] = {"mean": over_seeds(values), "per_seed": values}
            for baseline in BASELINES:
                theirs = [at.get((row["seed"], size, baseline)) for row in arm_rows]
                if arm != baseline and all(theirs):
                    pairs = zip(values, theirs, strict=True)
                    one[what][f"over {baseline}"] = over_seeds([value - other[what] for value, other in pairs if other])
        one["accuracy_by_notes"] = {
            label: sum(row["by_notes"][label][0] for row in arm_rows) / asked
            for label in NOTES_IN_TEXT
            if (asked := sum(row["by_notes"][label][1] for row in arm_rows))
        }
        for name in ("peak_entries", "mean_peak_entries", "state_bytes", "tokens"):
            one[name] = [row[name] for row in arm_rows]
        groups.append(one)
    return groups


def tables(summary: Sequence[dict[str, Any]]) -> list[Table]:
    def shown(pair: tuple[float, float] | None, digits: int) -> str:
        return "" if pair is None else f"{pair[0]:+.{digits}f} ± {pair[1]:.{digits}f}"

    def of_each(values: dict[str, Any], digits: int) -> str:
        per_seed = " ".join(f"{value:.{digits}f}" for value in values["per_seed"])
        return f"{values['mean'][0]:.{digits}f} ± {values['mean'][1]:.{digits}f} ({per_seed})"

    printed = []
    for size in dict.fromkeys(one["size"] for one in summary):
        named = " ".join(map(str, next(one["seeds"] for one in summary if one["size"] == size)))
        table = Table(title=f"The {size} budget: mean over seeds ± its standard error (seeds {named})")
        over = [f"over {name}" for name in BASELINES]
        shape = ("peak entries", "mean", "state bytes")
        for name in ("cache", "accuracy", "with 0-1, 2-3, more notes", *over, "KL", over[0], *shape):
            table.add_column(name, justify="left" if name == "cache" else "right")
        for one in (one for one in summary if one["size"] == size):
            right, kl = one["accuracy"], one["kl"]
            table.add_row(
                one["arm"], of_each(right, 3),
                ", ".join(f"{share:.2f}" for share in one["accuracy_by_notes"].values()),
                *(shown(right.get(f"over {name}"), 3) for name in BASELINES),
                of_each(kl, 4), shown(kl.get(over[0]), 4),
                ", ".join(map(str, one["peak_entries"])), ", ".join(f"{x:.1f}" for x in one["mean_peak_entries"]),
                str(max(one["state_bytes"])),
            )  # fmt: skip
        printed.append(table)
    return printed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seeds", type=int, nargs="*", default=[0, 1, 2], help="if empty, only the rows of the file are shown"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--problems", type=int, default=512)
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=ARMS,
        default=list(ARMS),
        help="arms to run; the rows of the others stay in the file",
    )
    parser.add_argument("--budgets", type=int, default=2, choices=(1, 2), help="1: only the smaller budget")
    parser.add_argument(
        "--taught-notes",
        type=float,
        default=0.3,
        help="probability of a note before each line, while the task is taught",
    )
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help="learning rate of the model")
    parser.add_argument("--slots", type=int, default=min(2, os.cpu_count() or 1), help="stages run at a time")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kvpop.json"))
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("steps", "problems", "taught_notes", "learning_rate")}
    settings |= {"labels": LABELS, "note_probability": NOTES}
    with_rows_before(options.out, settings, [], key)  # before hours of work
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    stages = Stages(options.slots)
    with ThreadPoolExecutor(max(1, len(options.seeds))) as pool:
        unsorted = [
            row for rows in pool.map(lambda seed: Seed(seed, stages, options).run(), options.seeds) for row in rows
        ]
    sorted_rows = sorted(with_rows_before(options.out, settings, unsorted, key), key=in_order)
    rows = [row for row in sorted_rows if "passed_over" not in row]
    summary = summarized(rows)
    if options.seeds:
        write(options.out, settings=settings, summary=summary, rows=sorted_rows)
    show(tables(summary), options.markdown)
    for size in dict.fromkeys(row["size"] for row in rows):
        oracle_kl = {row["seed"]: row["oracle_kl"] for row in rows if row["size"] == size}
        named = ", ".join(f"seed {seed}: {kl:.4f}" for seed, kl in sorted(oracle_kl.items()))
        print(f"KL of the taught model under the best evictions, the {size} budget: {named}")
    for row in (row for row in sorted_rows if "passed_over" in row):
        accuracy = ", ".join(f"{budget}: {value:.2f}" for budget, value in row["passed_over"].items())
        print(f"seed {row['seed']} passed over: no budget leaves 0.25 to 0.5 accuracy ({accuracy})")


if __name__ == "__main__":
    main()
