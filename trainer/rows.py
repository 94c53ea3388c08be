"""The sequences that distillation trains on, in tokens: a dataset's prompts, and its completions where those count."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

from rewards import make_rewards
from sparse_rl.data.problems import load_data
from sparse_rl.data.tokens import completion_ids, prompt_ids
from sparse_rl.errors import UserError
from sparse_rl.models.load import load_config
from sparse_rl.recipe import DataConfig, DistillRecipe, KVpopRecipe, TaughtRecipe

logger = logging.getLogger("sparse_rl")


@dataclass(frozen=True)
class Row:
    """One sequence; `completion` is empty where the student is to sample it."""

    prompt: list[int]
    completion: list[int]


def taught_rows(recipe: TaughtRecipe, tokenizer: Any) -> tuple[list[Row], list[Row] | None]:
    """What a recipe with a teacher trains on, and what it holds out; None where it does not."""
    load: Any = load_texts if isinstance(recipe, KVpopRecipe) else load_rows
    rows, validation = load(recipe, recipe.data, tokenizer), recipe.validation
    if validation is None:
        return rows, None
    source = dataclasses.replace(validation.data, limit=validation.problems)
    return rows, load(recipe, source, tokenizer, "validation.data")


def load_rows(recipe: DistillRecipe, config: DataConfig, tokenizer: Any, where: str = "data") -> list[Row]:
    """The rows of a dataset that `keep` and the lengths leave; how many they drop is logged.

    Raises UserError for a dataset that lacks what is needed, and where nothing is left.
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
        raise UserError(str(error), where) from error
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
        raise UserError("no sequence is left: see keep, max_completion_length and max_length", where)
    return kept


def _accepted(recipe: DistillRecipe, data: Any) -> list[int]:
    """The places of the completions that the reward accepts."""
    assert recipe.keep is not None
    try:
        (reward,), _ = make_rewards([recipe.keep])
    except ValueError as error:
        raise UserError(str(error), "keep") from error
    found: list[int] = []
    for start in range(0, len(data), 256):
        part = data[start : start + 256]
        columns = {name: values for name, values in part.items() if name not in ("prompt", "completion")}
        scores = reward(prompts=part["prompt"], completions=part["completion"], **columns)
        found += [start + i for i, score in enumerate(scores) if score is not None and score >= recipe.keep_from]
    return found


def load_texts(recipe: KVpopRecipe, config: DataConfig, tokenizer: Any, where: str = "data") -> list[Row]:
    """Rows of up to max_length tokens: one text each, or as many as fill it, one after another.

    Raises UserError for a dataset that lacks what is needed, and where nothing is left.
    """
    data = load_data(config, tokenizer, require=("prompt", "completion"), where=where)
    try:
        pairs = zip(data["prompt"], data["completion"], strict=True)
        texts = [Row(prompt_ids(p, tokenizer, config.thinking), completion_ids(c, tokenizer)) for p, c in pairs]
    except ValueError as error:
        raise UserError(str(error), where) from error
    longest = min(recipe.max_length, load_config(recipe.model).max_position_embeddings)
    kept = [text for text in texts if text.prompt and len(text.prompt) + len(text.completion) <= longest]
    if len(kept) < len(texts):
        logger.warning("%s: %d of %d texts are too long and dropped", where, len(texts) - len(kept), len(texts))
    if not kept:
        raise UserError(f"no text of at most {longest} tokens is left; see max_length", where)
    if not recipe.packing:
        return kept
    stream = [token for text in kept for token in (*text.prompt, *text.completion)]
    parts = [stream[start : start + longest] for start in range(0, len(stream), longest)]
    return [Row(part[:1], part[1:]) for part in parts if len(part) > 1]
