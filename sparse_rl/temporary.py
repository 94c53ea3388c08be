"""Temporary files: one folder for a command and the processes that it starts, in the directory for temporary files.

The folder goes when the command ends. A killed command cannot remove its own, so the next start removes it. Each
process that uses a folder holds a lock there, which the kernel drops with the process: an unlocked folder is unused.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

PREFIX, LOCK = "sparse-rl-", "in-use"
FOLDER = "SPARSE_RL_TEMPORARY_FOLDER"  # in the environment, for the processes that a command starts


@cache
def temporary_folder() -> str:
    """The folder of this process, or of the command that has started it; what killed commands left is removed."""
    inherited = os.environ.get(FOLDER)
    if inherited is not None and _held(Path(inherited) / LOCK):
        return inherited
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    new = folder / f"{LOCK}.new"
    new.write_text(str(os.getpid()))
    _held(new)
    new.rename(folder / LOCK)  # only now: who sweeps looks for this name
    os.environ[FOLDER] = str(folder)
    atexit.register(remove_temporary_folder)
    return str(folder)


def remove_temporary_folder() -> None:
    """Remove the folder that this process has made, perhaps before it became another program."""
    folder = Path(os.environ.get(FOLDER, ""))
    with contextlib.suppress(OSError):
        if (folder / LOCK).read_text() == str(os.getpid()):
            shutil.rmtree(folder, ignore_errors=True)


def _held(lock: Path) -> bool:
    """Share a lock until this process ends, also where it becomes another program; whether that succeeds."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    os.set_inheritable(descriptor, True)
    return True


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, in use, or on a file system without locks
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
