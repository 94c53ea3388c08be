"""Temporary files: one folder per command in the system's temporary directory, shared with the command's processes."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

FOLDER = "SPARSE_RL_TEMPORARY_FOLDER"  # environment variable, read by the processes that a command starts
OWNER = "owner"  # file with the number of the process that made the folder


@cache
def temporary_folder() -> str:
    """Return the temporary folder of this process, or of the command that started this process."""
    inherited = os.environ.get(FOLDER)
    if inherited is not None and os.path.isdir(inherited):
        return inherited
    os.environ[FOLDER] = folder = tempfile.mkdtemp(prefix="sparse-rl-")
    (Path(folder) / OWNER).write_text(str(os.getpid()))
    atexit.register(remove_temporary_folder)
    return folder


def remove_temporary_folder() -> None:
    """Remove the folder that this process created, even if exec has replaced the process's program since then."""
    folder = Path(os.environ.get(FOLDER, ""))
    with contextlib.suppress(OSError):
        if (folder / OWNER).read_text() == str(os.getpid()):
            shutil.rmtree(folder, ignore_errors=True)
