"""`sparse-rl teacher`: write a teacher's predictions on the dataset of a distillation to disk."""

from __future__ import annotations

import argparse

from sparse_rl.commands.arguments import add_recipe, read_recipe
from sparse_rl.commands.console import Session, quiet_loading
from sparse_rl.errors import UserError
from sparse_rl.files import make_folder
from sparse_rl.recipe import Run, TaughtRecipe

ABOUT = "Write a distillation teacher's predictions to disk, once; training then needs no teacher in memory."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)


def run(options: argparse.Namespace, session: Session) -> int:
    recipe = read_recipe(options).expect(TaughtRecipe)
    quiet_loading(session.verbose)
    import torch

    from sparse_rl.models.load import load_config, load_plain_model, load_tokenizer
    from sparse_rl.models.weights import check_weights
    from trainer.teacher import TeacherFacts, weights_fingerprint, write_teacher_cache

    name, taught_by, loss = recipe.teacher_model, recipe.taught_by, recipe.loss
    path, dtype = taught_by.teacher_cache, taught_by.teacher_cache_dtype
    if path is None or loss.top_k is None:
        raise UserError("must name the folder to write; the loss also needs top_k", "teacher_cache")
    check_weights(load_config(name), name, "teacher")
    make_folder(path, "teacher_cache")
    prepared = Run(recipe=recipe, config=load_config(recipe.model), tokenizer=load_tokenizer(recipe.model))
    examples, held_out = recipe.examples(prepared.with_data())
    examples += held_out or []
    teacher = load_plain_model(name, recipe.dtype, "teacher").to("cuda" if torch.cuda.is_available() else "cpu")
    size = teacher.config.vocab_size
    facts = TeacherFacts(name, weights_fingerprint(teacher), size, loss.temperature, loss.top_k, dtype)
    rows = recipe.training.per_device_train_batch_size
    existing = write_teacher_cache(path, teacher, examples, facts, batch_size=rows, chunk=loss.chunk, progress=True)
    print(f"{path}: {len(examples)} sequences" + (f"; {existing} shards existed already" if existing else ""))
    return 0
