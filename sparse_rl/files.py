"""Functions that read files up to a size limit, compare and replace whole files, and reset the permissions of files."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterable
from errno import EISDIR, ENOTDIR
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from sparse_rl.errors import UserError, unread

MOST_JSON = 128 * 2**20  # maximum bytes of a settings, index or tokenizer file; the largest known has 35 million
MOST_TEXT = 2**30  # maximum bytes of a text or results file
PROBE = 2**16  # bytes that a check of a folder writes and removes
DAMAGED = (OSError, ValueError, LookupError, TypeError, ArithmeticError, AttributeError)  # raised by wrong content
PIECES, PIECE = 1024, 2**16  # a fingerprint reads at most this number of pieces, of this number of bytes
HEADER = 2**20  # bytes at the start of a file that are always read


def check_readable(file: str | Path, most: float = MOST_JSON) -> None:
    """Raise UserError for a file of more than `most` bytes, and for a device or a pipe, which may be endless.

    Raises OSError if `os.stat` fails, and IsADirectoryError for a directory.
    """
    status = os.stat(file)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise UserError("it is not a regular file")
    if status.st_size > most:
        raise UserError(f"it has {status.st_size:,} bytes, and at most {most:,} are read")


def read_text(file: str | Path, most: int = MOST_JSON) -> str:
    """Return the UTF-8 text of a regular file of at most `most` bytes, with every line ending as \\n.

    Raises the errors of `check_readable`, OSError if the file cannot be read, and UnicodeDecodeError.
    """
    check_readable(file, most)
    with Path(file).open("rb") as opened:
        return io.StringIO(opened.read(most).decode("utf-8"), newline=None).read()


def read_json(file: str | Path, most: int = MOST_JSON) -> dict[str, Any]:
    """Return the mapping that a JSON file holds. Raises OSError, or ValueError if it holds something else."""
    text = read_text(file, most)
    try:
        content = json.loads(text)
    except RecursionError:
        raise UserError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise UserError("it is not a mapping")
    if re.search(r"\\u[dD][89a-fA-F]", text):
        json.dumps(content, ensure_ascii=False).encode()  # fails for half a surrogate pair, which cannot be printed
    return content


def open_tensors(file: str | Path) -> Any:
    """Open a safetensors file. Raises the errors of `check_readable`, and any exception for a damaged file."""
    from safetensors import safe_open

    check_readable(file, math.inf)
    return safe_open(str(file), framework="pt")


def fingerprint(file: Path) -> str:
    """Return a file's size and a digest: of all its bytes, or if it has more than 64 MiB, of evenly spread pieces.

    The pieces make it fast for weights. Training changes all weights, so two trained models differ in some piece.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        digest = hashlib.sha256(opened.read(HEADER))
        for place in range(0, size, max(PIECE, size // PIECES)):
            opened.seek(place)
            digest.update(opened.read(PIECE))
    return f"{size:,} bytes, {digest.hexdigest()[:16]}"


def replace_text(file: str | Path, text: str) -> None:
    """Write a UTF-8 text file so that readers see the old or the new text, never a part. Raises OSError."""
    new = Path(f"{file}.{os.getpid()}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, file)


def make_folder(folder: str | Path, key: str) -> None:
    """Create a folder unless it exists. Raises UserError, with the recipe key or option that names the folder."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {unread(error)}; name another folder", key) from error


def check_folder(folder: Path, key: str, files: Iterable[str], folders: Iterable[str] = ()) -> None:
    """Raise UserError if a command cannot write into a folder, which need not exist. The check leaves nothing behind.

    key : recipe key or option that names the folder
    files, folders : glob patterns of the files and of the folders that the command writes in it
    """
    place = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))
    try:
        if not place.is_dir():
            raise NotADirectoryError(ENOTDIR, "it is not a folder")
        with tempfile.TemporaryDirectory(dir=place) as inner, open(Path(inner) / "probe", "wb") as probe:
            probe.write(bytes(PROBE))  # shows what permissions do not: a full disk, a quota, /proc
            probe.flush()
            os.fsync(probe.fileno())
        names = os.listdir(folder) if place == folder.absolute() else []
    except OSError as error:
        why = "is not writable" if isinstance(error, PermissionError) else f"({unread(error)})"
        raise UserError(f"{folder} cannot be written: {place} {why}; name another folder", key) from error
    for patterns, is_right, kind in ((files, os.path.isfile, "a file"), (folders, os.path.isdir, "a folder")):
        for name in (name for name in names if any(fnmatch(name, pattern) for pattern in patterns)):
            if not is_right(folder / name) or not os.access(folder / name, os.W_OK):
                wrong = f"{folder / name} is not {kind} that can be written, as a run needs there"
                raise UserError(f"{wrong}; move it away, or name another folder", key)


def usual_permissions(file: str | Path) -> None:
    """Set a file's permissions to rw-rw-rw- minus the user's umask."""
    umask = os.umask(0o077)
    os.umask(umask)
    os.chmod(file, 0o666 & ~umask)
