"""Without vLLM installed, everything that does not sample with it still works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_doctor_counts_memory(tmp_path: Path) -> None:
    done = without_vllm(tmp_path, "doctor", "quickstart/grpo")
    assert done.returncode == 0, done.stderr
    assert "KV cache of" in done.stdout


def test_a_training_is_checked(tmp_path: Path) -> None:
    done = without_vllm(tmp_path, "train", "quickstart/grpo", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "hf engine" in done.stdout
