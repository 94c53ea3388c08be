"""GRPO and distillation under Attention Matching and under clustered attention: replay and resume are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from judging import gap
from safetensors.torch import load_file
from trainer_runs import SAMPLED, small

from rollout import SamplingConfig, make_engine
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.commands.train import train
from sparse_rl.metrics import read_metrics
from sparse_rl.models.load import load_model
from sparse_rl.policies import make_policy
from sparse_rl.recipe import make_recipe

CACHE = {"policy": "am", "budget": 12, "sinks": 1, "window": 4, "period": 6, "reference_queries": 16}
PAGED = {"policy": "clustered", "page": 4, "window": 4, "sinks": 1, "open_pages": 1}
PARTS = ({"policy": "lined", "window": 4, "period": 2}, {**PAGED, "compressor": "attention"})
LAYERED = {"policy": "layered", "parts": [{"layers": 1, "cache": part} for part in PARTS]}


@pytest.fixture
def recipe(tiny, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def make(kind: str, **keys: Any) -> Any:
        content = small(str(tiny()), tmp_path / "run", cache=CACHE, gradient_checkpointing=True)
        return make_recipe({**content, **SAMPLED[kind], **keys})

    return make


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLED)
def test_a_trained_model_samples_without_flags_and_replays_exactly(kind, recipe, tmp_path):
    final = train(recipe(kind))
    lines = [line for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert len(lines) == 3
    assert all(0 < line["cache/retention"] < 1 for line in lines)
    if kind == "grpo":
        assert all(line["replay/gap_max"] <= 1e-5 for line in lines)
        assert all(0 < line["match/mass"] < 1 and 0 < line["match/output"] < 1 for line in lines)
        assert all(line["match/bias_max"] > 0 and line["match/ridge"] == 1e-3 for line in lines)
    engine, model = make_engine("hf", model=final), load_model(final)
    assert engine.policy.name == "am"
    assert engine.policy.parameters()["reference_queries"] == 16
    sampling = SamplingConfig(max_tokens=30, seed=0, ignore_eos=True)
    rollouts = engine.generate([list(range(3, 30)), [5, 6, 7]], sampling)
    with torch.no_grad():
        assert gap(replay_logprobs(model, rollouts), rollouts) <= 1e-5
    constant = train(recipe(kind, output_dir=str(tmp_path / "constant"), match_gradient="constant"))
    weights, control = (load_file(Path(folder) / "model.safetensors") for folder in (final, constant))
    assert any(not torch.equal(weights[name], control[name]) for name in weights)


@pytest.mark.parametrize("cache", [PAGED, LAYERED], ids=lambda cache: cache["policy"])
@pytest.mark.parametrize("kind", SAMPLED)
@pytest.mark.few(1)
def test_a_model_trained_under_pages_replays_exactly(kind, cache, recipe, tmp_path):
    final = train(recipe(kind, cache=cache))
    lines = [line for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert len(lines) == 3
    assert all((line["cache/retention"] == 1) == (cache is PAGED) for line in lines)
    assert all(line["replay/gap_max"] <= 1e-5 for line in lines if kind == "grpo")
    engine, model = make_engine("hf", model=final), load_model(final)
    assert engine.policy.config.as_block() == make_policy(cache).config.as_block()
    sampling = SamplingConfig(max_tokens=30, seed=0, ignore_eos=True)
    rollouts = engine.generate([list(range(3, 30)), [5, 6, 7]], sampling)
    with torch.no_grad():
        assert gap(replay_logprobs(model, rollouts), rollouts) <= 1e-5
