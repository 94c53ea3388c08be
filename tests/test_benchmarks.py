"""Every benchmark starts as its documentation says, from any folder: none of them hides a package of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = [
    path for path in sorted(Path(__file__).parents[1].glob("benchmarks/*.py")) if "def main(" in path.read_text()
]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_it_starts(script: Path, tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, str(script), "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert f"usage: {script.name}" in ran.stdout
    assert not list(tmp_path.iterdir())
