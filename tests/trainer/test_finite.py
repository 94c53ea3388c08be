"""A run whose loss, gradient or weights are not finite stops, and keeps its earlier checkpoints."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_runs import GRPO_KEYS
from transformers import TrainerCallback

from sparse_rl.commands.main import main
from sparse_rl.commands.train import train
from sparse_rl.errors import NotFiniteError, StoppedError
from sparse_rl.metrics import read_metrics
from sparse_rl.recipe import make_recipe
from trainer import rundir
from trainer.base import not_finite_metric, not_finite_weight
from trainer.checkpoint import checkpoints, damage

GKV = {"policy": "gkv", "budget": 16, "window": 4, "period": 4}
KINDS: dict[str, dict[str, Any]] = {
    "sft": {},
    "grpo": {"cache": GKV, **GRPO_KEYS},
    "distill": {"cache": GKV, "rollout": {"engine": "hf"}},
    "kvpop": {"cache": {"policy": "kvpop", "budget": 16, "window": 4, "scorer": "linear"}, "max_length": 70},
}


def recipe_of(kind: str, folder: Path, model: str, **keys: Any) -> Any:
    size = 2 if kind == "grpo" else 24
    return make_recipe(
        {
            "kind": kind, "model": model, "output_dir": str(folder), "dtype": "float32",
            "data": {"synthetic": {"task": "running_sum", "size": size, "n": 3}}, "per_device_train_batch_size": 4,
            "gradient_checkpointing": False, "max_steps": 4, "save_steps": 1, **KINDS[kind], **keys,
        }
    )  # fmt: skip


class Spoil(TrainerCallback):
    """Writes NaN into one weight at the end of a step, as an update with a NaN gradient would do."""

    step = 0

    def __init__(self, folder: Path) -> None:
        pass

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == self.step:
            with torch.no_grad():
                model.get_output_embeddings().weight[3, 5] = float("nan")


def stopped(recipe: Any, folder: Path) -> str:
    """Train and return the error that stopped the run. Check that the run leaves no final model, and that all its
    checkpoints are finite."""
    with pytest.raises(StoppedError) as error:
        train(recipe)
    assert not (folder / "model").exists()
    for checkpoint in checkpoints(folder):
        assert damage(checkpoint) is None
        assert all(weight.isfinite().all() for weight in load_file(checkpoint / "model.safetensors").values())
    return str(error.value)


@pytest.mark.parametrize("kind", [k if k == "sft" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
@pytest.mark.parametrize("logging_steps", [pytest.param(1, marks=pytest.mark.slow), 100])
def test_nan_weights_stop_the_run_and_are_not_saved(kind, logging_steps, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(rundir, "RunLog", type("RunLog", (Spoil, rundir.RunLog), {"__init__": rundir.RunLog.__init__}))
    for step in (3, 4):
        monkeypatch.setattr(Spoil, "step", step)
        folder = tmp_path / str(step)
        output = stopped(recipe_of(kind, folder, tiny("qwen3"), logging_steps=logging_steps), folder)
        assert output == (
            f"at step {step} lm_head.weight is not finite: start again with a lower learning_rate or max_grad_norm; "
            f"{folder}/checkpoint-{step - 1} is complete"
        )


@pytest.mark.parametrize("kind", [k if k == "sft" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_a_far_too_large_learning_rate_leaves_no_model(kind, tiny, tmp_path):
    """A loss that stops the run is the last line of the log."""
    for steps, logged in ((4, 1),) if kind == "sft" else ((1, 1), (4, 2), (4, 100)):
        folder = tmp_path / f"{steps}-{logged}"
        changed = {"learning_rate": 1e30, "max_steps": steps, "logging_steps": logged, "save_steps": 0}
        output = stopped(recipe_of(kind, folder, tiny("qwen3"), **changed), folder)
        assert "\n" not in output
        assert len(output) < 500
    if kind == "sft":
        *before, last = read_metrics(folder)
        assert f"at step {last['step']} loss is nan" in output
        assert math.isnan(last["loss"])
        assert before
        assert all(math.isfinite(line["loss"]) for line in before)


def spoilt(folder: str, place: Path, name: str) -> str:
    """Copy a model directory, set one weight to NaN, and return the path of the copy."""
    shutil.copytree(folder, place)
    weights = load_file(place / "model.safetensors")
    weights[name][1] = float("nan")
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    return str(place)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [k if k == "sft" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
@pytest.mark.few(1)
def test_a_damaged_model_is_refused_before_the_first_step(kind, dtype, tiny, tmp_path, capfd):
    name = "model.layers.1.mlp.up_proj.weight"
    good, bad = tiny("qwen3"), spoilt(tiny("qwen3"), tmp_path / "bad", name)
    cases = {"the model": {"model": bad}}
    if kind in ("distill", "kvpop"):
        cases = {"the model": {"model": bad, "teacher": good}, "the teacher": {"teacher": bad}}
    for damaged, change in [*cases.items(), ("", {})]:
        folder = tmp_path / (damaged or "good")
        keys = {"model": good, "dtype": dtype, "max_steps": 1, **change}
        recipe = recipe_of(kind, folder, keys.pop("model"), **keys)
        file = tmp_path / "recipe.yaml"
        file.write_text(recipe.as_yaml())
        assert main(["train", str(file)]) == (2 if damaged else 0)
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("sparse-rl")]
        if damaged:
            assert lines == [
                f"sparse-rl: error: at step 0 {damaged} at the start is damaged, {name} is not finite: use "
                f"an undamaged copy of the model; {folder} has no checkpoint"
            ]
            assert not (folder / "model").exists()
            assert not list(folder.glob("checkpoint-*"))


@pytest.mark.parametrize("kind", [pytest.param("distill", marks=pytest.mark.slow), "grpo"])
def test_an_error_of_the_engine_names_the_training_step(kind, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(rundir, "RunLog", type("RunLog", (Spoil, rundir.RunLog), {"__init__": rundir.RunLog.__init__}))
    monkeypatch.setattr(Spoil, "step", 2)
    one_use = {"steps_per_generation": 1, "num_iterations": 1} if kind == "grpo" else {}
    keys = {"completions": "student", "max_completion_length": 12} if kind == "distill" else {}
    recipe = recipe_of(kind, tmp_path / "run", tiny("qwen3"), logging_steps=1, save_steps=100, **one_use, **keys)
    output = stopped(recipe, tmp_path / "run")
    assert output.startswith(
        "at step 2 prompt 0, sample 0: the log-probability of token 0 of the completion is not finite"
    )
    assert output.endswith(f"; {tmp_path / 'run'} has no checkpoint")
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2]


def test_losses_norms_and_all_weights_are_checked():
    assert not_finite_metric({"loss": 1.0, "grad_norm": 2.0, "accuracy": float("nan")}) is None
    assert not_finite_metric({"loss": 1.0, "grad_norm": float("inf")}) == "grad_norm is inf"
    for bad in (float("nan"), float("inf"), -float("inf"), 1e30):  # the square of the last value overflows
        for index in range(3):
            weights = [(str(i), torch.ones(40, 5)) for i in range(3)]
            assert not_finite_weight(weights) is None
            weights[index][1][7, 3] = bad
            assert not_finite_weight(weights) == f"{index} is not finite"


def test_a_non_finite_loss_between_two_logs_stops_the_run(tiny, tmp_path):
    """transformers would leave it out (logging_nan_inf_filter) and log a mean that looks normal."""
    (folder := tmp_path / "run").mkdir()
    recipe = recipe_of("sft", folder, tiny("qwen3"), logging_steps=3, learning_rate=1e-9)
    trainer = recipe.make_trainer(recipe.prepare_training(), folder)
    original, calls = trainer.compute_loss, []

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs) + (float("inf") if len(calls) == 2 else 0.0)  # its gradient is finite

    trainer.compute_loss = compute_loss
    with pytest.raises(NotFiniteError, match=rf"^at step 2 loss is inf: .*; {folder}/checkpoint-1 is complete"):
        trainer.train()
