"""Trainings under small caches: each study trains models by `sparse-rl train` and evaluates them by `sparse-rl eval`.

    python benchmarks/training.py learned     # --small tests that it runs; writes benchmarks/results/STUDY.json

docs/benchmarks.md describes the studies. An arm is a row: a training (a recipe with changed keys), and an evaluation
under the arm's own cache. Printed are means and standard errors over seeds, and the same of the difference to the
study's control. Finished stages are kept in runs/training, so a second call continues, and more seeds can be added.

learned, few_notes, looked_up    GRPO under KVpop and under StreamingLLM+, the same retrofit without a scorer
matched                          GRPO under Attention Matching
paged                            GRPO under clustered attention, and with as many entries as it reads or holds
kvpop, kvpop_larger, kvpop_few_notes   the retrofit of KVpop and others. The budget is the smallest at which streaming
                                 has an accuracy of 0.25 to 0.5 on the split `calibration`, or 1.25 times as much
distillation                     distillation before GRPO
one_liners                       GRPO with the reward `code`
one_step_ahead                   GRPO on completions that weights of some updates before have sampled
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock, Semaphore
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import pandas
import torch

from benchmarks.entries_read import read_and_held
from benchmarks.results import HOUSE, RESULTS, Rows, write
from sparse_rl.metrics import read_metrics

Cache = Mapping[str, Any]
QUICKSTART, SUM, TWELVE = "quickstart/model", "task: running_sum", "task: running_sum, n: 12"
HF, VLLM = ("rollout.engine=hf",), ("rollout.engine=vllm", "rollout.kv_cache_gb=0.2")
LOCK = Lock()  # guards torch's global generator


def synthetic(task: str, size: int, split: str, seed: int) -> str:
    return f"{{{task}, size: {size}, split: {split}, seed: {seed}}}"


def command(made: Path, *words: str, slots: Semaphore, late: int = 0) -> None:
    """Run a `sparse-rl` command, unless the file that it leaves exists. Its output goes to a log beside the folder.

    late : number of updates by which the engine of a training is late
    """
    program = [f"{HOUSE}/benchmarks/late.py", str(late)] if late else ["-m", "sparse_rl.cli"]
    if not made.exists():
        log = made.parent.with_name(f"{made.parent.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with slots, log.open("w") as file:
            print(" ".join(words), flush=True)
            run = subprocess.run([sys.executable, *program, *words], stdout=file, stderr=file, check=False)
        if run.returncode:
            raise SystemExit(f"{log}: {log.read_text().strip().splitlines()[-1]}")


@dataclass
class Seed:
    """The stages of one seed. small : few problems and steps"""

    number: int
    folder: Path
    slots: Semaphore
    small: bool

    def train(self, name: str, recipe: str, *keys: str, start: str | None = QUICKSTART, late: int = 0) -> str:
        """Return the directory of the model that a training leaves."""
        place = self.folder / name
        words = ["train", recipe, f"output_dir={place}", f"seed={self.number}", *([f"model={start}"] if start else [])]
        small = ["max_steps=2"] * self.small
        command(place / "model/config.json", *words, *keys, *small, slots=self.slots, late=late)
        return str(place / "model")

    def evaluate(self, name: str, model: str, *keys: str) -> Path:
        """Return the folder of an evaluation."""
        place = self.folder / name
        words = ["eval", "quickstart/eval", f"output_dir={place}", f"seed={self.number}", f"model={model}", *HF, *keys]
        command(place / "eval.json", *words, "--overwrite", slots=self.slots)
        return place


@dataclass(frozen=True)
class Arm:
    """A row of a study.

    cache : cache of the evaluation, and of the training unless `keys` names another
    start : name or directory of the model of which the training starts, or an earlier arm; None: the recipe's
    recipe, keys : the training; without a recipe, the start is evaluated
    late : number of updates by which the weights that sample are older than those that are trained
    """

    cache: Cache
    start: str | None = QUICKSTART
    recipe: str | None = None
    keys: tuple[str, ...] = ()
    late: int = 0


@dataclass(frozen=True)
class Study:
    """A table. arms : function of a seed. task, longest, reward : of the evaluations. full : also with a full cache"""

    arms: Callable[[Seed], dict[str, Arm]]
    control: str
    task: str = SUM
    longest: int = 152
    reward: str = "boxed"
    problems: int = 512
    full: bool = False
    divergence: bool = False

    def rows(self, seed: Seed) -> Rows:
        arms, models, rows = self.arms(seed), dict[str, str | None](), Rows()
        problems = 8 if seed.small else self.problems
        task = f"tasks={{held_out: {{synthetic: {synthetic(self.task, problems, 'evaluation', 0)}}}}}"
        keys = (task, f"accuracy={self.reward}", f"max_completion_length={self.longest}")
        for name, arm in arms.items():
            model = start = models.get(arm.start or "", arm.start)
            cache = f"cache={json.dumps(arm.cache)}"
            if arm.recipe is not None:
                cached = () if arm.recipe.endswith("sft") else (cache,)
                model = seed.train(name, arm.recipe, *cached, *arm.keys, start=start, late=arm.late)
            models[name] = model
            assert model is not None
            row = {"arm": name, "seed": seed.number, "cache": arm.cache, **trained(seed.folder / name)}
            row |= evaluated(seed.evaluate(f"{name}, evaluated", model, *keys, cache))
            if self.full:
                place = seed.evaluate(f"{name}, with a full cache", model, *keys, "cache={policy: full}")
                row["accuracy with a full cache"] = evaluated(place)["accuracy"]
            if self.divergence:
                place = seed.folder / f"{name}, divergence.json"
                if not place.exists():
                    with seed.slots:
                        kl = divergences(model, arm.cache, str(arms["streaming"].start), held_out(seed, problems))
                    place.write_text(json.dumps(statistics.mean(kl)))
                row["KL"] = json.loads(place.read_text())
            rows.append(row)
        return rows


def trained(run: Path) -> dict[str, float]:
    """Return the largest gap and the rewards of GRPO, and the KL before and after a distillation."""
    lines = read_metrics(run)
    rewards = [line["reward"] for line in lines if "reward" in line]
    gaps = [line["replay/gap_max"] for line in lines if "replay/gap_max" in line]
    kls = [line["eval_kl"] for line in lines if "eval_kl" in line]
    row = {"gap": max(gaps), "reward of ten first steps": statistics.mean(rewards[:10])} if gaps else {}
    return row | ({"KL before": kls[0], "KL after": kls[-1]} if kls else {})


def evaluated(place: Path) -> dict[str, float]:
    """Return the accuracy, the notes in a completion, and mean and maximum of the entries held and read."""
    (row,) = json.loads((place / "eval.json").read_text())["rows"]
    lines = [json.loads(line) for line in (place / "eval_completions.jsonl").read_text().splitlines()]
    notes = [line["completion"].count("[") for line in lines]
    few = [line["reward"] for line, count in zip(lines, notes, strict=True) if count <= 1]
    prompt = row["longest_prompt"]
    queries = torch.cat([torch.arange(prompt, prompt + line["tokens"] - 1) for line in lines])
    measures = {
        "accuracy": statistics.mean(line["reward"] for line in lines),
        "accuracy with at most one note": statistics.mean(few) if few else None,
        "notes": statistics.mean(notes),
        **{name: row[name] for name in ("peak_entries", "mean_peak_entries")},
    }
    if row["policy"] not in ("full", "dms"):  # DMS has no fixed number of entries
        read, held = read_and_held({"policy": row["policy"], **row["parameters"]}, prompt, queries)
        measures |= {"entries read": read.mean().item(), "entries held at most": held.max().item()}
    return measures


# ---- GRPO under caches that do more than evict ----------------------------------------------------------------------


def baseline(policy: str, peak: int, period: int = 1) -> Cache:
    window = {"window": 8} if policy == "gkv" else {}
    return {"policy": policy, "budget": peak - period, "sinks": 1, "period": period, **window}


def kvpop_caches(peak: int) -> dict[str, Cache]:
    learned = {"policy": "kvpop", "budget": peak, "sinks": 1, "window": peak // 2}
    return {
        "StreamingLLM+": {**learned, "scorer": "recency"},
        "KVpop": {**learned, "scorer": "mlp"},
        **{policy: baseline(policy, peak) for policy in ("streaming", "gkv")},
    }


def reinforced(
    seed: Seed, caches: Mapping[str, Cache], steps: int, *, task: str = SUM, start: str = QUICKSTART,
    grpo: Sequence[str] = (), retrofit: Sequence[str] = ("learning_rate=2e-4", "max_steps=120"),
    variants: Mapping[str, tuple[str, tuple[str, ...]]] | None = None,
) -> dict[str, Arm]:  # fmt: skip
    """Return two arms for each cache, before and after GRPO. KVpop's begin with a retrofit.

    variants : name -> an arm, and the keys in which the new arm differs
    """
    data = [f"data.synthetic={synthetic(task, 20000, 'train', seed.number + n)}" for n in range(3)]
    arms: dict[str, Arm] = {}
    for name, cache in caches.items():
        before = Arm(cache, start)
        if cache["policy"] == "kvpop":
            before = replace(before, recipe="quickstart/kvpop", keys=(data[1], "validation=null", *retrofit))
        arms[f"{name}, before"] = before
        keys = (data[2], f"max_steps={steps}", *HF, *grpo)
        arms[name] = Arm(cache, f"{name}, before", "quickstart/grpo", keys)
    for name, (of, changed) in (variants or {}).items():
        arms[name] = replace(arms[of], keys=(*arms[of].keys, *changed))
    return arms


def learned(seed: Seed) -> dict[str, Arm]:
    rates = {
        f"KVpop, scorers learn at {rate}": ("KVpop", (f"scorers={{weight: 1.0, learning_rate: {rate}, {BOUNDARY}}}",))
        for rate in ("1e-3", "1e-4", "1e-5")
    }
    return reinforced(seed, kvpop_caches(32), 40, variants={"KVpop, vllm": ("KVpop", VLLM), **rates})


BOUNDARY = "boundary: {queries: 64}"
SLOW = (
    "learning_rate=4e-4",
    "max_steps=200",
)  # 1/12.5 of the scorers' rate: a model that learns fast adapts to any mask
LONG = "max_completion_length=280"
FACTS = "task: retrieval, facts: 8, restated: 1, filler: 5"
FACTS_SAID = f"{HOUSE}/benchmarks/facts_said.py:facts_said"


def taught(seed: Seed, notes: float) -> str:
    """Return a model of 0.2M parameters that is taught the sum of 12 labels. notes : probability before each line"""
    from sparse_rl.data.synthetic import RunningSum

    untrained = seed.folder / "untrained"
    with LOCK:
        if not untrained.exists():
            RunningSum.save_untrained(untrained, seed.number, hidden_size=96, intermediate_size=192)
    data = ("data.synthetic.n=12", f"data.synthetic.seed={seed.number}", f"data.synthetic.note_probability={notes}")
    keys = (*data, "learning_rate=3e-3", "max_steps=2000")
    return seed.train(f"taught with {notes}", "quickstart/sft", *keys, start=str(untrained))


def few_notes(seed: Seed) -> dict[str, Arm]:
    task, retrofit = f"{TWELVE}, note_probability: 0.1", (*SLOW, "max_length=320")
    start = taught(seed, 0.1)
    return reinforced(seed, kvpop_caches(48), 40, task=task, start=start, grpo=(LONG,), retrofit=retrofit)


def looked_up(seed: Seed) -> dict[str, Arm]:
    short = seed.train("short documents", "retrieval/short", start=None)
    data = f"data.synthetic={synthetic(FACTS, 25600, 'train', seed.number)}"
    keys = (data, "max_steps=400", "per_device_train_batch_size=64")
    start = seed.train("facts", "retrieval/sft", *keys, start=short)
    grpo = (f"rewards=[{FACTS_SAID}]", "max_completion_length=24")
    return reinforced(seed, kvpop_caches(24), 40, task=FACTS, start=start, grpo=grpo, retrofit=SLOW)


def matched(seed: Seed) -> dict[str, Arm]:
    am = {"policy": "am", "budget": 28, "sinks": 1, "window": 8, "period": 16, "reference_queries": 40}
    both = {f"{p}{name}": baseline(p, 44, n) for n, name in ((16, ""), (1, ", period 1")) for p in ("streaming", "gkv")}
    variants = {"am, vllm": ("am", VLLM), "am, constants": ("am", ("match_gradient=constant",))}
    return reinforced(seed, {"am": am, **both}, 24, variants=variants)


def paged(seed: Seed) -> dict[str, Arm]:
    caches: dict[str, Cache] = {
        "clustered": {"policy": "clustered", "page": 8, "window": 6, "sinks": 1, "open_pages": 2}
    }
    sizes = {"mean": 32, "maximum": 48, "held": 170}  # entries under clustered attention, for 170 tokens
    caches |= {f"{p}, equal {name}": baseline(p, size) for name, size in sizes.items() for p in ("streaming", "gkv")}
    arms = reinforced(seed, caches, 24, variants={"clustered, mismatched": ("clustered", ("train_attention=full",))})
    return {name: arm for name, arm in arms.items() if arm.recipe is None or "equal held" not in name}


# ---- the retrofit ---------------------------------------------------------------------------------------------------


def retrofits(seed: Seed, notes: float, larger: float = 1.0) -> dict[str, Arm]:
    """Return arms whose caches hold `budget` entries at the peak, less the bytes of a scorer's state. DMS aims at
    `budget` entries on average at the end of a text.
    """
    from sparse_rl.attention.families import cache_shape
    from sparse_rl.models.load import load_model
    from sparse_rl.policies import make_policy
    from sparse_rl.policies.cache import cache_bytes, state_bytes

    start = taught(seed, notes)
    budgets, most = (40, 44, 48, 52, 56, 60, 64), 16 if seed.small else 256
    task = f"tasks={{held_out: {{synthetic: {synthetic(TWELVE, most, 'calibration', 0)}}}}}"
    sweep = f"sweep.cache.budget={[n - 1 for n in budgets]}", "sweep.policy=[streaming]"
    place = seed.evaluate(f"calibration with {notes}", start, task, LONG, *sweep,
                          f"cache={json.dumps(baseline('streaming', 40))}")  # fmt: skip
    accuracy = {row["budget"] + 1: row["accuracy"] for row in json.loads((place / "eval.json").read_text())["rows"]}
    smaller = next((n for n in budgets if 0.25 <= accuracy[n] <= 0.5), 40 if seed.small else None)
    if smaller is None:
        print(f"seed {seed.number} is passed over: no budget leaves an accuracy of 0.25 to 0.5: {accuracy}")
        return {}
    budget, shape = round(larger * smaller), cache_shape(load_model(start).config)
    window, length = budget // 2, statistics.mean(row.length for row in held_out(seed, 8 if seed.small else 512))
    kvpop = {"policy": "kvpop", "sinks": 1, "window": window, "budget": budget}
    state = state_bytes(make_policy({**kvpop, "scorer": "mlstm"}), 0, *shape)
    mlstm = {**kvpop, "state_entries": -(-state // cache_bytes(1, *shape, itemsize=4))}
    compression = (length - window) / (budget - window)  # only tokens that have left the window can be evicted
    data = (f"data.synthetic.seed={seed.number + 1}", "data.synthetic.n=12", "data.synthetic.note_probability=0.1")
    keys = (*data, "per_device_train_batch_size=32", *SLOW, "validation=null")
    distill = (*keys, "lr_scheduler_type=cosine", "weight_decay=1e-4", LONG, *HF)  # as the retrofit
    retrofit = {
        "StreamingLLM+": {**kvpop, "scorer": "recency"},
        "DMS": {"policy": "dms", "sinks": 1, "window": window, "compression": compression, "scorer": "mlp"},
        "KVpop, MLP": {**kvpop, "scorer": "mlp"},
        "KVpop, mLSTM": {**mlstm, "scorer": "mlstm"},
        "KVpop, mLSTM immediate": {**mlstm, "scorer": {"name": "mlstm", "readout": "immediate"}},
    }
    arms = {policy: Arm(baseline(policy, budget), start) for policy in ("streaming", "gkv")}
    arms["gkv, distilled"] = Arm(baseline("gkv", budget), start, "quickstart/distill", distill)
    for name, cache in retrofit.items():
        gates = ("gates.anneal_steps=100",) if name == "DMS" else ()
        arms[name] = Arm(cache, start, "quickstart/kvpop", (*keys, "max_length=320", *gates))
    return arms


def held_out(seed: Seed, size: int) -> list[Any]:
    """Return examples of the task with few notes."""
    from sparse_rl.recipe import load_recipe

    data = synthetic(f"{TWELVE}, note_probability: 0.1", size, "evaluation", seed.number + 3)
    recipe: Any = load_recipe("quickstart/kvpop", ["max_length=320", f"data.synthetic={data}"])
    examples: list[Any] = recipe.examples(recipe.prepare_training(here=False))[0]
    return examples


@torch.no_grad()
def token_divergences(model: Any, cache: Cache, teacher: Any, rows: Sequence[Any]) -> list[torch.Tensor]:
    """Return KL(teacher with a full cache || model under the evictions of the cache) of each completion's tokens.

    rows : Examples, whose completions the cache decodes
    """
    from rollout import make_engine
    from trainer.batch import Batch, Example
    from trainer.config import DistillationLossConfig
    from trainer.losses import DistillationLoss

    engine, divergences_of_rows = make_engine("hf", model=model, policy=cache, max_batch=64), list[torch.Tensor]()
    loss = DistillationLoss(DistillationLossConfig())
    for start in range(0, len(rows), 64):
        part = rows[start : start + 64]
        rollouts = engine.simulate([row.prompt for row in part], [row.completion for row in part])
        batch = Batch.make([Example.from_rollout(rollout) for rollout in rollouts], torch.device("cpu"))
        logits = [
            one.get_output_embeddings()(batch.hidden(one, replayed=replayed))
            for one, replayed in ((model, True), (teacher, False))
        ]
        values = loss.per_token(*logits).double()
        divergences_of_rows += [values[batch.where[0] == place] for place in range(len(part))]
    return divergences_of_rows


def divergences(model: str, cache: Cache, teacher: str, rows: Sequence[Any]) -> list[float]:
    """Return the mean KL per token of each row."""
    from sparse_rl.models.load import load_model

    student, taught_model = load_model(model), load_model(teacher)
    return [float(values.mean()) for values in token_divergences(student, cache, taught_model, rows)]


# ---- distillation, programs -----------------------------------------------------------------------------------------


def distillation(seed: Seed) -> dict[str, Arm]:
    cache, data = {"policy": "streaming", "sinks": 1, "budget": 40, "period": 8}, f"data.synthetic.seed={seed.number}"
    distill = (data, "max_steps=40", "validation.every=40")
    return {
        "before": Arm(cache),
        "distillation": Arm(cache, QUICKSTART, "quickstart/distill", distill),
        "distillation, 40 steps of GRPO": Arm(cache, "distillation", "quickstart/grpo", (data, "max_steps=40")),
        "40 steps of GRPO": Arm(cache, QUICKSTART, "quickstart/grpo", (data, "max_steps=40")),
        "80 steps of GRPO": Arm(cache, QUICKSTART, "quickstart/grpo", (data, "max_steps=80")),
    }


def one_liners(seed: Seed) -> dict[str, Arm]:
    cache, data = (
        {"policy": "streaming", "sinks": 1, "budget": 64, "period": 8},
        [f"data.synthetic.seed={seed.number + n}" for n in (0, 1)],
    )
    changes = {"RL-Sparse": (), "Mismatched": ("train_attention=full",), "RL-Full": ("cache={policy: full}",)}
    return {"before": Arm(cache, None, "one_liners/sft", (data[0],))} | {
        name: Arm(cache, "before", "one_liners/grpo", (data[1], *keys)) for name, keys in changes.items()
    }


def one_step_ahead(seed: Seed) -> dict[str, Arm]:
    """Under an engine that is late, the gap is that of the updates, so the guard is off."""
    cache, off = {"policy": "streaming", "sinks": 1, "budget": 40, "period": 8}, "replay_guard.enabled=false"
    data = f"data.synthetic={synthetic(SUM, 20000, 'train', seed.number + 1)}"
    corrections = {"none": (0, 1, 4), "token_truncate": (1, 4), "ppo": (1,)}
    return {
        f"{late} behind, {correction}": Arm(
            *(cache, QUICKSTART, "quickstart/grpo", (data, *HF, off, f"importance_correction={correction}"), late)
        )
        for correction, behind in corrections.items()
        for late in behind
    }


TWELVE_LABELS: dict[str, Any] = {"task": TWELVE, "longest": 280}
RETROFIT: dict[str, Any] = {"control": "StreamingLLM+", **TWELVE_LABELS, "divergence": True}
STUDIES = {
    "learned": Study(learned, "StreamingLLM+"),
    "few_notes": Study(few_notes, "StreamingLLM+", **TWELVE_LABELS),
    "looked_up": Study(looked_up, "StreamingLLM+", FACTS, 24, FACTS_SAID),
    "matched": Study(matched, "streaming, period 1"),
    "paged": Study(paged, "streaming, equal maximum"),
    "kvpop": Study(lambda seed: retrofits(seed, 0.3), **RETROFIT),
    "kvpop_larger": Study(lambda seed: retrofits(seed, 0.3, 1.25), **RETROFIT),
    "kvpop_few_notes": Study(lambda seed: retrofits(seed, 0.1), **RETROFIT),
    "distillation": Study(distillation, "80 steps of GRPO", problems=1024),
    "one_step_ahead": Study(one_step_ahead, "0 behind, none", full=True),
    "one_liners": Study(one_liners, "Mismatched", "task: one_liners", 194, "code", 1024, full=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--small", action="store_true", help="few problems and steps of the first seed; not written")
    parser.add_argument("--runs", type=Path, default=Path("runs/training"))
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    study, slots = STUDIES[options.study], Semaphore(min(2, os.cpu_count() or 1))
    folder = options.runs / ("small" if options.small else "") / options.study
    seeds = [Seed(n, folder / f"seed{n}", slots, options.small) for n in options.seeds[: 1 if options.small else None]]
    with ThreadPoolExecutor(len(seeds)) as pool:
        rows = [row for rows in pool.map(study.rows, seeds) for row in rows]
    frame = pandas.DataFrame(rows)
    for name in frame.columns.drop(["arm", "seed", "cache"]):
        wide = frame.pivot(index="arm", columns="seed", values=name).astype(float).dropna(how="all")
        over = wide - wide.loc[study.control] if study.control in wide.index else wide * float("nan")
        means = {"mean": wide.mean(axis=1), "±": wide.sem(axis=1)}
        over_control = {f"over {study.control}": over.mean(axis=1), "± ": over.sem(axis=1)}
        print(f"\n{name}\n{wide.assign(**means, **over_control).to_string(float_format='{:.4g}'.format)}")
    if not options.small:
        write(RESULTS / f"{options.study}.json", rows=rows)


if __name__ == "__main__":
    main()
