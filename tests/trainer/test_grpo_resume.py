"""A GRPO run that is stopped and resumed equals an uninterrupted run bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import KillAt, Killed, steps, timeless

from sparse_rl.errors import UserError
from sparse_rl.metrics import read_metrics
from trainer.grpo.trainer import SparseGRPOTrainer

HALVES = {"per_device_train_batch_size": 4, "steps_per_generation": 2}
TWICE = {**HALVES, "num_iterations": 2}
ACCUMULATED = {"gradient_accumulation_steps": 2}
OLD = {"importance_correction": "token_truncate"}
LATER = {"max_steps": 6, "logging_steps": 3, "count": 2}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"save": 2},
    "old log-probs": {"save": 2, **OLD},
    "checkpointing": {"save": 2, "gradient_checkpointing": True, "per_device_train_batch_size": 4, **ACCUMULATED},
    "in mid-buffer": {"save": 1, "per_device_train_batch_size": 2, "steps_per_generation": 4, **ACCUMULATED},
    "in the second half of a buffer": {"save": 3, **TWICE},
    "in a later epoch": {"save": 3, "count": 4},
    "in mid-buffer of a later epoch": {"save": 3, "count": 4, "num_iterations": 2, "max_steps": 6},
    "with validation": {"save": 2, "held_out": 4, "eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2},
    "with a reference model": {"save": 2, "beta": 0.1},
    "with a reference model that follows": {"save": 3, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
    "beside sliding windows, in mid-buffer": {"save": 3, "family": "gemma3_text", **TWICE},
    "after the step of the checkpoint": {"save": 2, "stop": 3},
    "beside layers with a state, in mid-buffer": {"save": 3, "family": "qwen3_5_text", **TWICE},
    "between two logs, in mid-buffer": {"save": 5, **LATER, **TWICE, **OLD},
    "with experts, in mid-buffer": {"save": 3, "family": "qwen3_moe", "router_aux_loss_coef": 0.01, **HALVES},
    "with truncated draws, in mid-buffer": {"save": 3, "top_p": 0.8, **TWICE, **OLD},
    "with an engine of its own": {"save": 2, "own": True},
    "at its end": {"save": 4},
}
FAST = ("in the second half of a buffer", "at its end")


def all_logs(trainer: Any) -> list[dict[str, Any]]:
    """Return all lines of metrics.jsonl and the mean loss of the last summary, without timings."""
    folder = trainer.args.output_dir
    logs = read_metrics(folder)
    summary = [{"train_loss": line["train_loss"]} for line in logs if "train_loss" in line][-1:]
    return timeless([line for line in logs if "train_loss" not in line]) + summary


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in trainer.model.state_dict().items()}


@pytest.mark.parametrize("case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_a_resumed_run_equals_an_uninterrupted_run(case, grpo, tiny):
    settings = {"max_steps": 4, "save_strategy": "steps", **CASES[case]}
    save = settings.pop("save")
    stop = settings.pop("stop", save)
    if settings.pop("own", False):  # it starts from the initial weights again
        settings |= {"model": tiny(), "own_weights": tiny()}
    settings["save_steps"] = save
    logged = range(settings.get("logging_steps", 1), settings["max_steps"] + 1, settings.get("logging_steps", 1))

    whole = grpo("whole", **settings)
    whole.train()
    first = grpo("stopped", callbacks=(KillAt(stop),), **settings)
    with pytest.raises(Killed):
        first.train()
    torch.manual_seed(1234)  # another process would not have this process's generator state
    second = grpo("stopped", **settings)
    checkpoint = Path(second.args.output_dir) / f"checkpoint-{save}"
    assert [line["step"] for line in steps(second.args.output_dir)] == [step for step in logged if step <= stop]
    second.train(resume_from_checkpoint=str(checkpoint))

    assert [line["step"] for line in steps(second.args.output_dir)] == list(logged)
    assert all_logs(second) == all_logs(whole)
    expected = weights(whole)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(second).items())
    assert stop == 4 or not all(torch.equal(weight, expected[name]) for name, weight in weights(first).items())


@pytest.mark.slow
def test_control_a_run_resumed_without_a_part_of_its_state_differs(grpo):
    settings = {"save_strategy": "steps", **CASES["between two logs, in mid-buffer"]}
    settings["save_steps"] = settings.pop("save")
    whole = grpo("whole", **settings)
    whole.train()
    checkpoint = Path(whole.args.output_dir) / "checkpoint-5"
    file = checkpoint / "progress_0.pt"
    state = torch.load(file, weights_only=True)

    def resumed(name: str, **changed: Any) -> list[dict[str, Any]]:
        torch.save({**state, **changed}, file)
        trainer = grpo(name, **settings)
        trainer._train_from(str(checkpoint))  # `train` would refuse the changed file
        return all_logs(trainer)

    expected = all_logs(whole)[1:]  # from the log of step 6
    assert resumed("same") == expected
    replacements: dict[str, Any] = {
        "buffer": [],
        "gaps": {"train": [], "eval": []},
        "metrics": {"train": {}, "eval": {}},
        "loss": torch.tensor(0.0),
        "loss_total": 0.0,
        "logged_step": 5,
    }
    for name, value in replacements.items():
        assert resumed(name, **{name: value}) != expected, name

    file.unlink()
    with pytest.raises(ValueError, match=r"has no progress_0\.pt"):
        grpo("refused", **settings)._train_from(str(checkpoint))


def test_a_script_does_not_resume_with_another_value_of_thinking(grpo):
    """Control: the same value."""

    def script(thinking: bool) -> Any:
        made: Any = partial(SparseGRPOTrainer, thinking=thinking)
        return grpo(trainer_class=made, max_steps=1, save_strategy="steps", save_steps=1)

    script(True).train()
    with pytest.raises(UserError, match="thinking was true and is now false"):
        script(False).train(resume_from_checkpoint=True)
    script(True).train(resume_from_checkpoint=True)
