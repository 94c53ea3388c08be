"""The finding of a report: only equal conditions are compared, and the words follow from the numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparse_rl.analysis.finding import Finding, conditions, difference, find
from sparse_rl.analysis.report import ReportedRun

FAR = "None of the smaller caches is within error; the best, gkv"
RECIPE: dict[str, Any] = {"tasks": {"sums": {"limit": 9}}, "temperature": 1.0, "seed": 0}


def row(model: str, accuracy: float, policy: str = "gkv", error: float | None = 0.01, **more: Any) -> Any:
    values = {"task": "sums", "parameters": {} if policy == "full" else {"budget": 40}, "problems": 500, "samples": 1}
    cost = {"excluded": 0, "retention": 1.0 if policy == "full" else 0.44, "peak_entries": 48}
    cost["written"] = 0.0
    made = {"model": model, "policy": policy, "accuracy": accuracy, "standard_error": error, **values, **cost, **more}
    one = SimpleNamespace(**made)
    one.conditions = conditions(one, RECIPE)
    return one


def trained(folder: Path, name: str, kind: str = "grpo", seed: int = 0, rewards: tuple[float, ...] = ()) -> ReportedRun:
    place = folder / f"seed{seed}" / name
    place.mkdir(parents=True)
    lines = [{"step": step, "reward": reward, "step_time": 60.0} for step, reward in enumerate(rewards or (0.5,), 1)]
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = {"kind": kind, "model": "/start", "seed": seed, "cache": {"policy": "gkv", "budget": 40}}
    return ReportedRun(f"seed{seed}/{name}" if seed else name, place, recipe, "", "gkv")


def words(result: Finding) -> str:
    return " ".join(f"{sentence} {cost}" for sentence, cost in result.sentences)


@pytest.mark.parametrize(
    ("after", "error", "expected"),
    [
        (0.80, 0.01, "raised X from 25.0% to 80.0%: +55.0 ± 1.4 percentage points"),
        (0.10, 0.01, "lowered X from 25.0% to 10.0%: −15.0 ± 1.4 percentage points"),
        (0.27, 0.01, "changed X from 25.0% to 27.0%: +2.0 ± 1.4 percentage points, within error"),
        (0.27, None, "changed X from 25.0% to 27.0%: +2.0 percentage points, of unknown standard error"),
    ],
    ids=["better", "worse", "within", "unknown"],
)
def test_the_verb_follows_from_the_difference_and_its_error(after, error, expected, tmp_path):
    run = trained(tmp_path, "sparse")
    rows = [row("/start", 0.25, error=0.01), row(f"{run.folder}/model", after, error=error)]
    result = find([run], rows)
    assert expected.replace("X", "the accuracy on sums under a small cache (gkv, budget 40)") in words(result)
    assert ("within error" in words(result)) == ("within" in expected)
    assert [bar[:2] for bar in result.bars] == [("before training", 0.25), ("sparse", after)]
    assert "1.0 minutes of training" in words(result)
    assert "held 44% of a sequence's tokens at the end, at most 48 entries" in words(result)


@pytest.mark.parametrize(
    "change",
    [{"task": "other"}, {"policy": "rkv"}, {"parameters": {"budget": 41}}, {"problems": 400}, {"model": "/another"},
     {"samples": 4}, {"accuracy": None}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_rows_under_other_conditions_are_not_compared(change, tmp_path):
    run = trained(tmp_path, "sparse")
    after, before = row(str(run.folder), 0.8), row("/start", 0.25)
    assert "raised" in words(find([run], [before, after])), "control"
    other = SimpleNamespace(**{**vars(before), **change})
    other.conditions = conditions(other, RECIPE)
    result = find([run], [other, after])
    assert "accuracy 80.0 ± 1.0% on sums under a small cache (gkv, budget 40)" in words(result)
    assert "raised" not in words(result)
    assert "unknown" in result.remedy
    assert result.bars == []


@pytest.mark.parametrize("order", [1, -1])
def test_of_repeated_evaluations_the_newest_counts(order, tmp_path):
    run = trained(tmp_path, "sparse")
    once = [row("/start", 0.25), row(str(run.folder), 0.5, written=1.0)]
    again = find([run], [*once, row(str(run.folder), 0.8, written=2.0)][::order])
    assert "from 25.0% to 80.0%" in words(again)
    assert "of repeated evaluations, the newest counts" in words(again)
    assert "repeated" not in words(find([run], once)), "control"


def test_another_sampling_is_another_condition():
    one = row("/start", 0.25)
    assert one.conditions == conditions(one, {**RECIPE, "model": "x", "output_dir": "y", "seed": 7})
    assert one.conditions != conditions(one, {**RECIPE, "temperature": 0.0})
    assert one.conditions != conditions(one, {**RECIPE, "dtype": "bfloat16"})
    assert one.conditions != conditions(one, {**RECIPE, "prompt_cache": [{"policy": "am", "ratio": 0.1}]})
    assert one.conditions != conditions(one, {**RECIPE, "tasks": {"sums": {"limit": 10}}})


def test_seeds_reduce_only_the_error_over_seeds():
    """By hand: problems give sqrt(0.03² + 0.04²) = 0.05; two changes 0.1 and 0.3 have the variance 0.02."""
    pairs = [(row("a", 0.2, error=0.03), row("b", 0.2 + change, error=0.04)) for change in (0.1, 0.3)]
    assert difference(pairs) == pytest.approx((0.2, math.sqrt(0.05**2 + 0.02 / 2)))
    assert difference(pairs[:1]) == pytest.approx((0.1, 0.05))
    assert difference([pairs[0]] * 9)[1] == pytest.approx(0.05)


def test_a_seed_is_compared_with_its_own_start(tmp_path):
    runs = [trained(tmp_path, "sparse", seed=seed) for seed in (0, 1, 2)]
    rows = [row("/start", 0.2), *(row(str(run.folder), 0.5) for run in runs[:2])]
    assert "500 problems, 2 of 3 seeds" in words(find(runs, rows))
    own = [replace(run, recipe={**run.recipe, "model": f"/start/{run.recipe['seed']}"}) for run in runs]
    assert "raised" not in words(find(own, rows))
    rows += [row("/start/0", 0.3)]
    assert "from 30.0% to 50.0%: +20.0 ± 1.4 percentage points (500 problems, 1 seed)" in words(find(own, rows))


def test_kinds_have_their_own_sentences_and_the_best_is_chosen_within_a_kind(tmp_path):
    low, high = trained(tmp_path, "low"), trained(tmp_path, "high")
    distilled = trained(tmp_path, "student", "distillation")
    runs = [low, high, distilled]
    rows = [row(str(run.folder), accuracy) for run, accuracy in zip(runs, (0.3, 0.5, 0.9), strict=True)]
    sentences = [sentence for sentence, _ in find(runs, [row("/start", 0.2), *rows]).sentences]
    assert len(sentences) == 2
    assert sentences[0].startswith("Training high (grpo: RL-Sparse, the best of 2 trainings under this cache) raised")
    assert sentences[1].startswith("Training student (distillation) raised")


def test_the_cost_with_a_full_cache_is_told(tmp_path):
    run = trained(tmp_path, "sparse")
    small = [row("/start", 0.2), row(str(run.folder), 0.5)]
    full = [row("/start", 0.98, "full"), row(str(run.folder), 0.74, "full")]
    assert "accuracy with a full cache: 98.0% became 74.0% (−24.0 ± 1.4 percentage points)" in words(
        find([run], full + small)
    )
    assert "full cache" not in words(find([run], small))


def test_a_growing_budget_is_told(tmp_path):
    run, budget = trained(tmp_path, "sparse"), {"tokens": [10, 20], "entries": [30, 40]}
    run = replace(run, recipe={**run.recipe, "cache": {"policy": "gkv", "budget": budget}})
    rows = [row(at, 0.5, parameters={"budget": budget}) for at in ("/start", str(run.folder))]
    assert "under a small cache (gkv, budget 30 at 10 to 40 at 20) from" in words(find([run], rows))


def test_the_minutes_count_each_step(tmp_path):
    """The time in a log is a mean over the steps since the line before."""
    run = trained(tmp_path, "sparse")
    lines = [{"step": step, "step_time": 60.0} for step in (10, 20, 25)]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "25.0 minutes of training" in words(find([run], [row("/start", 0.2), row(str(run.folder), 0.5)]))


def test_what_a_cache_held_is_told_of_small_caches_only(tmp_path):
    run = trained(tmp_path, "sparse")
    assert "held" not in words(find([run], [row(at, 0.5, "full") for at in ("/start", str(run.folder))]))
    small = {"parameters": {"budget": 40, "period": 8}}
    rows = [row(at, 0.5, **small) for at in ("/start", str(run.folder))]
    assert "at most 48 entries (budget + period) in each kv head" in words(find([run], rows))


def test_a_kind_without_evaluation_does_not_make_the_others_unknown(tmp_path):
    runs = [trained(tmp_path, "first", "sft"), *(trained(tmp_path, "sparse", seed=seed) for seed in (0, 1))]
    result = find(runs, [row("/start", 0.2), *(row(str(run.folder), 0.5) for run in runs[1:])])
    assert "raised" in words(result)
    assert result.remedy == ""


def test_only_trainings_of_one_start_model_are_compared(tmp_path):
    one, two, other = (trained(tmp_path, name) for name in ("one", "two", "other"))
    other = replace(other, recipe={**other.recipe, "model": "/better"})
    after = [row(str(run.folder), value) for run, value in ((one, 0.4), (two, 0.5), (other, 0.7))]
    result = find([one, two, other], [row("/start", 0.2), row("/better", 0.8), *after])
    assert "Training two (grpo: RL-Sparse, the best of 2 trainings under this cache) raised" in words(result)
    assert [bar[:2] for bar in result.bars] == [("before training", 0.2), ("one", 0.4), ("two", 0.5)]


def test_a_run_without_evaluation_opens_with_what_it_logged(tmp_path):
    run = trained(tmp_path, "sparse", rewards=(0.125, *[0.3] * 8, 0.75))
    result = find([run], [])
    assert "mean reward of the sampled completions: 0.125 in the first tenth of the steps, 0.750 in" in words(result)
    assert "sparse-rl eval" in result.remedy


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row("/m", 0.9, "full"), row("/m", 0.5, retention=0.2), row("/m", 0.89, "rkv", retention=0.6)],
         "The smallest cache within error, rkv, budget 40: −1.0 ± 1.4 percentage points"),
        ([row("/m", 0.9, "full"), row("/m", 0.5)], FAR),
        ([row("/m", 0.9, "full"), row("/m", 0.9, error=None)], FAR),
        ([row("/m", 0.5)], "m: accuracy 50.0 ± 1.0% on sums under a small cache (gkv, budget 40)."),
    ],
    ids=["close", "far", "no error", "alone"],
)  # fmt: skip
def test_an_evaluation_opens_with_the_cost_of_eviction(rows, expected):
    result = find([], rows)
    assert expected in words(result)
    assert len(result.bars) == len(rows)
    assert ("unknown" in result.remedy) == (len(rows) == 1)
