"""Writes the files of the run directory, and checks the login to Weights & Biases (W&B)."""

from __future__ import annotations

import json
import logging
import os
from math import isnan
from pathlib import Path
from typing import Any

from accelerate.utils import patch_environment
from transformers import TrainerCallback

from sparse_rl.errors import UserError, one_line
from sparse_rl.files import make_folder, replace_text
from sparse_rl.metrics import ENVIRONMENT_FILE, METRICS_FILE, RECIPE_FILE, read_metrics
from trainer.checkpoint import versions

logger = logging.getLogger("sparse_rl")

COMPLETIONS_PER_STEP = 4


def prepare(output_dir: str, recipe: str) -> Path:
    """Create the directory, write recipe.yaml (with the text `recipe`) and environment.json. Return the path."""
    folder = Path(output_dir)
    make_folder(folder, "output_dir")
    replace_text(folder / RECIPE_FILE, recipe)
    replace_text(folder / ENVIRONMENT_FILE, json.dumps(versions(), indent=2) + "\n")
    return folder


def wandb_offline_without_key(folder: Path) -> bool:
    """Make W&B write into the run directory. If no user is logged in to its server, switch W&B to offline mode.

    Returns False if W&B cannot even run offline, because it cannot read its settings. Both cases are logged.
    """
    os.environ.setdefault("WANDB_DIR", str(folder))
    if os.environ.get("WANDB_MODE") or (why := _without_login()) is None:
        return True
    os.environ["WANDB_MODE"] = "offline"
    if (wrong := _without_login()) is not None:
        logger.warning("this run is not logged to Weights & Biases, which cannot start: %s", wrong)
        return False
    mend = f"Log in with `wandb login` or WANDB_API_KEY; upload {folder}/wandb later with `wandb sync`"
    logger.warning("%s: this run is logged offline. %s", why, mend)
    return True


def _without_login() -> str | None:
    """Return the reason why W&B has no login, or None if a user is logged in or no server is used.

    W&B itself looks up the server and the key; its process is not needed, and not started. Without `silent`, W&B would
    contact the server to print the user's name. WANDB_SILENT also silences a line about the settings file, which W&B
    prints before it reads `silent`. W&B is torn down afterwards, because it would ignore a WANDB_MODE set later.
    """
    try:
        import wandb
        from wandb.sdk import wandb_setup

        if wandb.run is not None:  # the caller's own run, which the training joins
            return None
        with patch_environment(WANDB_SILENT="true"):
            try:
                settings = wandb_setup.singleton().settings
                settings.silent = True
                if settings.mode in ("offline", "dryrun", "disabled") or wandb.login(prompt=False, verify=False):
                    return None
                return f"nobody is logged in to Weights & Biases at {settings.base_url}"
            finally:
                wandb.teardown()
    except (Exception, SystemExit) as error:  # training does not need W&B, so no failure of W&B stops it
        return f"the login to Weights & Biases failed ({one_line(error, 300)})"


def check_world(processes: int) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != processes:
        raise UserError(f"is {processes}, but {world} processes were started", "launch.processes")


class RunLog(TrainerCallback):
    """Writes metrics.jsonl: one line, with the step, for each call of `log`.

    A resumed run first removes the lines after its checkpoint's step, and the summary of the earlier run.
    """

    name = METRICS_FILE

    def __init__(self, folder: Path) -> None:
        self.file = folder / self.name

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            last = state.global_step or -1  # a new run keeps no lines, not even those of step 0
            lines = read_metrics(self.file.parent, self.name)
            kept = [line for line in lines if line["step"] <= last and "train_runtime" not in line]
            replace_text(self.file, "".join(json.dumps(line) + "\n" for line in kept))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if state.is_world_process_zero and logs:
            with self.file.open("a") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


class CompletionLog(RunLog):
    """Writes the first few sampled completions of each step, with advantages and rewards, to completions.jsonl."""

    name = "completions.jsonl"
    trainer: Any = None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not state.is_world_process_zero or "reward" not in (logs or {}):
            return
        logged = self.trainer._logs
        columns = {"prompt": logged["prompt"], "completion": logged["completion"], "advantage": logged["advantages"]}
        for name, values in logged["rewards"].items():  # TRL writes NaN if a reward is None, and JSON has no NaN
            columns[f"rewards/{name}"] = [None if isnan(value) else value for value in values]
        count = min(COMPLETIONS_PER_STEP, *map(len, columns.values()))
        with self.file.open("a") as file:
            for i in range(count):
                row = {"step": state.global_step, **{name: list(values)[i] for name, values in columns.items()}}
                file.write(json.dumps(row) + "\n")
