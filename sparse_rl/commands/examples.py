"""The datasets of a recipe, and the sequences in tokens that one with a teacher trains on: made once per machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparse_rl.commands.sampling import prompt_room
from sparse_rl.data.config import DataConfig
from sparse_rl.data.problems import load_data
from sparse_rl.data.tokens import check_room
from sparse_rl.errors import UserError
from sparse_rl.models.load import load_config
from sparse_rl.recipe import DistillRecipe, KVpopRecipe, TaughtRecipe, TrainRecipe
from trainer.examples import Example, accepted, completed_examples, prompt_examples, text_examples
from trainer.once import once, once_on_disk


def recipe_data(
    config: DataConfig, tokenizer: Any, require: Sequence[str], where: str = "data", room: int | None = None
) -> Any:
    """The rows of a recipe's dataset; see sparse_rl.data.problems.load_data.

    room : tokens of a prompt, at most, where completions are sampled behind them; None: not known

    Raises UserError for a longer one, too.
    """

    def load() -> Any:
        data = load_data(config, tokenizer, require=require, where=where)
        if room is not None:
            check_room(data["prompt"], tokenizer, config.thinking, room, where)
        return data

    return once_on_disk(f"{where} {require} {config} {room}", load)


def training_data(recipe: TrainRecipe, config: DataConfig, tokenizer: Any, where: str = "data") -> Any:
    """The rows of one of a recipe's datasets, with the columns that it needs."""
    room = prompt_room(recipe, load_config(recipe.model)) if recipe.samples_behind_prompts() else None
    return recipe_data(config, tokenizer, recipe.columns(), where, room)


def taught_examples(recipe: TaughtRecipe, tokenizer: Any) -> tuple[list[Example], list[Example] | None]:
    """What a recipe with a teacher trains on, and what it holds out; None where it does not."""
    load: Any = {DistillRecipe.kind: load_examples, KVpopRecipe.kind: load_texts}[recipe.kind]
    examples = once(f"examples {recipe.data}", lambda: load(recipe, recipe.data, tokenizer))
    if recipe.validation is None:
        return examples, None
    held_out = recipe.validation.limited_data()
    return examples, once(f"held out {held_out}", lambda: load(recipe, held_out, tokenizer, "validation.data"))


def load_examples(recipe: DistillRecipe, config: DataConfig, tokenizer: Any, where: str = "data") -> list[Example]:
    """The examples of a dataset that `keep` and the lengths leave."""
    distill = recipe.distill
    data = training_data(recipe, config, tokenizer, where)
    if distill.completions == "student":
        return prompt_examples(data, tokenizer, config.thinking)
    if distill.keep is not None:
        from rewards import make_rewards

        try:
            (reward,), _ = make_rewards([distill.keep])
        except ValueError as error:
            raise UserError(str(error), "keep") from error
        data = accepted(data, reward, distill.keep_from, where)
    context = load_config(recipe.model).max_position_embeddings
    return completed_examples(
        data,
        tokenizer,
        config.thinking,
        max_length=min(length for length in (distill.max_length, recipe.rollout.max_model_len, context) if length),
        max_completion_length=distill.max_completion_length,
        truncate=distill.overlong == "truncate",
        where=where,
    )


def load_texts(recipe: KVpopRecipe, config: DataConfig, tokenizer: Any, where: str = "data") -> list[Example]:
    """Texts of up to max_length tokens, packed where the recipe says so."""
    data = training_data(recipe, config, tokenizer, where)
    kvpop = recipe.kvpop
    longest = min(kvpop.max_length, load_config(recipe.model).max_position_embeddings)
    return text_examples(data, tokenizer, config.thinking, max_length=longest, packing=kvpop.packing, where=where)
