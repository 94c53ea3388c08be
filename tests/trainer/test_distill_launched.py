"""Distillation over several processes is that of one: losses, gradients and the held-out KL, under DDP and ZeRO."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.rundir import read_metrics

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tiny: Callable, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """run(name, **keys) -> the metrics of three steps on 4 x 2 ragged rows each, with 9 rows held out."""

    def make(name: str, **keys: Any) -> list[dict[str, Any]]:
        synthetic = {"task": "running_sum", "size": 24, "n": 4}
        recipe = {
            "kind": "distill",
            "model": tiny("qwen3"),
            "teacher": tiny("qwen3", num_hidden_layers=3),
            "output_dir": str(tmp_path / name),
            "dtype": "float32",
            "data": {"synthetic": synthetic},
            "cache": {"policy": "gkv", "budget": 16, "window": 4, "period": 4},
            "rollout": {"engine": "hf"},
            "temperature": 0.8,
            "ce_weight": 0.3,
            "learning_rate": 1e-3,
            "max_steps": 3,
            "per_device_train_batch_size": 4,
            "gradient_checkpointing": False,
            "save_steps": 0,
            "logging_steps": 1,
            "validation": {"data": {"synthetic": {**synthetic, "size": 9, "split": "evaluation"}}, "every": 3},
            **keys,
        }
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
        drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        env = {key: value for key, value in os.environ.items() if key not in drop}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "sparse_rl.cli", "train", "recipe.yaml"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr
        return read_metrics(tmp_path / name)

    return make


@pytest.mark.parametrize("stage", [0, 2])
def test_two_processes_are_one(stage: int, run: Callable) -> None:
    """Accumulated over two batches in one process, or one batch in each of two; the last batch held out is of one row,
    which one of the two processes repeats."""
    alone = run("alone", gradient_accumulation_steps=2)
    together = run("together", launch={"processes": 2, "zero_stage": stage})
    other = run("other", gradient_accumulation_steps=2, ce_weight=0.4)  # control
    for key, where in (("loss", 3), ("kl", 3), ("grad_norm", 3), ("eval_kl", 2), ("eval_retention", 2)):
        one, two, control = ([line[key] for line in lines if key in line] for lines in (alone, together, other))
        assert len(one) == where and two == pytest.approx(one, rel=2e-5), key
        assert control != pytest.approx(one, rel=2e-5) or key == "eval_retention", key
