"""Writes and reads checkpoints on disk so that each is either complete or absent.

A checkpoint is first written to `_partial/` in the run directory, with a manifest that lists the size and SHA-256 of
each file. The checkpoint is synced to disk, and then renamed atomically to its final name. Processes on several
machines must share the file system. trainer/resumable.py writes the files; trainer/resume.py chooses a checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from errno import EDQUOT, ENOSPC
from pathlib import Path
from types import NoneType
from typing import Any

from sparse_rl.errors import NotWrittenError, UserError
from sparse_rl.files import read_text, usual_permissions

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
PARTIAL = "_partial"  # uploads to the Hub skip names that begin with an underscore
READERS = 4  # number of files that are hashed in parallel
FULL = 16 * 2**20  # a failed write counts as a full disk if fewer bytes than this are free
ABOUT = {"step": int, "processes": int, "zero_stage": int, "recipe": (dict, NoneType), "versions": dict, "files": dict}
FILE = {"size": int, "sha256": str}
DEEPEST = 20  # maximum nesting depth of a manifest; a recipe has only a few levels
LOADED = (".pt", ".pth", ".bin", ".safetensors")  # files that a library may load merely because they exist


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
    old = made.with_name(f"{made.name}.old")
    if place.exists():
        os.rename(place, old)
    os.rename(made, place)
    _sync(place.parent)
    remove(old)


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


def disk_is_full(error: Exception, folder: Path) -> bool:
    """Return True if a write failed because the disk is full.

    torch does not report the cause of a failed write, and safetensors reports it only as text.
    """
    chain: BaseException | None = error
    full = shutil.disk_usage(folder).free < FULL
    while chain is not None and not full:
        full = (isinstance(chain, OSError) and chain.errno in (ENOSPC, EDQUOT)) or os.strerror(ENOSPC) in str(chain)
        chain = chain.__cause__ or chain.__context__
    return full


def failure(what: str, folder: Path, error: Exception) -> NotWrittenError:
    """Return the error for a failed write of `what`. It names the cause and the newest complete checkpoint."""
    full = disk_is_full(error, folder)
    why = "the disk is full" if full else f"{type(error).__name__}: {' '.join(str(error).split())}"
    newest = newest_whole(folder)
    kept = f"{newest.name} is complete, --resume continues from it" if newest else "there is no earlier checkpoint"
    return NotWrittenError(what, f"{why}; in {folder} {kept}")


def checkpoints(folder: Path) -> list[Path]:
    """Return every checkpoint-N of a run directory, complete or not, ordered by step."""
    actual = (path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal())
    return sorted(actual, key=step_of)


def step_of(checkpoint: Path) -> int:
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
        content = json.loads(read_text(file))
        expected, actual = content.pop("checksum"), _checksum(content)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise UserError(f"{MANIFEST} is truncated or altered") from None
    if expected != actual:
        raise UserError(f"{MANIFEST} has been altered")
    if (version := content.get("format_version")) != FORMAT_VERSION:
        raise UserError(
            f"its format version is {str(version)[:20]}, but this version of sparse-rl reads {FORMAT_VERSION}"
        )
    if wrong := _missing(content, ABOUT):
        raise UserError(f"{MANIFEST} has missing or invalid entries: {', '.join(wrong)}")
    if not all(isinstance(record, dict) and not _missing(record, FILE) for record in content["files"].values()):
        raise UserError(f"{MANIFEST} does not give the size and sha256 of each file")
    if _deeper(content, DEEPEST):
        raise UserError(f"{MANIFEST} is nested more than {DEEPEST} levels deep")
    return content


def _missing(content: Mapping[str, Any], kinds: Mapping[str, Any]) -> list[str]:
    """Return the names in `kinds` (name -> type) whose value in `content` is missing or has the wrong type."""
    return [name for name, kind in kinds.items() if not isinstance(content.get(name, ...), kind)]


def _deeper(value: Any, levels: int) -> bool:
    """Return True if dicts and lists are nested more than `levels` deep."""
    within = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_deeper(entry, levels - 1) for entry in within)


def damage(folder: Path, contents: bool = True) -> str | None:
    """Return a description of a checkpoint's first problem. None means that the checkpoint is complete.

    contents : True also compares the checksum of every file, not only its size
    """
    try:
        return next(_problems(folder, read_manifest(folder)["files"], contents), None)
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"


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
    if contents:
        with ThreadPoolExecutor(READERS) as pool:
            for name, actual in zip(files, pool.map(lambda name: sha256(folder / name), files), strict=True):
                if actual != files[name]["sha256"]:
                    yield f"{name} has been altered (its SHA-256 differs)"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
