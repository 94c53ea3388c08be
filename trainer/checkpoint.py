"""A checkpoint on disk: whole, or not there.

It is written under `_partial/` beside the others, given a manifest with size and SHA-256 of each file, forced to the
disk, and renamed into its place: one step of the file system. Processes on several machines must share that. What is
in the files says trainer/resumable.py, which one is resumed trainer/resume.py.
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
PARTIAL = "_partial"  # the hub's uploads leave out what begins with an underscore
READERS = 4  # files hashed at a time
FULL = 16 * 2**20  # bytes free below which a write that failed has filled the disk
ABOUT = {"step": int, "processes": int, "zero_stage": int, "recipe": (dict, NoneType), "versions": dict, "files": dict}
FILE = {"size": int, "sha256": str}
DEEPEST = 20  # levels in a manifest; a recipe has a few
LOADED = (".pt", ".pth", ".bin", ".safetensors")  # what a library may load because it lies there


def file_digests(folder: Path, share: slice = slice(None)) -> dict[str, dict[str, Any]]:
    """Relative name -> {size, sha256} of the files of a folder, or of a share of them."""

    def one(name: str) -> dict[str, Any]:
        return {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name)}

    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())[share]
    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def write_manifest(folder: Path, files: Mapping[str, Mapping[str, Any]], **about: Any) -> None:
    """manifest.json: what the checkpoint is, its files, and a checksum of all that."""
    content = {"format_version": FORMAT_VERSION, **about, "files": dict(sorted(files.items()))}
    (folder / MANIFEST).write_text(json.dumps({**content, "checksum": _checksum(content)}, indent=1) + "\n")


def publish(made: Path, place: Path) -> None:
    """Force a finished folder to the disk and rename it into its place; an older one of that name goes."""
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
    """Remove what is in `_partial`, and with the last of it the folder itself."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def _sync(path: Path) -> None:
    """Force a file, or the names in a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def disk_is_full(error: Exception, folder: Path) -> bool:
    """Whether that is why a write failed, as far as error and folder tell: torch says nothing, safetensors a text."""
    chain: BaseException | None = error
    full = shutil.disk_usage(folder).free < FULL
    while chain is not None and not full:
        full = (isinstance(chain, OSError) and chain.errno in (ENOSPC, EDQUOT)) or os.strerror(ENOSPC) in str(chain)
        chain = chain.__cause__ or chain.__context__
    return full


def failure(what: str, folder: Path, error: Exception) -> NotWrittenError:
    """The error of a write that failed, in a run directory, which may have filled the disk."""
    full = disk_is_full(error, folder)
    why = "the disk is full" if full else f"{type(error).__name__}: {' '.join(str(error).split())}"
    newest = newest_whole(folder)
    kept = f"{newest.name} is whole, --resume continues from it" if newest else "there is no checkpoint before it"
    return NotWrittenError(what, f"{why}; in {folder} {kept}")


def checkpoints(folder: Path) -> list[Path]:
    """Every checkpoint-N of a run directory, whole or not, by step."""
    found = (path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal())
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's folder names."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def whole_checkpoints(folder: Path) -> list[Path]:
    """Those whose files are all there in their sizes, by step."""
    return [path for path in checkpoints(folder) if damage(path, contents=False) is None]


def newest_whole(folder: Path) -> Path | None:
    """The whole checkpoint of the latest step; None where there is none."""
    return next(reversed(whole_checkpoints(folder)), None)


def keep_last(folder: Path, limit: int | None, best: str | None = None) -> None:
    """Remove the oldest whole checkpoints beyond `limit`, but not `best`."""
    whole = [path for path in whole_checkpoints(folder) if best is None or path != Path(best)]
    for old in whole[:-limit] if limit else ():
        gone = folder / PARTIAL / old.name
        gone.parent.mkdir(exist_ok=True)
        os.rename(old, gone)  # a run killed while it removes leaves no half checkpoint
        remove(gone)


def clear_partial(folder: Path) -> None:
    """Remove the half-written checkpoints that a killed run left in a run's folder."""
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)


def set_aside_later(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints after `step`, which a run resumed there will write again; returns the new names."""
    later = {path: path.with_name(f"later-{path.name}") for path in checkpoints(folder) if step_of(path) > step}
    for path, aside in later.items():
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    return list(later.values())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises UserError where it cannot be trusted."""
    file = folder / MANIFEST
    if not file.is_file():
        raise UserError(f"{MANIFEST} is missing")
    try:
        content = json.loads(read_text(file))
        expected, found = content.pop("checksum"), _checksum(content)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise UserError(f"{MANIFEST} is truncated or altered") from None
    if expected != found:
        raise UserError(f"{MANIFEST} has been altered")
    if (version := content.get("format_version")) != FORMAT_VERSION:
        raise UserError(f"it has format version {str(version)[:20]}, this version reads {FORMAT_VERSION}")
    if wrong := _missing(content, ABOUT):
        raise UserError(f"{MANIFEST} does not say what it must of: {', '.join(wrong)}")
    if not all(isinstance(of, dict) and not _missing(of, FILE) for of in content["files"].values()):
        raise UserError(f"{MANIFEST} does not give size and sha256 of each file")
    if _deeper(content, DEEPEST):
        raise UserError(f"{MANIFEST} is nested more than {DEEPEST} deep")
    return content


def _missing(content: Mapping[str, Any], kinds: Mapping[str, Any]) -> list[str]:
    """The names that have no value of their kind."""
    return [name for name, kind in kinds.items() if not isinstance(content.get(name, ...), kind)]


def _deeper(value: Any, levels: int) -> bool:
    within = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_deeper(one, levels - 1) for one in within)


def damage(folder: Path, contents: bool = True) -> str | None:
    """The first thing wrong with a checkpoint, by its file; None where it is whole.

    contents : read every file too, not only its size
    """
    try:
        return next(_wrong(folder, read_manifest(folder)["files"], contents), None)
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"


def _wrong(folder: Path, files: Mapping[str, Mapping[str, Any]], contents: bool) -> Iterator[str]:
    for name, noted in files.items():
        file = folder / name
        if not file.is_file():
            yield f"{name} is missing"
        elif (size := file.stat().st_size) != noted["size"]:
            word = "truncated" if size < noted["size"] else "altered"
            yield f"{name} is {word} ({size} bytes, {noted['size']} were written)"
    present = (str(file.relative_to(folder)) for file in folder.rglob("*") if file.suffix in LOADED)
    yield from (f"{name} is not of it: {MANIFEST} does not name it" for name in present if name not in files)
    if contents:
        with ThreadPoolExecutor(READERS) as pool:
            for name, found in zip(files, pool.map(lambda name: sha256(folder / name), files), strict=True):
                if found != files[name]["sha256"]:
                    yield f"{name} has been altered (its SHA-256 differs)"


def sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
