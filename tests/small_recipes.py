"""Overrides that make recipes so small that a tiny model runs them in a few seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparse_rl.recipe import (
    BenchRecipe,
    BudgetsRecipe,
    DistillRecipe,
    GRPORecipe,
    KVpopRecipe,
    PerplexityRecipe,
    Recipe,
    SFTRecipe,
    TrainRecipe,
)

SHIPPED = {"turns/model": str(Path(__file__).parents[1] / "recipes/turns/model")}  # tiny itself, and calls tools


def family_of(model: str) -> str:
    """Return the family of a model's name."""
    name = model.lower()
    for part, family in (("30b-a3b", "qwen3_moe"), ("mistral", "mistral"), ("gemma-3", "gemma3_text")):
        if part in name:
            return family
    return "llama" if "llama" in name else "qwen2" if "qwen2" in name or "distill-qwen" in name else "qwen3"


def shortened(recipe: Recipe) -> str:
    """Return an override that scales a recipe's cache down, so that a dozen tokens are enough for evictions."""
    cache = recipe.resolved()["cache"]
    most = {"budget": 12, "window": 4, "period": 4, "reference_queries": 16, "page": 2}
    small = {key: min(value, cache[key]) for key, value in most.items() if key in cache}
    return f"cache={json.dumps(cache | small)}"


def small_training(recipe: TrainRecipe) -> list[str]:
    """Return overrides for two training steps of short sequences, each validated."""
    overrides = [
        "launch={processes: 1, zero_stage: 0}", "max_steps=2", "gradient_accumulation_steps=1", "logging_steps=1",
        "report_to=[]", "per_device_train_batch_size=8",
    ]  # fmt: skip
    if recipe.data.synthetic is not None:
        overrides.append("data.synthetic.size=64")
        if recipe.data.synthetic.task == "retrieval":  # the tiny model reads it letter by letter
            overrides += ["data.synthetic.facts=4", "data.synthetic.restated=2"]
    if isinstance(recipe, SFTRecipe):
        overrides += ["warmup_steps=1", "stop_check_every=2"]
    if isinstance(recipe, GRPORecipe):
        overrides += ["num_generations=4", "max_completion_length=16", shortened(recipe)]
    if isinstance(recipe, DistillRecipe):
        overrides.append(shortened(recipe))
    if isinstance(recipe, KVpopRecipe):
        sizes = {"sinks": 2, "window": 4, "budget": 12, "state_entries": 0, "compression": 2}
        block = recipe.cache.as_block()
        small = block | {key: value for key, value in sizes.items() if key in block}
        overrides += [f"cache={json.dumps(small)}", "max_length=128"]
    if recipe.validation is not None:
        overrides += ["validation.every=1", "validation.problems=2"]
        overrides += ["validation.samples=2"] if isinstance(recipe, GRPORecipe) else []
    return overrides


def small_evaluation(recipe: Any) -> list[str]:
    """Return overrides for two problems, or one piece of a text, and few tokens. The caches stay as they are."""
    overrides = ["rollout.engine=hf", "rollout.max_batch=8"]
    if isinstance(recipe, PerplexityRecipe):
        fraction = ["sweep.cache.fraction=[0.5]"] if "fraction" in recipe.sweep.cache else []
        return [*overrides, "prompt_tokens=4", "completion_tokens=60", "pieces=1", *fraction]
    if isinstance(recipe, BenchRecipe):
        sizes = ["batch=[2]", "prompt_tokens=8", "repetitions=1", *(["length=[16, 24]"] if recipe.length else [])]
        return ["rollout.engine=hf", *sizes, *(["contexts.length=[64]"] if recipe.contexts else [])]
    if isinstance(recipe, BudgetsRecipe):
        tasks = [f"tasks.{task}.limit=2" for task in recipe.tasks]
        return [*overrides, *tasks, "contexts=1", "ratios=[0, 0.05, 1]", "max_completion_length=6"]
    overrides += [f"samples={min(recipe.samples, 2)}", "max_completion_length=12"]
    overrides += [f"tasks.{task}.limit=2" for task in recipe.tasks]
    if recipe.forced_answer is not None:
        overrides.append("forced_answer={text: '1', tokens: 4}")
    if recipe.prompt_cache is not None:
        blocks = recipe.resolved()["prompt_cache"]
        small = {"study_tokens": 4, "summary_tokens": 8, "budgets": None}  # no head budgets of a tiny model
        overrides.append(f"prompt_cache={json.dumps([block | small for block in blocks])}")
    return overrides
