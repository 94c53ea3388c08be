"""The datasets of a recipe, and the sequences in tokens that one with a teacher trains on: made once per machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparse_rl.data.config import DataConfig
from sparse_rl.data.problems import load_data
from sparse_rl.errors import UserError
from sparse_rl.models.load import load_config
from sparse_rl.recipe import DistillRecipe, KVpopRecipe, TaughtRecipe
from trainer.examples import Example, accepted, completed_examples, prompt_examples, text_examples
from trainer.once import once, once_on_disk


def recipe_data(config: DataConfig, tokenizer: Any, require: Sequence[str], where: str = "data") -> Any:
    """The rows of a recipe's dataset; see sparse_rl.data.problems.load_data."""
    what = f"{where} {require} {config}"
    return once_on_disk(what, lambda: load_data(config, tokenizer, require=require, where=where))


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
    data = recipe_data(config, tokenizer, recipe.columns(), where)
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
    data = recipe_data(config, tokenizer, recipe.columns(), where)
    kvpop = recipe.kvpop
    longest = min(kvpop.max_length, load_config(recipe.model).max_position_embeddings)
    return text_examples(data, tokenizer, config.thinking, max_length=longest, packing=kvpop.packing, where=where)
