"""Simulation of given tokens yields the evictions that the engine records when it samples these tokens itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from policy_cases import SAMPLED

from rollout import Rollout, SamplingConfig, make_engine

LENGTHS = (3, 9, 30, 17, 1, 12)


def sampled(engine: object, prompts: list[list[int]], tokens: int = 40) -> list[Rollout]:
    return engine.generate(prompts, SamplingConfig(tokens, seed=3))  # type: ignore[attr-defined]


@pytest.mark.parametrize("period", [1, 4])
@pytest.mark.parametrize("name", SAMPLED)
def test_simulation_equals_sampling_bit_for_bit(
    name: str, period: int, model_of: Callable, policy_of: Callable, prompts_of: Callable
) -> None:
    policy = policy_of(name, budget=10, window=4, period=period)
    engine = make_engine("hf", model=model_of("qwen3"), policy=policy)
    wanted = sampled(engine, prompts_of("qwen3", LENGTHS))
    outputs = engine.simulate([r.prompt_ids for r in wanted], [r.completion_ids for r in wanted])
    assert name == "full" or any(r.trace.retention() < 1 for r in wanted)
    for ours, theirs in zip(outputs, wanted, strict=True):
        assert torch.equal(ours.trace.evict_at, theirs.trace.evict_at)
        assert ours.completion_ids == theirs.completion_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-6)  # rows leave the batch at other times


def test_another_completion_has_another_trace(model_of: Callable, policy_of: Callable, prompts_of: Callable) -> None:
    """Control: the simulated evictions depend on the tokens."""
    engine = make_engine("hf", model=model_of("qwen3"), policy=policy_of("gkv", budget=10, window=4, period=4))
    wanted = sampled(engine, prompts_of("qwen3", LENGTHS))
    other = [[(token + 7) % 60 + 3 for token in r.completion_ids] for r in wanted]
    sampled_again = engine.simulate([r.prompt_ids for r in wanted], other)
    assert any(not torch.equal(a.trace.evict_at, b.trace.evict_at) for a, b in zip(sampled_again, wanted, strict=True))


def test_stop_tokens_do_not_end_a_simulation(model_of: Callable, policy_of: Callable) -> None:
    engine = make_engine("hf", model=model_of("qwen3"), policy=policy_of("streaming", budget=10, period=4))
    (outputs,) = engine.simulate([[5, 6]], [[2, 7, 2, 2, 9] * 6])  # 2 is the model's end of sequence
    assert outputs.completion_ids == [2, 7, 2, 2, 9] * 6 and outputs.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompts", "completions", "says"),
    [
        ([[1]], [], "1 prompts but 0 completions"),
        ([[1], []], [[1], [1]], "prompt 1 is empty"),
        ([[1]], [[]], "completion 0 is empty"),
    ],
)
def test_refused(prompts: list, completions: list, says: str, model_of: Callable) -> None:
    engine = make_engine("hf", model=model_of("qwen3"), policy="full")
    with pytest.raises(ValueError, match=says):
        engine.simulate(prompts, completions)
    assert engine.simulate([], []) == []
