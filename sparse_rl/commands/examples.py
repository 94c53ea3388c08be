"""The sequences in tokens that a recipe with a teacher trains on."""

from __future__ import annotations

from typing import Any

from sparse_rl.data.config import DataConfig
from sparse_rl.data.problems import load_data
from sparse_rl.errors import UserError
from sparse_rl.models.load import load_config
from sparse_rl.recipe import DistillRecipe, KVpopRecipe, TaughtRecipe
from trainer.examples import Example, accepted, completed_examples, prompt_examples, text_examples


def taught_examples(recipe: TaughtRecipe, tokenizer: Any) -> tuple[list[Example], list[Example] | None]:
    """What a recipe with a teacher trains on, and what it holds out; None where it does not."""
    load: Any = {DistillRecipe.kind: load_examples, KVpopRecipe.kind: load_texts}[recipe.kind]
    examples, validation = load(recipe, recipe.data, tokenizer), recipe.validation
    if validation is None:
        return examples, None
    return examples, load(recipe, validation.limited_data(), tokenizer, "validation.data")


def load_examples(recipe: DistillRecipe, config: DataConfig, tokenizer: Any, where: str = "data") -> list[Example]:
    """The examples of a dataset that `keep` and the lengths leave."""
    distill = recipe.distill
    data = load_data(config, tokenizer, require=recipe.columns(), where=where)
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
    data = load_data(config, tokenizer, require=recipe.columns(), where=where)
    kvpop = recipe.kvpop
    longest = min(kvpop.max_length, load_config(recipe.model).max_position_embeddings)
    return text_examples(data, tokenizer, config.thinking, max_length=longest, packing=kvpop.packing, where=where)
