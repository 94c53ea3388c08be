"""DMS's retrofit: gates open as far as the target requires, and the trained model samples with the same evictions."""

import pytest
import torch
from judging import gap

from rollout import SamplingConfig, make_engine
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.commands.train import train
from sparse_rl.metrics import read_metrics
from sparse_rl.models.load import load_model
from sparse_rl.recipe import make_recipe

CACHE = {"policy": "dms", "sinks": 2, "window": 4, "compression": 2.0, "bias": -2.0}


@pytest.fixture
def recipe(retrofit):
    of_gates = {"cache": CACHE, "gates": {"anneal_steps": 10}, "scorer_learning_rate": 0.05, "top_k": None}
    data = {"synthetic": {"task": "running_sum", "size": 64}}
    return lambda **keys: retrofit(**{**of_gates, "data": data, "max_steps": 30, **keys})


@pytest.mark.slow
def test_gates_open_to_the_required_share(recipe, tmp_path):
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
def test_a_gate_has_the_same_noise_when_the_forward_pass_is_computed_again(recipe, tmp_path):
    kl = []
    for checkpointed in (True, False):
        folder = tmp_path / str(checkpointed)
        train(recipe(output_dir=str(folder), max_steps=3, gradient_checkpointing=checkpointed))
        kl.append([line["kl"] for line in read_metrics(folder) if "loss" in line])
    assert kl[0] == pytest.approx(kl[1], rel=1e-4)


@pytest.mark.slow
def test_grpo_trains_the_model_with_frozen_gates(recipe, tmp_path):
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
