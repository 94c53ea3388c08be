"""`sparse-rl train`: check a recipe, start its processes, build model, engine and trainer, and train."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollout.config import COMPLETIONS
from sparse_rl.commands.arguments import add_dry_run, add_recipe, file_name, print_findings, read_recipe
from sparse_rl.commands.console import ERROR_LOG, Session, quiet_loading, training_shown
from sparse_rl.files import check_folder
from sparse_rl.metrics import ENVIRONMENT_FILE, METRICS_FILE, RECIPE_FILE, read_metrics, why_unchanged
from sparse_rl.models.directory import RUN_MODEL
from sparse_rl.progress import rank, say, stage, warn
from sparse_rl.recipe import Recipe, ReplayedRecipe, Run, TaughtRecipe, TrainRecipe
from sparse_rl.recipe.yaml_text import dump_yaml
from trainer.checkpoint import PARTIAL, newest_whole, read_manifest

ABOUT = "Train a model by a recipe. Starts the recipe's processes itself."
NOT_CHECKED = (
    "the values of the weights; memory (sparse-rl doctor RECIPE); calls of the rewards; rows remaining after keep "
    "and length limits; DeepSpeed and several processes; servers of rollouts; trainer options beyond their types"
)


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

    from trainer.launch import launched, remembered

    if not options.dry_run:
        session.folder = Path(recipe.output_dir)
        session.interrupted = partial(how_to_continue, options, recipe)
    if not launched():
        check_output(recipe, options.resume)
    quiet_loading(session.verbose)
    with remembered():
        return _run(options, recipe)


def check_output(recipe: TrainRecipe, resume: str | None) -> None:
    """Raise UserError if the run cannot use its output_dir. The check does not create the directory."""
    from trainer.checkpoint import LOCK_FILE, refuse_running, refuse_used

    files = (RECIPE_FILE, ENVIRONMENT_FILE, METRICS_FILE, COMPLETIONS, LOCK_FILE, ERROR_LOG, "rollout-server-*.log")
    check_folder(Path(recipe.output_dir), "output_dir", files, (RUN_MODEL, PARTIAL, "checkpoint-[0-9]*"))
    if recipe.launch.machine_rank == 0:  # only this machine writes; the other machines may start later
        refuse_running(recipe.output_dir)
    if resume is None:
        refuse_used(recipe.output_dir)


def _run(options: argparse.Namespace, recipe: TrainRecipe) -> int:
    from trainer.launch import crowded, launched, needs_launch, take_device

    if launched():
        take_device()
    here = launched() or not (options.dry_run or needs_launch(recipe.launch))
    with stage("checking", recipe.model):
        run = recipe.prepare_training(options.resume, here)
    if options.dry_run:
        print_findings(run.findings, NOT_CHECKED)
        return 0
    if not launched():
        if run.checkpoint is not None:
            say(f"resuming from step {read_manifest(run.checkpoint)['step']}", str(run.checkpoint))
        if problem := crowded(recipe.launch):
            warn(f"launch.processes: {problem}")
    if not here:
        return _launch(options, run)
    with training_shown(recipe.model) as show:
        model = run_training(run, show)
    if rank() == 0:
        from sparse_rl.attention.families import family_only_hf

        zeroed = recipe.resolved().get("zero_truncated_advantages", True)
        unchanged = why_unchanged(read_metrics(recipe.output_dir), zeroed)
        print(f"model: {model}")
        if unchanged is not None:
            warn(unchanged)
        served = family_only_hf(run.config) is None and find_spec("vllm") is not None
        print(what_next(recipe, served, changed=unchanged is None))
    return 0


def _launch(options: argparse.Namespace, run: Run) -> int:
    """Start the training processes, which receive the data that this process has read, and return the exit status."""
    from trainer.launch import launch, rollout_servers

    recipe, words = run.recipe, options.arguments
    if run.checkpoint is not None:  # pass the checkpoint that was resolved here
        words = ["train", options.recipe, *options.overrides, "--resume", str(run.checkpoint)]
        words += ["--verbose"] if options.verbose else []
    if isinstance(recipe, TaughtRecipe):
        with stage("loading", recipe.model):
            recipe.examples(run)
    if not (count := recipe.launch.rollout_gpus):
        return launch(recipe.launch, words)
    with rollout_servers(count, recipe.serving_words(), Path(recipe.output_dir)):
        return launch(recipe.launch, words)


def how_to_continue(options: argparse.Namespace, recipe: TrainRecipe) -> str:
    """Return the end of the line about an interrupted run: its newest checkpoint, and the command that resumes it."""
    newest = newest_whole(Path(recipe.output_dir))
    if newest is None:
        return f"{recipe.output_dir} has no checkpoint (save_steps: {recipe.training.save_steps:g}); start again"
    words = ["sparse-rl", "train", options.recipe, *options.overrides, "--resume"]
    return f"{newest} is complete; continue with: {shlex.join(words)}"


def what_next(recipe: TrainRecipe, served: bool = True, changed: bool = True) -> str:
    """Return lines with commands that a user can run next on the run of this recipe.

    served : False if vLLM is not installed, or cannot sample from a model of this family
    changed : False if the final weights equal the initial weights
    """
    from trainer.export import evaluation_of

    run, cache = shlex.quote(recipe.output_dir), getattr(recipe, "cache", None)
    if not changed:
        return f"next:  sparse-rl report {run}  # look for the cause"
    task = None if recipe.data.synthetic is None else recipe.data.synthetic.task
    evaluated = run if recipe.evaluation(run) else evaluation_of(task, run)
    commands = {} if evaluated is None else {f"eval {evaluated}": "measure its accuracy"}
    if served and (cache is None or cache.only_hf is None):
        commands[f"serve {run}"] = "serve it with OpenAI's API and vLLM"
    commands[f"plot {run}"] = "draw its curves"
    return "\n".join(f"next:  sparse-rl {command}  # {about}" for command, about in commands.items())


def train(recipe: Recipe, resume: str | None = None, show: Callable[[Any], None] = lambda _: None) -> Path:
    """Run a training recipe in this process (in a launch, in each process), and return the final model's directory.

    resume : checkpoint directory, or "newest" for the newest one in the recipe's output_dir
    show : function that is called with the trainer before training, such as the one that `training_shown` yields
    """
    return run_training(recipe.expect(TrainRecipe).prepare_training(resume), show)


def run_training(run: Run[TrainRecipe], show: Callable[[Any], None]) -> Path:
    """Call `show` with the trainer of a run, train, and return the directory of the final model."""
    from transformers.integrations import WandbCallback

    from sparse_rl.attention import compute_exactly
    from sparse_rl.models.directory import RUN_MODEL
    from trainer import rundir
    from trainer.checkpoint import locked, refuse_used
    from trainer.export import close_engine, export_model
    from trainer.launch import leave_group

    recipe, checkpoint, folder = run.recipe, run.checkpoint, Path(run.recipe.output_dir)
    settings = recipe.resolved()
    rundir.check_world(recipe.launch.processes)
    compute_exactly(recipe.rollout is None or recipe.rollout.exact)
    with locked(recipe.output_dir) if rank() == 0 else nullcontext():
        if checkpoint is None:
            refuse_used(recipe.output_dir)
        if rank() == 0:
            rundir.prepare(recipe.output_dir, dump_yaml(settings))
        wandb = rank() == 0 and "wandb" in recipe.training.report_to  # only rank 0 reports
        without_wandb = wandb and not rundir.wandb_offline_without_key(folder)
        trainer = recipe.make_trainer(run, folder)
        trainer.inputs = run.inputs() if rank() == 0 else None
        if without_wandb:
            trainer.remove_callback(WandbCallback)
        trainer.recipe = settings
        show(trainer)
        compile_attention(trainer, recipe)
        if isinstance(recipe, TaughtRecipe):
            trainer.args.eval_on_start = trainer.eval_dataset is not None and checkpoint is None
        final = folder / RUN_MODEL
        try:
            trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
            export_model(trainer, final, lora=recipe.lora is not None)
        finally:
            close_engine(trainer)  # last, because an engine may destroy the process group
        leave_group()
    return final


def compile_attention(trainer: Any, recipe: TrainRecipe) -> None:
    """Compile FlexAttention for the longest rows before the first step, and print a line about it."""
    if not isinstance(recipe, ReplayedRecipe) or not recipe.replay.attention_kernel.startswith("flex"):
        return
    from sparse_rl.attention.startup import compile_ahead
    from sparse_rl.commands.memory import prompt_tokens
    from sparse_rl.kernels.flex import padded
    from sparse_rl.methods.kvpop.config import TargetConfig
    from sparse_rl.methods.kvpop.target import FutureTarget

    max_length = recipe.longest_row(prompt_tokens(recipe.data))
    assert max_length is not None, "recipes that train under evictions bound their rows"
    say("attention kernel", f"compiling for rows of {padded(max_length)} tokens")
    rows, weights = recipe.training.per_device_train_batch_size, next(trainer.model.parameters())
    placement = trainer.accelerator.device, weights.dtype
    target = FutureTarget(TargetConfig()) if recipe.foresees() else None
    with trainer.accelerator.autocast():
        compile_ahead(recipe.replay.attention_kernel, trainer.model.config, rows, max_length, *placement, target)
