"""Distillation and KVpop's retrofit give the same losses, gradients and validation on several processes as on one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from processes import python
from safetensors.torch import load_file

from sparse_rl.metrics import read_metrics
from sparse_rl.models.load import load_model

pytestmark = pytest.mark.slow
KINDS: dict[str, dict[str, Any]] = {
    "distill": {
        "cache": {"policy": "gkv", "budget": 16, "window": 4, "period": 4},
        "rollout": {"engine": "hf"},
        "temperature": 0.8,
    },
    "kvpop": {
        "cache": {"policy": "kvpop", "budget": 16, "window": 4, "scorer": "mlstm"},
        "packing": False,
        "max_length": 128,
        "boundary": {"queries": None},
        "scorer_warmup_steps": 0,
    },
}


@pytest.fixture
def run(tiny, tmp_path):
    """run(name, **keys) returns the metrics of three steps on 4 x 2 ragged rows each, with 9 held-out rows."""

    def make(name: str, kind: str = "distill", **keys: Any) -> list[dict[str, Any]]:
        synthetic = {"task": "running_sum", "size": 24, "n": 4}
        recipe = {
            "kind": kind,
            "model": tiny("qwen3"),
            "teacher": tiny("qwen3", num_hidden_layers=3),
            "output_dir": str(tmp_path / name),
            "dtype": "float32",
            "data": {"synthetic": synthetic},
            "ce_weight": 0.3,
            "learning_rate": 1e-3,
            "max_steps": 3,
            "per_device_train_batch_size": 4,
            "gradient_checkpointing": False,
            "save_steps": 0,
            "logging_steps": 1,
            "validation": {"data": {"synthetic": {**synthetic, "size": 9, "split": "evaluation"}}, "every": 3},
            **KINDS[kind],
            **keys,
        }
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
        process = python("-m", "sparse_rl.cli", "train", "recipe.yaml", cwd=tmp_path)
        assert process.returncode == 0, process.stderr
        return read_metrics(tmp_path / name)

    return make


@pytest.mark.parametrize("stage", [0, 2])
def test_two_processes_equal_one(stage, run):
    """The last held-out batch has a single row, which one of the two processes repeats."""
    alone = run("alone", gradient_accumulation_steps=2)
    together = run("together", launch={"processes": 2, "zero_stage": stage})
    other = run("other", gradient_accumulation_steps=2, ce_weight=0.4)  # control
    for key, count in (("loss", 3), ("kl", 3), ("grad_norm", 3), ("eval_kl", 2), ("eval_cache/retention", 2)):
        values_alone, values_together, control = (
            [line[key] for line in lines if key in line] for lines in (alone, together, other)
        )
        assert len(values_alone) == count, key
        assert values_together == pytest.approx(values_alone, rel=2e-5), key
        assert control != pytest.approx(values_alone, rel=2e-5) or key == "eval_cache/retention", key


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_retrofit_on_two_processes_equals_one_process(stage, run, tmp_path):
    alone = run("alone", "kvpop", gradient_accumulation_steps=2)
    together = run("together", "kvpop", launch={"processes": 2, "zero_stage": stage})
    for key in ("loss", "kl", "boundary_loss", "recall", "grad_norm", "eval_kl", "eval_boundary_loss", "eval_recall"):
        values_alone, values_together = ([line[key] for line in lines if key in line] for lines in (alone, together))
        assert len(values_alone) == (2 if key.startswith("eval") else 3), key
        assert values_together == pytest.approx(values_alone, rel=2e-4), key
    for file in ("model.safetensors", "cache_scorer.safetensors"):
        values_alone, values_together = (load_file(tmp_path / name / "model" / file) for name in ("alone", "together"))
        assert values_alone
        assert values_alone.keys() == values_together.keys()
        assert all((values_alone[name] - values_together[name]).abs().max() < 1e-4 for name in values_alone)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_bfloat16_retrofit_saves_scorers_that_can_be_loaded(stage, run, tmp_path):
    """Scorers are stored in the model's dtype, as ZeRO-3 requires."""
    lines = run("half", "kvpop", dtype="bfloat16", launch={"processes": 1, "zero_stage": stage})
    assert all(line["loss"] > 0 for line in lines if "loss" in line)
    scorers = load_model(tmp_path / "half" / "model", "bfloat16").cache_scorers
    assert scorers[0].out.abs().max() > 0
