"""A new method needs only its folder (cooling/) and one line in CONFIGS: its configuration names all other parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cooling.config import CoolingConfig
from planned import GRPO, plan
from trainer_runs import trained

from rollout import Rollout, SamplingConfig, make_engine
from sparse_rl.attention import replay_logprobs
from sparse_rl.methods.config import CONFIGS
from sparse_rl.recipe import make_recipe
from sparse_rl.trace import EvictionTrace, TraceError, load_traces, save_traces

POLICY = {"policy": "cooling", "budget": 12, "period": 4, "sinks": 2}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(CONFIGS, "cooling", CoolingConfig)  # the one line that registers the method


@pytest.fixture
def rollouts(model_of):
    """Return ragged rollouts; the prompt of one rollout is longer than the budget."""
    engine = make_engine("hf", model=model_of("qwen3"), policy=POLICY)
    prompts = [[3, 4, 5], list(range(3, 25)), [7] * 12]
    return engine.generate(prompts, SamplingConfig(20, seed=0, ignore_eos=True))


def gap(model: Any, rollouts: list[Rollout], changed: Callable[[EvictionTrace], EvictionTrace]) -> float:
    """Return the largest difference between sampled and replayed log-probs when the replay uses the traces that
    `changed` returns.
    """
    replayed = replay_logprobs(model, [dataclasses.replace(r, trace=changed(r.trace)) for r in rollouts])
    return max(
        float((logprobs.detach() - torch.tensor(r.logprobs)).abs().max())
        for logprobs, r in zip(replayed, rollouts, strict=True)
    )


def test_the_replay_of_the_added_method_is_exact(model_of, rollouts):
    model = model_of("qwen3")
    for rollout in rollouts:
        assert len(rollout.trace.further["cooled_at"]) >= 2
    late = lambda trace: EvictionTrace(  # noqa: E731
        trace.evict_at, {**trace.further, "cooled_at": trace.further["cooled_at"] + 1}, validate=False
    )
    assert gap(model, rollouts, lambda trace: trace) <= 1e-5
    assert gap(model, rollouts, lambda trace: EvictionTrace(trace.evict_at)) > 1e-4
    assert gap(model, rollouts, late) > 1e-4


def test_the_methods_sections_are_saved_loaded_and_checked(rollouts, tmp_path):
    save_traces(tmp_path / "t.safetensors", [r.trace for r in rollouts])
    loaded = load_traces(tmp_path / "t.safetensors")
    for trace, rollout in zip(loaded, rollouts, strict=True):
        assert torch.equal(trace.further["cooled_at"], rollout.trace.further["cooled_at"])
    sections = dict(rollouts[0].trace.further)
    with pytest.raises(TraceError, match=r"cooled_at .* is not ascending"):
        EvictionTrace(rollouts[0].trace.evict_at, sections | {"cooled_at": sections["cooled_at"].flip(0)})
    with pytest.raises(TraceError, match="needs cooled_by"):
        EvictionTrace(rollouts[0].trace.evict_at, {"cooled_at": sections["cooled_at"]})


def test_recipes_accept_the_method_and_doctor_counts_its_memory(model_of):
    plans = {}
    for name in ("cooling", "streaming"):
        cache = {**POLICY, "policy": name}
        items = plan(make_recipe({**GRPO, "cache": cache}), model_of("qwen3").config, cuda=False).items
        plans[name] = {item.name: item.device for item in items}
    cooling_size, streaming_size = (
        next(size for key, size in plans[name].items() if key.startswith("KV")) for name in plans
    )
    assert cooling_size > streaming_size


def test_grpo_trains_under_the_method_with_its_loss(grpo, monkeypatch):
    def weights(name: str) -> Iterator[torch.Tensor]:
        trainer = grpo(name, policy=POLICY, max_steps=1, max_completion_length=24)
        (line,) = [line for line in trained(trainer) if "replay/gap_max" in line]
        assert line["replay/gap_max"] <= 1e-5
        assert (line["method_loss"] > 0) == (name == "with")
        return trainer.model.parameters()

    with_loss = list(weights("with"))
    monkeypatch.setattr("cooling.view.WEIGHT", 0.0)
    assert any(not torch.equal(a, b) for a, b in zip(with_loss, weights("without"), strict=True))
