"""Helpers for the trainer's tests: settings of a short run, a reward, problems, and a reader of metrics."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

STOP = [1, 40, 41, 42]  # <eos> and three letters
GKV = {"policy": "gkv", "budget": 8, "window": 3, "period": 2}
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 20,
    "max_steps": 2,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,  # TRL's default is bfloat16
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "remove_unused_columns": False,
    "importance_correction": "none",
    "seed": 7,
    "model_init_kwargs": {"dtype": "float32"},
}

GRPO_KEYS: dict[str, Any] = {  # keys of a short GRPO recipe that is resumed in mid-buffer
    "rewards": ["trainer_runs:digits"],
    "rollout": {"engine": "hf"},
    "steps_per_generation": 2,
    "num_iterations": 2,
    "num_generations": 4,
    "max_completion_length": 20,
}


class Killed(Exception):
    pass


class KillAt(TrainerCallback):
    """Ends the run like a kill: nothing is saved or logged after the step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise Killed

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        raise Killed


def digits(completions: list[str], **_: Any) -> list[float]:
    """Reward each completion with its share of digits; the reward differs between almost all completions."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def problems(count: int) -> Any:
    """Return running-sum problems whose prompts have ragged lengths (8 to 18 tokens)."""
    from datasets import Dataset

    from sparse_rl.data.synthetic import RunningSum

    by_length = [RunningSum(n=n).rows("train", count, seed=n) for n in (3, 5, 8)]
    return Dataset.from_list([by_length[i % 3][i // 3] for i in range(count)])


def trained(trainer: Any, resume: str | None = None) -> list[dict[str, Any]]:
    trainer.train(resume_from_checkpoint=resume)
    return steps(trainer.args.output_dir)


def steps(folder: str | Path) -> list[dict[str, Any]]:
    """Return the training steps logged in a run directory, without validations and the final summary."""
    from sparse_rl.metrics import read_metrics

    return [line for line in read_metrics(folder) if "loss" in line]


def timeless(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of a log without their timings."""
    clocks = ("time/", "step_time", "train_", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    return [{name: value for name, value in line.items() if not name.startswith(clocks)} for line in lines]


def small(model: str, output_dir: Path, **keys: Any) -> dict[str, Any]:
    """Return a recipe's content without its `kind`: three steps of eight running sums, sampled by the hf engine in
    float32.
    """
    return {
        "model": model,
        "output_dir": str(output_dir),
        "data": {"synthetic": {"task": "running_sum", "size": 24, "n": 6}},
        "rollout": {"engine": "hf"},
        "dtype": "float32",
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 8,
        "max_steps": 3,
        "logging_steps": 1,
        **keys,
    }


SAMPLED: dict[str, dict[str, Any]] = {  # kinds that train on sampled completions -> keys added to a small recipe
    "grpo": {"kind": "grpo", "rewards": ["trainer_runs:digits"], "num_generations": 4, "max_completion_length": 20},
    "distill": {"kind": "distill", "top_k": 8},
}


def check_resumed(make: Callable[..., Any], folder: Path, at: int = 2, **settings: Any) -> Path:
    """Check that a run resumed from checkpoint-`at` has the weights and logs of an uninterrupted run. Control: the
    weights of the checkpoint differ.

    make : (keys of a recipe) -> the recipe. Returns the model directory of the uninterrupted run.
    """
    from sparse_rl.commands.train import train
    from sparse_rl.metrics import read_metrics

    shared = {"max_steps": 4, "save_steps": 2, "save_total_limit": None, **settings}
    whole, resumed = folder / "whole", folder / "resumed"
    final = Path(train(make(output_dir=str(whole), **shared)))
    shutil.copytree(whole, resumed)
    for place in (resumed / "model", *resumed.glob("checkpoint-*")):
        if place.name == "model" or int(place.name.removeprefix("checkpoint-")) > at:
            shutil.rmtree(place)
    train(make(output_dir=str(resumed), **shared), resume="newest")
    files = sorted(file.name for file in final.glob("*.safetensors"))
    assert files == sorted(file.name for file in (resumed / "model").glob("*.safetensors"))
    changed: set[str] = set()
    for file in files:
        left, right = (load_file(place / "model" / file) for place in (whole, resumed))
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
        early = {} if "lora" in settings else load_file(whole / f"checkpoint-{at}" / file)
        changed |= {name for name in left if name not in early or not torch.equal(left[name], early[name])}
    assert changed  # the control
    assert timeless(read_metrics(resumed)) == timeless(read_metrics(whole))
    return final


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return Path.touch, (self.file,)


def craft(file: Path, content: Any) -> None:
    """Replace a checkpoint file (by bytes, or an object for torch.save), and write a manifest that matches it."""
    from trainer.checkpoint import MANIFEST, file_digests, read_manifest, write_manifest

    assert file.is_file()
    place = next(folder for folder in file.parents if (folder / MANIFEST).is_file())
    about = read_manifest(place)
    (place / MANIFEST).unlink()
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    about = {name: value for name, value in about.items() if name not in ("format_version", "files")}
    write_manifest(place, file_digests(place), **about)
