"""One run at a time in a run directory: a lock that dies with the process that writes there.

It is a POSIX record lock, which the kernel, or the server of a shared file system (NFS, Lustre, GPFS), drops with its
process, however that ends; children do not inherit it. The file stays behind, and says who had the lock last.
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
    """In this block the directory, which is made where it is not there, is this process's own.

    For the one process of a launch that writes: its first. Raises UserError where another run has it.
    """
    with _taken(Path(output_dir)) as file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def refuse_running(output_dir: str) -> None:
    """Raise UserError where a run is writing in output_dir now."""
    if (Path(output_dir) / LOCK_FILE).is_file():
        _taken(Path(output_dir)).close()


def _taken(folder: Path) -> IO[str]:
    """The open file, with the lock on it; closing drops it."""
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
            who = file.read(300).strip() or "another process"
            file.close()
            wrong = f"{folder} is in use by a run: {who}; wait, stop it, or choose another"
            raise UserError(wrong, "output_dir") from None
        logger.warning("the file system of %s has no locks (%s): start no second run there", folder, error.strerror)
    return file
