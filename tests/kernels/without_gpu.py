"""Run Python programs in a process of their own: Triton reads TRITON_INTERPRET when a kernel is defined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(program: str, *words: str, **environment: str) -> str:
    """Return the output of a Python program, which gets `words`, in a new process."""
    pytest.importorskip("triton")
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    inherited |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{Path(__file__).parent}", **environment}
    process = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, env=inherited, check=False
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return process.stdout
