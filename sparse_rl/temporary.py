"""Temporary files: one folder per command in the system's temporary directory, shared with the command's processes.

The folder is removed when the command ends, or by the next command if the first one was killed. Each process locks a
file in the folder that it uses. The kernel releases the lock when the process ends, so an unlocked folder is unused.
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
FOLDER = "SPARSE_RL_TEMPORARY_FOLDER"  # environment variable, read by the processes that a command starts


@cache
def temporary_folder() -> str:
    """Return the temporary folder of this process, or of the command that started this process."""
    inherited = os.environ.get(FOLDER)
    if inherited is not None and _take_lock(Path(inherited) / LOCK):
        return inherited
    _remove_unused_folders()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    new_lock = folder / f"{LOCK}.new"
    new_lock.write_text(str(os.getpid()))
    _take_lock(new_lock)
    new_lock.rename(folder / LOCK)  # renamed only after locking: _remove_unused_folders looks for this name
    os.environ[FOLDER] = str(folder)
    atexit.register(remove_temporary_folder)
    return str(folder)


def remove_temporary_folder() -> None:
    """Remove the folder that this process created, even if exec has replaced the process's program since then."""
    folder = Path(os.environ.get(FOLDER, ""))
    with contextlib.suppress(OSError):
        if (folder / LOCK).read_text() == str(os.getpid()):
            shutil.rmtree(folder, ignore_errors=True)


def _take_lock(lock: Path) -> bool:
    """Hold a shared lock until this process ends, also across exec. Returns True on success."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    os.set_inheritable(descriptor, True)
    return True


def _remove_unused_folders() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # owned by another user, in use, or on a file system without locks
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
