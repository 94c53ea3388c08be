"""Functions that read files up to a size limit, replace whole files, and reset the permissions of files."""

from __future__ import annotations

import io
import os
import stat
from errno import EISDIR
from pathlib import Path

from sparse_rl.errors import UserError

MOST_JSON = 128 * 2**20  # maximum bytes of a settings, index or tokenizer file; the largest known has 35 million
MOST_TEXT = 2**30  # maximum bytes of a text or results file


def check_readable(file: str | Path, most: int = MOST_JSON) -> None:
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


def replace_text(file: str | Path, text: str) -> None:
    """Write a UTF-8 text file so that readers see the old or the new text, never a part. Raises OSError."""
    new = Path(f"{file}.{os.getpid()}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, file)


def usual_permissions(file: str | Path) -> None:
    """Set a file's permissions to rw-rw-rw- minus the user's umask."""
    umask = os.umask(0o077)
    os.umask(umask)
    os.chmod(file, 0o666 & ~umask)
