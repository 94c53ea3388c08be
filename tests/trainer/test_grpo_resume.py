"""Resume: a run that was stopped and resumed is, bit for bit, the run that was not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import steps, timeless
from transformers import TrainerCallback

CASES: dict[str, dict[str, Any]] = {
    "plain": {"save": 2},
    "old log-probs": {"save": 2, "importance_correction": "token_truncate"},
    "checkpointing, accumulation": {
        "save": 2,
        "gradient_checkpointing": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
    },
    "in mid-buffer": {
        "save": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
    },
    "in the second half of a buffer": {
        "save": 3,
        "per_device_train_batch_size": 4,
        "num_iterations": 2,
        "steps_per_generation": 2,
    },
    "in a later epoch": {"save": 3, "count": 4},
    "in mid-buffer of a later epoch": {"save": 3, "count": 4, "num_iterations": 2, "max_steps": 6},
    "with validation": {"save": 2, "held_out": 4, "eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2},
    "with a reference model": {"save": 2, "beta": 0.1},
    "after the step of the checkpoint": {"save": 2, "stop": 3},
}


class Killed(Exception):
    pass


class KillAt(TrainerCallback):
    """Ends the run as a kill would: nothing more is saved or logged."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise Killed


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in trainer.model.state_dict().items()}


SLOW = (
    "plain",
    "in a later epoch",
    "old log-probs",
    "checkpointing, accumulation",
    "in mid-buffer of a later epoch",
    "with a reference model",
)


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES])
def test_a_resumed_run_is_the_run(case: str, grpo: Callable) -> None:
    """Metrics of every step and final weights are equal, and no step is logged twice."""
    settings = {"max_steps": 4, "save_strategy": "steps", **CASES[case]}
    save = settings.pop("save")
    stop = settings.pop("stop", save)
    settings["save_steps"] = save

    whole = grpo("whole", **settings)
    whole.train()
    first = grpo("stopped", callbacks=(KillAt(stop),), **settings)
    with pytest.raises(Killed):
        first.train()
    torch.manual_seed(1234)  # another process would not know this one's generator
    second = grpo("stopped", **settings)
    checkpoint = Path(second.args.output_dir) / f"checkpoint-{save}"
    assert [line["step"] for line in steps(second.args.output_dir)] == list(range(1, stop + 1))
    second.train(resume_from_checkpoint=str(checkpoint))

    lines = steps(second.args.output_dir)
    assert [line["step"] for line in lines] == list(range(1, settings["max_steps"] + 1))
    assert timeless(lines) == timeless(steps(whole.args.output_dir))
    expected = weights(whole)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(second).items())
    assert not all(torch.equal(weight, expected[name]) for name, weight in weights(first).items())


def test_what_would_be_lost(grpo: Callable) -> None:
    """The control: without our state file a resume is refused, and with another count of generations it differs."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = grpo("whole", **settings)
    whole.train()
    checkpoint = Path(whole.args.output_dir) / "checkpoint-2"
    file = checkpoint / "rollout_state_0.pt"
    state = torch.load(file, weights_only=True)

    torch.save({**state, "generations": 7}, file)
    other = grpo("other", **settings)
    other.train(resume_from_checkpoint=str(checkpoint))
    assert timeless(steps(other.args.output_dir)) != timeless(steps(whole.args.output_dir)[2:])

    file.unlink()
    with pytest.raises(ValueError, match=r"has no rollout_state_0\.pt"):
        grpo("refused", **settings).train(resume_from_checkpoint=str(checkpoint))
