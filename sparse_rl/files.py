"""Files that a library makes for their owner alone, as safetensors does, made like any new file of the user's."""

from __future__ import annotations

import os
from pathlib import Path


def usual_permissions(file: str | Path) -> None:
    """Give a file what the user's umask leaves of rw-rw-rw-."""
    umask = os.umask(0o077)
    os.umask(umask)
    os.chmod(file, 0o666 & ~umask)
