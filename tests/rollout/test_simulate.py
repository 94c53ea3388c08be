"""`simulate` feeds given completions, and records the evictions that sampling records."""

from __future__ import annotations

import pytest
import torch
from policy_cases import SAMPLED
from tiny import model_of, policy_of, prompts_of

from rollout import Rollout, SamplingConfig, make_engine

LENGTHS = (3, 9, 30, 17, 1, 12)


def sampled(engine: object, prompts: list[list[int]], tokens: int = 40) -> list[Rollout]:
    return engine.generate(prompts, SamplingConfig(tokens, seed=3))  # type: ignore[attr-defined]


@pytest.mark.parametrize("period", [1, 4])
@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.few(2)
def test_simulated_evictions_equal_the_sampled_ones(name: str, period: int) -> None:
    """Log-probs are equal up to 1e-6, because rows leave the batch at other times."""
    policy = policy_of(name, budget=10, window=4, period=period)
    engine = make_engine("hf", model=model_of("qwen3"), policy=policy)
    rollouts = sampled(engine, prompts_of("qwen3", LENGTHS))
    outputs = engine.simulate([r.prompt_ids for r in rollouts], [r.completion_ids for r in rollouts])
    assert name == "full" or any(r.trace.retention() < 1 for r in rollouts)
    for ours, theirs in zip(outputs, rollouts, strict=True):
        assert torch.equal(ours.trace.evict_at, theirs.trace.evict_at)
        assert ours.completion_ids == theirs.completion_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-6)


def test_control_other_completions_have_other_evictions() -> None:
    engine = make_engine("hf", model=model_of("qwen3"), policy=policy_of("gkv", budget=10, window=4, period=4))
    rollouts = sampled(engine, prompts_of("qwen3", LENGTHS))
    other_completions = [[(token + 7) % 60 + 3 for token in r.completion_ids] for r in rollouts]
    simulated = engine.simulate([r.prompt_ids for r in rollouts], other_completions)
    assert any(not torch.equal(a.trace.evict_at, b.trace.evict_at) for a, b in zip(simulated, rollouts, strict=True))


def test_stop_tokens_do_not_end_a_simulation() -> None:
    engine = make_engine("hf", model=model_of("qwen3"), policy=policy_of("streaming", budget=10, period=4))
    (outputs,) = engine.simulate([[5, 6]], [[2, 7, 2, 2, 9] * 6])  # 2 is the model's end of sequence
    assert outputs.completion_ids == [2, 7, 2, 2, 9] * 6
    assert outputs.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompts", "completions", "message"),
    [
        ([[1]], [], "1 prompts but 0 completions"),
        ([[1], []], [[1], [1]], "prompt 1 is empty"),
        ([[1]], [[]], "completion 0 is empty"),
    ],
)
def test_prompts_and_completions_that_do_not_match_are_refused(prompts: list, completions: list, message: str) -> None:
    engine = make_engine("hf", model=model_of("qwen3"), policy="full")
    with pytest.raises(ValueError, match=message):
        engine.simulate(prompts, completions)
    assert engine.simulate([], []) == []
