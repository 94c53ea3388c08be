"""Simulation on vLLM gives the evictions and log-probs that sampling of the same tokens gives, and those of hf."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny import directory_of, loaded, policy_of, random_prompts

from rollout import SamplingConfig, make_engine

LENGTHS = (5, 90, 33, 200, 12)


@pytest.mark.parametrize("name", ["streaming", "gkv", "h2o"])
@pytest.mark.few(1)
def test_simulation_equals_sampling(name: str, open_engine: Callable) -> None:
    """On vLLM and on hf. Control: under gkv, other completions give other evictions."""
    policy = policy_of(name, budget=40, window=8, period=16)
    engine = open_engine(policy)
    prompts = random_prompts(LENGTHS)
    expected = engine.generate(prompts, SamplingConfig(70, seed=1))
    completions = [rollout.completion_ids for rollout in expected]
    reference = make_engine("hf", model=loaded(directory_of("qwen2")), policy=policy)
    for outputs in (engine.simulate(prompts, completions), reference.simulate(prompts, completions)):
        for output, reference_rollout in zip(outputs, expected, strict=True):
            assert output.completion_ids == reference_rollout.completion_ids
            assert torch.equal(output.trace.evict_at, reference_rollout.trace.evict_at)
            assert output.logprobs == pytest.approx(reference_rollout.logprobs, abs=1e-5)
    other = [[(token + 9) % 60 + 3 for token in completion] for completion in completions]
    changed = engine.simulate(prompts, other)
    assert [r.completion_ids for r in changed] == other
    if name == "gkv":  # streaming looks only at positions, and h2o's sums hardly differ in a random model
        assert any(not torch.equal(a.trace.evict_at, b.trace.evict_at) for a, b in zip(changed, expected, strict=True))


def test_empty_and_too_long_completions_are_refused(open_engine: Callable) -> None:
    engine = open_engine(policy_of("streaming", budget=40, period=16), max_model_len=128)
    with pytest.raises(ValueError, match="completion 1 is empty"):
        engine.simulate([[3], [4]], [[5], []])
    with pytest.raises(ValueError, match="more than max_model_len 128"):
        engine.simulate([[3]], [[5] * 128])
