"""Run Python or the command in a new process, as a user does: without the variables of a launch around the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONSAFEPATH")


def without_launch() -> dict[str, str]:
    """Return the environment, in which this repository is importable, without the variables of a launch."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCH}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}


def python(
    *words: str, cwd: Path | None = None, path: Sequence[Path] = (), timeout: float = 600, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words. path : folders that come before this repository in PYTHONPATH"""
    env = without_launch() | {"PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))), **environment}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, errors="replace"
    )
