"""`sparse-rl train`: check a recipe, start its processes, build model, engine and trainer, and train."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.commands.arguments import add_dry_run, add_recipe, file_name, print_findings, read_recipe
from sparse_rl.commands.console import Session, quiet_loading, rank, say, training_shown, warn
from sparse_rl.errors import UserError
from sparse_rl.methods.config import PolicyConfig
from sparse_rl.progress import stage
from sparse_rl.recipe import Recipe, TaughtRecipe, TrainRecipe
from sparse_rl.recipe.kinds.sampled import ReplayedRecipe, SampledRecipe
from trainer.checkpoint import read_manifest

if TYPE_CHECKING:
    from sparse_rl.commands.prepared import Prepared

ABOUT = "Train a model by a recipe. Starts the recipe's processes itself."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        const="newest",
        type=file_name,
        metavar="DIR",
        help="continue from a checkpoint; without DIR from the newest",
    )
    add_dry_run(parser)


def separate_override_from_resume(options: argparse.Namespace) -> None:
    """Treat the arguments `--resume seed=1` as `--resume` without a value, followed by the override `seed=1`."""
    if "=" in (options.resume or "") and not Path(options.resume).exists():
        options.overrides.append(options.resume)
        options.resume = "newest"


def run(options: argparse.Namespace, session: Session) -> int:
    recipe = read_recipe(options).expect(TrainRecipe)  # mistakes are reported before heavy imports

    from trainer.launch import launched
    from trainer.once import remembered

    if not options.dry_run:
        session.folder = Path(recipe.output_dir)
    if not launched():
        check_folder(recipe, options.resume)
    quiet_loading(session.verbose)
    with remembered():
        return _run(options, recipe)


def check_folder(recipe: TrainRecipe, resume: str | None) -> None:
    """Raise UserError if the run cannot use its output_dir. The check does not create the directory."""
    from trainer.lock import refuse_running
    from trainer.resume import refuse_used

    folder = Path(recipe.output_dir)
    parent = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        why = "is not writable" if parent.is_dir() else "is not a folder"
        raise UserError(f"{folder} cannot be written: {parent} {why}; name another folder", "output_dir")
    if recipe.launch.machine_rank == 0:  # only this machine writes; the other machines may start later
        refuse_running(recipe.output_dir)
    if resume is None:
        refuse_used(recipe.output_dir)


def _run(options: argparse.Namespace, recipe: TrainRecipe) -> int:
    from sparse_rl.commands.checks import NOT_CHECKED, prepare_training
    from trainer.launch import crowded, launched, needs_launch, take_device

    if launched():
        take_device()
    here = launched() or not (options.dry_run or needs_launch(recipe.launch))
    with stage("checking", recipe.model):
        prepared = prepare_training(recipe, options.resume, here)
    if options.dry_run:
        print_findings(prepared.findings, NOT_CHECKED)
        return 0
    if not launched():
        if prepared.checkpoint is not None:
            say(f"resuming from step {read_manifest(prepared.checkpoint)['step']}", str(prepared.checkpoint))
        if problem := crowded(recipe.launch):
            warn(f"launch.processes: {problem}")
    if not here:
        return _launch(options, prepared)
    with training_shown(recipe.model) as show:
        model = run_training(prepared, show)
    if rank() == 0:
        from sparse_rl.attention.families import family_only_hf

        print(f"model: {model}", what_next(recipe, served=family_only_hf(prepared.config) is None), sep="\n")
    return 0


def _launch(options: argparse.Namespace, prepared: Prepared) -> int:
    """Start the training processes, which receive the data that this process has read, and return the exit status."""
    from sparse_rl.commands.examples import taught_examples
    from trainer.launch import launch
    from trainer.once import left_words

    recipe, words = prepared.recipe, options.arguments
    if prepared.checkpoint is not None:  # pass the checkpoint that was resolved here
        words = ["train", options.recipe, *options.overrides, "--resume", str(prepared.checkpoint)]
        words += ["--verbose"] if options.verbose else []
    if isinstance(recipe, TaughtRecipe):
        with stage("loading", recipe.model):
            taught_examples(prepared)
    status = launch(recipe.launch, words)
    print(left_words(), end="", file=sys.stderr)
    return status


def what_next(recipe: TrainRecipe, served: bool = True) -> str:
    """Return lines with commands that a user can run next on the run of this recipe.

    served : False if vLLM cannot sample from a model of this family
    """
    from trainer.card import evaluation_of

    run = shlex.quote(recipe.output_dir)
    task = None if recipe.data.synthetic is None else recipe.data.synthetic.task
    evaluated = run if recipe.evaluation(run) else evaluation_of(task, run)
    commands = {} if evaluated is None else {f"eval {evaluated}": "measure its accuracy"}
    cache: PolicyConfig | None = getattr(recipe, "cache", None)
    if served and (cache is None or cache.only_hf is None):
        commands[f"serve {run}"] = "serve it with OpenAI's API and vLLM"
    commands[f"plot {run}"] = "draw its curves"
    width = max(map(len, commands))
    return "\n".join(f"next:  sparse-rl {command:<{width}}  # {about}" for command, about in commands.items())


def train(recipe: Recipe, resume: str | None = None, show: Callable[[Any], None] = lambda _: None) -> Path:
    """Run a training recipe in this process (in a launch, in each process), and return the final model's directory.

    resume : checkpoint directory, or "newest" for the newest one in the recipe's output_dir
    show : function that is called with the trainer before training, such as the one that `training_shown` yields
    """
    from sparse_rl.commands.checks import prepare_training

    return run_training(prepare_training(recipe.expect(TrainRecipe), resume), show)


def run_training(prepared: Prepared[TrainRecipe], show: Callable[[Any], None]) -> Path:
    """Call `show` with the trainer of a prepared recipe, train, and return the directory of the final model."""
    from transformers.integrations import WandbCallback

    from sparse_rl.attention import compute_exactly
    from sparse_rl.commands.trainers import TRAINERS
    from sparse_rl.models.directory import RUN_MODEL
    from trainer import rundir
    from trainer.export import close_engine, export_model
    from trainer.launch import leave_group
    from trainer.lock import locked
    from trainer.resume import refuse_used

    recipe, checkpoint, folder = prepared.recipe, prepared.checkpoint, Path(prepared.recipe.output_dir)
    rundir.check_world(recipe.launch.processes)
    compute_exactly(recipe.rollout is None or recipe.rollout.exact)
    with locked(recipe.output_dir) if rank() == 0 else nullcontext():
        if checkpoint is None:
            refuse_used(recipe.output_dir)
        if rank() == 0:
            rundir.prepare(recipe.output_dir, recipe.as_yaml())
        wandb = rank() == 0 and "wandb" in recipe.training.report_to  # only rank 0 reports
        without_wandb = wandb and not rundir.wandb_offline_without_key(folder)
        trainer = TRAINERS[recipe.kind](prepared, folder)
        if without_wandb:
            trainer.remove_callback(WandbCallback)
        trainer.recipe = recipe.resolved()
        show(trainer)
        compile_attention(trainer, recipe)
        if isinstance(recipe, TaughtRecipe):
            trainer.args.eval_on_start = trainer.eval_dataset is not None and checkpoint is None
        final = folder / RUN_MODEL
        try:
            trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
            cache = recipe.cache if isinstance(recipe, SampledRecipe) else None  # kvpop's trainer saves the policy
            export_model(trainer, final, lora=recipe.lora is not None, cache=cache)
        finally:
            close_engine(trainer)  # last, because an engine may destroy the process group
        leave_group()
    return final


def compile_attention(trainer: Any, recipe: TrainRecipe) -> None:
    """Compile FlexAttention for the longest rows before the first step, and print a line about it."""
    if not isinstance(recipe, ReplayedRecipe) or not recipe.replay.attention_kernel.startswith("flex"):
        return
    from sparse_rl.attention.ahead import compile_ahead, sizes_up_to
    from sparse_rl.commands.memory import prompt_tokens

    max_length = recipe.longest_row(prompt_tokens(recipe.data))
    assert max_length is not None, "recipes that train under evictions bound their rows"
    *shorter, size = sizes_up_to(max_length)
    later = f"; {len(shorter)} smaller sizes follow when first needed" if shorter else ""
    say("attention kernel", f"compiling for rows of {size} tokens{later}")
    rows, weights = recipe.training.per_device_train_batch_size, next(trainer.model.parameters())
    placement = trainer.accelerator.device, weights.dtype
    with trainer.accelerator.autocast():
        compile_ahead(
            recipe.replay.attention_kernel, trainer.model.config, rows, max_length, *placement, target=recipe.foresees()
        )
