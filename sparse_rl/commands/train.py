"""`sparse-rl train`: check a recipe, start its processes, turn it into model, engine and trainer, and train."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from sparse_rl.commands.arguments import add_recipe, file_name, read_recipe
from sparse_rl.commands.console import Session, quiet_loading, rank, say, training_shown, warn
from sparse_rl.progress import stage
from sparse_rl.recipe import Recipe, TrainRecipe

ABOUT = "Train as the recipe says; starts its processes itself."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        const="newest",
        type=file_name,
        metavar="DIR",
        help="a checkpoint; without DIR the newest",
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything that needs no model, then stop")


def separate_override_from_resume(options: argparse.Namespace) -> None:
    """`--resume seed=1` is `--resume`, and an override."""
    if "=" in (options.resume or "") and not Path(options.resume).exists():
        options.overrides.append(options.resume)
        options.resume = "newest"


def run(options: argparse.Namespace, session: Session) -> int:
    recipe = read_recipe(options)  # a mistake in it is answered before anything heavy is imported

    from sparse_rl.commands.checks import check_folder
    from trainer.launch import launched
    from trainer.once import remembered

    if not options.dry_run:
        session.folder = Path(recipe.output_dir)
    if not launched():
        check_folder(recipe.as_training(), options.resume)
    quiet_loading(session.verbose)
    with remembered():
        return _run(options, recipe)


def _run(options: argparse.Namespace, recipe: Recipe) -> int:
    from sparse_rl.commands.checks import NOT_CHECKED, check_training
    from trainer.checkpoint import read_manifest
    from trainer.launch import crowded, launch, launched, needs_launch, take_device
    from trainer.once import left_words

    if launched():
        take_device()
    else:  # once, before any process is started or anything is loaded
        with stage("checking", recipe.model):
            findings = check_training(recipe, options.resume)
        if options.dry_run:
            for what, finding in findings:
                print(f"{what:<17} {finding}")
            print(f"{'not checked':<17} {NOT_CHECKED}")
            return 0
        words = options.arguments
        if options.resume is not None:  # the processes resume what was found here, and say no more about it
            options.resume = dict(findings)["resume"]
            say(f"resuming from step {read_manifest(Path(options.resume))['step']}", options.resume)
            words = ["train", options.recipe, *options.overrides, "--resume", options.resume]
            words += ["--verbose"] if options.verbose else []
        if wrong := crowded(recipe.as_training().launch):
            warn(f"launch.processes: {wrong}")
        if needs_launch(recipe.as_training().launch):
            with stage("loading", recipe.model):
                _prepare(recipe.as_training())
            status = launch(recipe.as_training().launch, words)
            print(left_words(), end="", file=sys.stderr)
            return status
    with training_shown(recipe.model) as show:
        model = train(recipe, options.resume, show)
    if rank() == 0:
        print(f"model: {model}", what_next(recipe.as_training()), sep="\n")
    return 0


def what_next(recipe: TrainRecipe) -> str:
    """What to do with the run of this recipe, as commands to copy."""
    from trainer.card import evaluation_of

    run = shlex.quote(recipe.output_dir)
    task = None if recipe.data.synthetic is None else recipe.data.synthetic.task
    judged = run if recipe.evaluation(run) else evaluation_of(task, run)
    commands = {} if judged is None else {f"eval {judged}": "how good it is"}
    cache = recipe.exported_cache() or recipe.learned_cache()
    if cache is None or not cache.only_hf:
        commands[f"serve {run}"] = "OpenAI's API, with vLLM"
    commands[f"plot {run}"] = "its curves"
    width = max(map(len, commands))
    return "\n".join(f"next:  sparse-rl {command:<{width}}  # {about}" for command, about in commands.items())


def _prepare(recipe: TrainRecipe) -> None:
    """Make, and say what is to be said of, the sequences that the processes will train on."""
    from sparse_rl.commands.examples import taught_examples
    from sparse_rl.models.load import load_tokenizer

    if (taught := recipe.taught()) is not None:
        taught_examples(taught, load_tokenizer(recipe.model))


def train(recipe: Recipe, resume: str | None = None, show: Callable[[Any], None] = lambda _: None) -> Path:
    """Run a training recipe in this process (one of N, where launched). Returns the directory of the final model.

    resume : a checkpoint directory, or "newest" for the newest in the recipe's output_dir
    show : is given the trainer before it trains (see `training_shown`)
    """
    from transformers.integrations import WandbCallback

    from sparse_rl.commands.resume import checkpoint_to_resume
    from sparse_rl.commands.trainers import TRAINERS
    from sparse_rl.models.directory import RUN_MODEL
    from trainer import rundir
    from trainer.export import close_engine, export_model
    from trainer.launch import leave_group
    from trainer.lock import locked
    from trainer.resume import refuse_used

    training = with_choices(recipe.as_training())
    with locked(training.output_dir) if rank() == 0 else nullcontext():
        checkpoint = None if resume is None else str(checkpoint_to_resume(training, resume))
        if checkpoint is None:
            refuse_used(training.output_dir)
        folder = Path(training.output_dir)
        if rank() == 0:
            rundir.prepare(training.output_dir, training.as_yaml())
        wandb = rank() == 0 and "wandb" in training.training.report_to  # the other processes report nothing
        without_wandb = wandb and not rundir.wandb_offline_without_key(folder)
        trainer = TRAINERS[training.kind](training, folder)
        if without_wandb:
            trainer.remove_callback(WandbCallback)
        trainer.recipe = training.resolved()
        show(trainer)
        compile_attention(trainer, training)
        if training.taught() is not None:
            trainer.args.eval_on_start = trainer.eval_dataset is not None and checkpoint is None
        final = folder / RUN_MODEL
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
            export_model(trainer, final, lora=training.lora is not None, cache=training.exported_cache())
        finally:
            close_engine(trainer)  # last: an engine may take the process group down with it
        leave_group()
    return final


def with_choices(recipe: TrainRecipe) -> TrainRecipe:
    """The recipe with its engine and its attention kernel chosen for this machine; both are said, with the reason."""
    from sparse_rl.attention.choice import check_target, choose_kernel, will_check
    from sparse_rl.commands.sampling import choose_recipe_engine
    from sparse_rl.models.load import load_config
    from trainer.rundir import check_world

    check_world(recipe.launch.processes)
    config = load_config(recipe.model)
    if recipe.engine_config() is not None:
        chosen, finding = choose_recipe_engine(recipe, config)
        say("rollouts", finding)
        recipe = chosen.as_training()
    if (wanted := recipe.attention_kernel()) is not None:
        if will_check(wanted):
            say("attention kernel", "FlexAttention is compiled and checked on this GPU, which takes a while")
        kernel, finding = choose_kernel(wanted, map(load_config, recipe.attending_models()), recipe.dtype)
        say("attention kernel", finding)
        recipe = recipe.with_attention_kernel(kernel)
        if recipe.foresees() and will_check("auto"):
            say("scorers' target", str(check_target(config, recipe.dtype)))
    return recipe


def compile_attention(trainer: Any, recipe: TrainRecipe) -> None:
    """Compile FlexAttention for the longest rows before the first step, and say so."""
    if not (kernel := recipe.attention_kernel() or "").startswith("flex"):
        return
    from sparse_rl.attention.ahead import compile_ahead, sizes_up_to
    from sparse_rl.commands.memory import prompt_tokens

    longest = recipe.longest_row(prompt_tokens(recipe.data))
    assert longest is not None, "what is trained under evictions bounds its rows"
    *shorter, size = sizes_up_to(longest)
    later = f"; {len(shorter)} smaller sizes when they are first met" if shorter else ""
    say("attention kernel", f"compiling for rows of {size} tokens{later}")
    rows, weights = recipe.training.per_device_train_batch_size, next(trainer.model.parameters())
    where = trainer.accelerator.device, weights.dtype
    with trainer.accelerator.autocast():
        compile_ahead(kernel, trainer.model.config, rows, longest, *where, target=recipe.foresees())
