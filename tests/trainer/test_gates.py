"""DMS's retrofit: gates open as far as the target requires, and the trained model samples with the same evictions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import gap
from trainer_runs import check_resumed

from rollout import SamplingConfig, make_engine
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.commands.train import train
from sparse_rl.errors import UserError
from sparse_rl.metrics import read_metrics
from sparse_rl.models.load import load_model
from sparse_rl.recipe import make_recipe

CACHE = {"policy": "dms", "sinks": 2, "window": 4, "compression": 2.0, "bias": -2.0}


@pytest.fixture
def recipe(tiny: Callable, tmp_path: Path) -> Callable[..., Any]:
    def make(**keys: Any) -> Any:
        content = {
            "kind": "kvpop",
            "model": tiny(),
            "output_dir": str(tmp_path / "run"),
            "data": {"synthetic": {"task": "running_sum", "size": 64}},
            "cache": CACHE,
            "dtype": "float32",
            "packing": False,
            "max_length": 128,
            "gradient_checkpointing": False,
            "learning_rate": 1e-3,
            "scorer_learning_rate": 0.05,
            "scorer_warmup_steps": 1,
            "per_device_train_batch_size": 8,
            "max_steps": 30,
            "top_k": None,
            "gates": {"anneal_steps": 10},
        }
        return make_recipe({**content, **keys})

    return make


@pytest.mark.slow
def test_gates_open_to_the_required_share(recipe: Callable, tmp_path: Path) -> None:
    """The share of open gates rises from below 0.2 to at least 0.45; compression 2 requires one half. The trained model
    samples with evictions, and replays with a gap of at most 1e-5. Control: with a loss weight near 0 the share stays
    below 0.3.
    """
    problems = {"data": {"synthetic": {"task": "running_sum", "size": 8, "split": "evaluation"}}, "every": 30}
    final = train(recipe(validation=problems))
    lines = [line for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert lines[0]["gates_open"] < 0.2  # CR is 1 at the first step
    assert lines[0]["ratio_loss"] == 0
    assert lines[-1]["gates_open"] >= 0.45
    assert lines[-1]["ratio_loss"] <= 0.05
    # A token with an open gate is kept until it leaves the window, and a prompt token until the prompt has been read.
    assert all(1 > line["cache/retention"] > 1 - line["gates_open"] for line in lines)
    (held_out,) = [line for line in read_metrics(tmp_path / "run") if line["step"] == 30 and "eval_kl" in line]
    assert held_out["eval_gates_open"] >= 0.3
    assert 0 < held_out["eval_token_accuracy"] < 1
    assert 1 > held_out["eval_cache/retention"] > 1 - held_out["eval_gates_open"]
    train(recipe(output_dir=str(tmp_path / "control"), gates={"anneal_steps": 10, "weight": 1e-6}))
    control = [line for line in read_metrics(tmp_path / "control") if "loss" in line]
    assert control[-1]["gates_open"] < 0.3

    model, engine = load_model(final), make_engine("hf", model=final)
    assert engine.policy.name == "dms"
    rollouts = engine.generate([list(range(3, 50)), [5, 6, 7]], SamplingConfig(40, seed=0, ignore_eos=True))
    assert gap(replay_logprobs(model, rollouts), rollouts) <= 1e-5
    held = torch.stack([r.trace.kept_counts().float() for r in rollouts])
    assert held.mean() < 0.8 * sum(len(r.trace) for r in rollouts) / 2


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_run(recipe: Callable, tmp_path: Path) -> None:
    """A resumed retrofit with gradient checkpointing equals an uninterrupted one. Its KL equals the KL without
    checkpointing, because a gate has the same noise when the forward pass is computed again.
    """
    check_resumed(recipe, tmp_path, gradient_checkpointing=True)
    whole, not_checkpointed = tmp_path / "whole", tmp_path / "plain"
    train(
        recipe(
            output_dir=str(not_checkpointed),
            max_steps=5,
            save_steps=2,
            save_total_limit=None,
            gradient_checkpointing=False,
        )
    )
    kl = [[line["kl"] for line in read_metrics(folder) if "loss" in line] for folder in (whole, not_checkpointed)]
    assert kl[0] == pytest.approx(kl[1], rel=1e-4)


@pytest.mark.slow
def test_grpo_trains_the_model_with_frozen_gates(recipe: Callable, tmp_path: Path) -> None:
    """GRPO trains the retrofitted model with frozen gates. A recipe with learning scorers or with LoRA is refused."""
    final = train(recipe(max_steps=20))
    content = {
        "kind": "grpo",
        "model": str(final),
        "output_dir": str(tmp_path / "rl"),
        "data": {"synthetic": {"task": "running_sum", "size": 24}},
        "rewards": ["boxed"],
        "cache": {**CACHE},
        "rollout": {"engine": "hf"},
        "dtype": "float32",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 20,
        "max_steps": 2,
    }
    train(make_recipe(content))
    lines = [line for line in read_metrics(tmp_path / "rl") if "loss" in line]
    assert len(lines) == 2
    assert all(line["replay/gap_max"] <= 1e-5 for line in lines)
    with pytest.raises(UserError, match="scorers: dms has no scorers to train"):
        make_recipe({**content, "scorers": {}})
    with pytest.raises(UserError, match=r"lora: does not work with cache\.policy dms"):
        make_recipe({**content, "lora": {"r": 4}})
