"""Files: what a user names is read up to a bound; what a library makes for its owner alone is made like any other."""

from __future__ import annotations

import io
import os
import stat
from errno import EISDIR
from pathlib import Path

from sparse_rl.errors import UserError

MOST_JSON = 128 * 2**20  # bytes of settings, indices, tokenizers: the largest known, a tokenizer's, has 35 million
MOST_TEXT = 2**30  # bytes of a text, or of results


def check_readable(file: str | Path, most: int = MOST_JSON) -> None:
    """Raise UserError for what has no end (a device, a pipe), and for a file of more than `most` bytes; OSError as
    `stat` does.
    """
    found = os.stat(file)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
    if not stat.S_ISREG(found.st_mode):
        raise UserError("it is no regular file")
    if found.st_size > most:
        raise UserError(f"it has {found.st_size:,} bytes, and at most {most:,} are read")


def read_text(file: str | Path, most: int = MOST_JSON) -> str:
    """The text of a regular file of at most `most` bytes, in UTF-8, with every end of a line as \\n.

    Raises OSError, UnicodeDecodeError, UserError.
    """
    check_readable(file, most)
    with Path(file).open("rb") as opened:
        return io.StringIO(opened.read(most).decode("utf-8"), newline=None).read()


def usual_permissions(file: str | Path) -> None:
    """Give a file what the user's umask leaves of rw-rw-rw-."""
    umask = os.umask(0o077)
    os.umask(umask)
    os.chmod(file, 0o666 & ~umask)
