"""`sparse-rl teacher`: write a teacher's predictions on the dataset of a distillation to disk."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparse_rl.commands.arguments import add_recipe, read_recipe
from sparse_rl.commands.console import Session, quiet_loading
from sparse_rl.errors import UserError
from sparse_rl.recipe import TaughtRecipe

ABOUT = "Write a distillation teacher's predictions to disk, once; training then needs no teacher in memory."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)


def run(options: argparse.Namespace, session: Session) -> int:
    recipe = read_recipe(options).expect(TaughtRecipe)
    quiet_loading(session.verbose)
    folder, rows, existing = write_teacher(recipe)
    print(f"{folder}: {rows} sequences" + (f"; {existing} shards existed already" if existing else ""))
    return 0


def write_teacher(recipe: TaughtRecipe) -> tuple[Path, int, int]:
    """Write a recipe's teacher cache; return (folder, number of examples, number of shards that existed already).

    Raises UserError for a recipe without teacher_cache, and TeacherCacheError if the folder holds other files.
    """
    import torch

    from sparse_rl.commands.examples import taught_examples, with_data
    from sparse_rl.commands.prepared import Prepared
    from sparse_rl.models.load import load_config, load_plain_model, load_tokenizer
    from sparse_rl.models.weights import check_weights
    from trainer.teacher.cache import TeacherFacts, weights_fingerprint, write_teacher_cache

    path, loss = recipe.taught_by.teacher_cache, recipe.loss
    if path is None or loss.top_k is None:
        raise UserError("must name the folder to write; the loss also needs top_k", "teacher_cache")
    check_weights(load_config(recipe.teacher_model), recipe.teacher_model, "teacher")
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}", "teacher_cache") from error
    prepared = Prepared(recipe=recipe, config=load_config(recipe.model), tokenizer=load_tokenizer(recipe.model))
    examples, held_out = taught_examples(with_data(prepared))
    examples += held_out or []
    teacher = load_plain_model(recipe.teacher_model, recipe.dtype, "teacher")
    teacher = teacher.to("cuda" if torch.cuda.is_available() else "cpu")
    facts = TeacherFacts(
        recipe.teacher_model,
        weights_fingerprint(teacher),
        teacher.config.vocab_size,
        loss.temperature,
        loss.top_k,
        recipe.taught_by.teacher_cache_dtype,
    )
    rows = recipe.training.per_device_train_batch_size
    existing = write_teacher_cache(path, teacher, examples, facts, batch_size=rows, chunk=loss.chunk, progress=True)
    return Path(path), len(examples), existing
