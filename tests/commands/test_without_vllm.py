"""Without vLLM installed, everything that does not sample with it still works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BLOCKED = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from sparse_rl.commands.main import main
sys.exit(main(sys.argv[1:]))
"""


def without_vllm(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, *words, "rollout.engine=hf"], capture_output=True, text=True, cwd=folder
    )


@pytest.mark.slow
def test_doctor_works_without_vllm(tmp_path: Path) -> None:
    process = without_vllm(tmp_path, "doctor", "quickstart/grpo")
    assert process.returncode == 0, process.stderr
    assert "KV cache of" in process.stdout


def test_a_dry_run_works_without_vllm(tmp_path: Path) -> None:
    process = without_vllm(tmp_path, "train", "quickstart/grpo", "--dry-run")
    assert process.returncode == 0, process.stderr
    assert "hf engine" in process.stdout
