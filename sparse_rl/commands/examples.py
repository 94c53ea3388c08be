"""Datasets of a recipe, and token sequences of recipes with a teacher. Each is computed once per machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from sparse_rl.commands.prepared import Prepared, rewards_of
from sparse_rl.data.config import DataConfig
from sparse_rl.data.problems import load_data
from sparse_rl.data.tokens import check_room
from sparse_rl.recipe import DistillRecipe, KVpopRecipe, TaughtRecipe, TrainRecipe
from trainer.examples import Example, accepted, completed_examples, prompt_examples, text_examples
from trainer.once import once, once_on_disk

T = TypeVar("T", bound=TrainRecipe)
U = TypeVar("U", bound=TaughtRecipe)


def recipe_data(
    config: DataConfig, tokenizer: Any, require: Sequence[str], where: str = "data", room: int | None = None
) -> Any:
    """Return the rows of a dataset. Raises UserError for unusable data, and for a prompt of more than `room` tokens.

    require : columns that the dataset must have
    where : recipe key of the dataset, for error messages
    room : maximum number of tokens in a prompt if completions are sampled; None means no check
    """

    def load() -> Any:
        data = load_data(config, tokenizer, require=require, where=where)
        if room is not None:
            check_room(data["prompt"], tokenizer, config.thinking, room, where)
        return data

    return once_on_disk(f"{where} {require} {config} {room}", load)


def with_data(prepared: Prepared[T]) -> Prepared[T]:
    """Return a copy of `prepared` with the recipe's rewards and the rows of its training and validation datasets."""
    key, specs = prepared.recipe.named_rewards()
    rewards = rewards_of(specs, key) if specs else prepared.rewards
    rows = _rows(prepared, prepared.recipe.data, "data")
    validation = prepared.recipe.validation
    held_out = None if validation is None else _rows(prepared, validation.limited_data(), "validation.data")
    return replace(prepared, rewards=rewards, rows=rows, held_out=held_out)


def _rows(prepared: Prepared[T], data: DataConfig, where: str) -> Any:
    recipe = prepared.recipe
    room = prepared.room if recipe.samples_behind_prompts() else None
    return recipe_data(data, prepared.tokenizer, recipe.columns(), where, room)


def taught_examples(prepared: Prepared[U]) -> tuple[list[Example], list[Example] | None]:
    """Return the (training examples, held-out examples) of a recipe; without validation, the second is None."""
    recipe: Any = prepared.recipe
    load: Any = {DistillRecipe.kind: load_examples, KVpopRecipe.kind: load_texts}[recipe.kind]
    examples = once(f"examples {recipe.data}", lambda: load(prepared, prepared.rows, recipe.data, "data"))
    if recipe.validation is None:
        return examples, None
    held_out = recipe.validation.limited_data()
    arguments = prepared, prepared.held_out, held_out, "validation.data"
    return examples, once(f"held out {held_out}", lambda: load(*arguments))


def load_examples(prepared: Prepared[DistillRecipe], rows: Any, data: DataConfig, where: str) -> list[Example]:
    """Return the examples of a dataset that remain after the `keep` filter and the length limits."""
    recipe, tokenizer = prepared.recipe, prepared.tokenizer
    distill = recipe.distill
    if distill.completions == "student":
        return prompt_examples(rows, tokenizer, data.thinking)
    if distill.keep is not None:
        rows = accepted(rows, prepared.rewards[0][0], distill.keep_from, where)
    context = prepared.config.max_position_embeddings
    return completed_examples(
        rows,
        tokenizer,
        data.thinking,
        max_length=min(length for length in (distill.max_length, recipe.rollout.max_model_len, context) if length),
        max_completion_length=distill.max_completion_length,
        truncate=distill.overlong == "truncate",
        where=where,
    )


def load_texts(prepared: Prepared[KVpopRecipe], rows: Any, data: DataConfig, where: str) -> list[Example]:
    """Return examples of up to max_length tokens from texts, packed if the recipe has packing: true."""
    kvpop = prepared.recipe.kvpop
    longest = min(kvpop.max_length, prepared.config.max_position_embeddings)
    return text_examples(
        rows, prepared.tokenizer, data.thinking, max_length=longest, packing=kvpop.packing, where=where
    )
