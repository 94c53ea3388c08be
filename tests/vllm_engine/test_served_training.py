"""GRPO on a server that its launch starts: the run of an engine in process, and no process is left behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from processes import python

from sparse_rl.metrics import read_metrics

WORDS = ["max_steps=3", "per_device_train_batch_size=16", "num_generations=4", "rollout.kv_cache_gb=0.2"]
COMPARED = ("loss", "reward", "grad_norm", "replay/gap_max", "cache/retention", "completions/mean_length")


def trained(folder: Path, *words: str) -> list[list[Any]]:
    """Train the quickstart's model for a few steps. Returns the metrics COMPARED of each step."""
    done = python(
        "-m", "sparse_rl.cli", "train", "quickstart/grpo", f"output_dir={folder}", *WORDS, *words, timeout=3000
    )
    assert done.returncode == 0, done.stderr
    return [[line[name] for name in COMPARED] for line in read_metrics(folder) if "reward" in line]


@pytest.mark.slow
def test_a_run_on_a_server_is_the_run_of_an_engine_in_process(tmp_path):
    served = trained(tmp_path / "served", "launch.rollout_gpus=1")
    assert len({reward for _, reward, *_ in served}) > 1
    assert any(norm > 0 for _, _, norm, *_ in served)
    log = (tmp_path / "served" / "rollout-server-0.log").read_text()
    (number,) = re.findall(r"Started server process \[(\d+)\]", log)
    assert not Path(f"/proc/{number}").exists()
    assert served == trained(tmp_path / "own", "rollout.engine=vllm")
