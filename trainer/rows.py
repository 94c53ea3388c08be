"""The sequences that distillation trains on, in tokens: a dataset's prompts, and its completions where those count."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from rewards import make_rewards
from sparse_rl.data import completion_ids, load_data, prompt_ids
from sparse_rl.models import load_config
from sparse_rl.recipe import DataConfig, DistillRecipe, RecipeError

logger = logging.getLogger("sparse_rl")


@dataclass(frozen=True)
class Row:
    """One sequence; `completion` is empty where the student is to sample it."""

    prompt: list[int]
    completion: list[int]


def load_rows(recipe: DistillRecipe, config: DataConfig, tokenizer: Any, where: str = "data") -> list[Row]:
    """The rows of a dataset that `keep` and the lengths leave; how many they drop is logged.

    Raises RecipeError for a dataset that lacks what is needed, and where nothing is left.
    """
    if recipe.completions == "student":
        data = load_data(config, tokenizer, where=where)
        return [Row(prompt_ids(prompt, tokenizer, config.thinking), []) for prompt in data["prompt"]]
    require = ("prompt", "completion") if recipe.keep is None else ("prompt", "completion", "answer")
    data = load_data(config, tokenizer, require=require, where=where)
    if recipe.keep is not None:
        accepted = _accepted(recipe, data)
        logger.warning("%s: %d of %d completions score >= %s", where, len(accepted), len(data), recipe.keep_from)
        data = data.select(accepted)
    try:
        pairs = zip(data["prompt"], data["completion"], strict=True)
        rows = [Row(prompt_ids(p, tokenizer, config.thinking), completion_ids(c, tokenizer)) for p, c in pairs]
    except ValueError as error:
        raise RecipeError(str(error), where) from error
    context = load_config(recipe.model).max_position_embeddings
    longest = min(length for length in (recipe.max_length, recipe.rollout.max_model_len, context) if length)
    kept = [
        row
        for row in rows
        if row.completion
        and len(row.completion) <= recipe.max_completion_length
        and len(row.prompt) + len(row.completion) <= longest
    ]
    if len(kept) < len(rows):
        logger.warning("%s: %d of %d sequences are too long and dropped", where, len(rows) - len(kept), len(rows))
    if not kept:
        raise RecipeError("no sequence is left: see keep, max_completion_length and max_length", where)
    return kept


def _accepted(recipe: DistillRecipe, data: Any) -> list[int]:
    """The places of the completions that the reward accepts."""
    assert recipe.keep is not None
    try:
        (reward,), _ = make_rewards([recipe.keep])
    except ValueError as error:
        raise RecipeError(str(error), "keep") from error
    found: list[int] = []
    for start in range(0, len(data), 256):
        part = data[start : start + 256]
        columns = {name: values for name, values in part.items() if name not in ("prompt", "completion")}
        scores = reward(prompts=part["prompt"], completions=part["completion"], **columns)
        found += [start + i for i, score in enumerate(scores) if score is not None and score >= recipe.keep_from]
    return found
