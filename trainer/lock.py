"""A lock that allows one run at a time in a run directory.

The lock is a POSIX record lock. The kernel, or the server of a shared file system (NFS, Lustre, GPFS), releases the
lock even if the process crashes, and child processes do not inherit it. The lock file remains in the directory.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EACCES, EAGAIN
from pathlib import Path
from typing import IO

from sparse_rl.errors import UserError

logger = logging.getLogger("sparse_rl")
LOCK_FILE = "run.lock"


@contextmanager
def locked(output_dir: str) -> Iterator[None]:
    """Hold the lock of the directory in this block, or raise UserError if another run holds it.

    Only the first process of a launch calls this, because only that process writes to the directory.
    """
    with _open_locked(Path(output_dir)) as file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def refuse_running(output_dir: str) -> None:
    """Raise UserError if a run is currently writing in output_dir."""
    if (Path(output_dir) / LOCK_FILE).is_file():
        _open_locked(Path(output_dir)).close()


def _open_locked(folder: Path) -> IO[str]:
    """Return the open and locked lock file. Closing the file releases the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("a+")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} cannot be written: {error}", "output_dir") from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (EACCES, EAGAIN):
            file.seek(0)
            holder = file.read(300).strip() or "another process"
            file.close()
            wrong = f"{folder} is in use by a run: {holder}; wait for its end, stop it, or choose another output_dir"
            raise UserError(wrong, "output_dir") from None
        logger.warning(
            "the file system of %s has no locks (%s): do not start a second run there", folder, error.strerror
        )
    return file
