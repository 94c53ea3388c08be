"""A resumed fine-tuning run equals an uninterrupted run bit for bit. Its intervals and its length may change."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_runs import KillAt, Killed, timeless
from transformers import TrainerCallback

from sparse_rl.commands.train import train
from sparse_rl.errors import UserError
from sparse_rl.metrics import read_metrics
from sparse_rl.recipe import make_recipe
from trainer.rundir import RunLog


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = True


@pytest.fixture
def sft(tiny, tmp_path):
    """sft(name, *callbacks, family="qwen3", config={}, **settings) returns a trainer on 24 problems, with 6 steps in
    each epoch. config : settings of the tiny model's configuration
    """
    from trl import SFTConfig

    from sparse_rl.data.config import DataConfig, SyntheticConfig
    from sparse_rl.data.problems import load_data
    from sparse_rl.models.load import load_tokenizer
    from trainer.sft import ResumableSFTTrainer

    def make(name, *callbacks, family="qwen3", config=None, **settings):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        defaults = {
            "output_dir": str(folder),
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "linear",
            "max_steps": 10,
            "logging_steps": 2,
            "save_steps": 3,
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            "gradient_checkpointing": False,
            "seed": 7,
            "completion_only_loss": True,
            "model_init_kwargs": {"dtype": "float32"},
        }
        tokenizer = load_tokenizer(tiny("qwen3"))
        synthetic = SyntheticConfig(task="running_sum", size=24, n=3)
        data = load_data(DataConfig(synthetic=synthetic), tokenizer, require=("prompt", "completion"))
        return ResumableSFTTrainer(
            model=tiny(family, **(config or {})),
            args=SFTConfig(**{**defaults, **settings}),
            train_dataset=data.remove_columns([c for c in data.column_names if c not in ("prompt", "completion")]),
            processing_class=tokenizer,
            callbacks=[RunLog(folder), *callbacks],
        )

    return make


def logged(trainer: Any) -> list[dict[str, Any]]:
    """Return all logged metrics except timings, together with the mean loss of the final summary."""
    lines = read_metrics(trainer.args.output_dir)
    means = [line["train_loss"] for line in lines if "train_loss" in line][-1:]
    return [*timeless([line for line in lines if "train_loss" not in line]), {"mean": means}]


def same(trainer: Any, other: Any) -> bool:
    expected = other.model.state_dict()
    return all(torch.equal(weight, expected[name]) for name, weight in trainer.model.state_dict().items())


@pytest.mark.parametrize(
    ("stop", "at", "family"),
    [
        pytest.param(5, 3, "qwen3", id="between two logs"),
        pytest.param(8, 6, "qwen3", id="between two epochs", marks=pytest.mark.slow),
        pytest.param(10, 9, "qwen3", id="in the second epoch", marks=pytest.mark.slow),
        pytest.param(5, 3, "qwen3_moe", id="with TRL's balancing loss", marks=pytest.mark.slow),
        pytest.param(5, 3, "gemma3_text", id="with sliding windows", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_run(stop, at, family, sft):
    whole = sft("whole", family=family)
    whole.train()
    assert all(("aux_loss" in line) is (family == "qwen3_moe") for line in logged(whole) if "loss" in line)
    if stop < 10:
        with pytest.raises(Killed):
            sft("stopped", KillAt(stop), family=family).train()
    else:
        sft("stopped").train()
    torch.manual_seed(1234)
    second = sft("stopped", family=family)
    second.train(resume_from_checkpoint=str(Path(second.args.output_dir) / f"checkpoint-{at}"))
    assert logged(second) == logged(whole)
    assert same(second, whole)

    file = Path(second.args.output_dir) / f"checkpoint-{at}" / "progress_0.pt"
    state = torch.load(file, weights_only=True)
    torch.save({**state, "train_tokens": 0}, file)  # the control: without our state, the logs differ
    third = sft("stopped", family=family)
    third.recipe = {}  # the command checks before
    third.train(resume_from_checkpoint=str(file.parent))
    assert logged(third) != logged(whole)


def test_a_dense_model_with_the_keys_of_experts_trains(sft):
    keys = {"router_aux_loss_coef": 0.01, "output_router_logits": True}
    trainer = sft("granite", family="granite", config=keys, max_steps=2, save_steps=10, logging_steps=1)
    trainer.train()
    lines = [line for line in logged(trainer) if "loss" in line]
    assert len(lines) == 2
    assert not any("aux_loss" in line for line in lines)


@pytest.mark.slow
def test_a_run_that_has_ended_takes_no_further_step(sft):
    """Nor one that a callback has ended early, even if the callback is absent after the resume."""
    whole = sft("whole", max_steps=3)
    whole.train()
    resumed = sft("again", max_steps=3)
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-3"))
    assert resumed.state.global_step == 3
    assert same(resumed, whole)
    assert logged(resumed)[-1] == logged(whole)[-1]

    early = sft("early", StopAt(6))
    early.train()
    resumed = sft("again", max_steps=10)
    resumed.train(resume_from_checkpoint=str(Path(early.args.output_dir) / "checkpoint-6"))
    assert resumed.state.global_step == 6
    assert same(resumed, early)


@pytest.mark.slow
def test_a_resumed_run_logs_and_saves_at_its_own_intervals(sft):
    """Plain transformers would keep those of the checkpoint."""
    constant = {"lr_scheduler_type": "constant", "save_total_limit": 2}
    whole = sft("whole", **constant)
    whole.train()
    sft("short", max_steps=3, **constant).train()
    longer = sft("short", max_steps=10, save_steps=2, logging_steps=5, **constant)
    longer.train(resume_from_checkpoint=str(Path(longer.args.output_dir) / "checkpoint-3"))
    assert same(longer, whole)
    assert [line["step"] for line in read_metrics(longer.args.output_dir) if "loss" in line] == [2, 5, 10]
    assert {path.name for path in Path(longer.args.output_dir).glob("checkpoint-*")} == {
        "checkpoint-8",
        "checkpoint-10",
    }


@pytest.mark.slow
def test_a_finished_run_that_is_resumed_has_one_summary(sft):
    def summaries(trainer: Any) -> list[int]:
        return [line["step"] for line in read_metrics(trainer.args.output_dir) if "train_runtime" in line]

    first = sft("run", max_steps=3)
    first.train()
    assert summaries(first) == [3]
    for steps in (3, 4):
        resumed = sft("run", max_steps=steps)
        resumed.train(resume_from_checkpoint=str(Path(resumed.args.output_dir) / "checkpoint-3"))
        assert summaries(resumed) == [steps]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.few(1)
def test_only_a_tied_weight_may_be_missing(tied, sft):
    trainer = sft("run", max_steps=1, save_steps=1)
    trainer.model.config.tie_word_embeddings = tied
    trainer.model.tie_weights()
    trainer.train()
    assert (trainer.model.lm_head.weight is trainer.model.model.embed_tokens.weight) is tied
    checkpoint = Path(trainer.args.output_dir) / "checkpoint-1"
    if not tied:  # the control
        weights = load_file(checkpoint / "model.safetensors")
        del weights["lm_head.weight"]
        save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    with nullcontext() if tied else pytest.raises(UserError, match=r"the same weights: lm_head\.weight$"):
        trainer._load_from_checkpoint(str(checkpoint))


def test_later_checkpoints_are_renamed(sft):
    sft("run", max_steps=9).train()
    folder = Path(sft("run").args.output_dir)
    (folder / "_partial" / "checkpoint-12").mkdir(parents=True)  # a leftover of a killed run
    resumed = sft("run", max_steps=6)
    resumed.recipe = {}  # the command checks before
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    assert names == {"checkpoint-3", "checkpoint-6", "later-checkpoint-6", "later-checkpoint-9"}


@pytest.mark.slow
def test_accuracy_checks_do_not_change_a_resumed_run(tiny, tmp_path):
    """The first check changes the rounding of attention; a resumed run makes this change at its start."""
    recipe = {
        "kind": "sft", "model": tiny("qwen3"), "dtype": "float32", "gradient_checkpointing": False,
        "data": {"synthetic": {"task": "running_sum", "size": 24}}, "per_device_train_batch_size": 4,
        "learning_rate": 1e-3, "max_steps": 8, "save_steps": 5, "save_total_limit": None, "logging_steps": 1,
        "stop_at_accuracy": 1.0, "stop_check_every": 4,
    }  # fmt: skip
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(make_recipe({**recipe, "output_dir": str(whole)}))
    train(make_recipe({**recipe, "output_dir": str(resumed)}), resume=str(whole / "checkpoint-5"))
    left, right = (load_file(folder / "model/model.safetensors") for folder in (whole, resumed))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    after = [line for line in timeless(read_metrics(whole)) if line["step"] > 5]
    assert timeless(read_metrics(resumed)) == after
    assert any("accuracy_full" in line for line in after)
