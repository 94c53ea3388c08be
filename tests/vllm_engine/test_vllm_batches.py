"""Results of the vLLM engine do not depend on the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from judging import same, shortened
from policy_cases import ON_VLLM
from ties import agrees_with_hf, same_decisions
from tiny import directory_of, loaded, new_model, policy_of, random_prompts

from rollout import SamplingConfig, make_engine
from sparse_rl.trace import NEVER

RAGGED = (5, 33, 64, 80, 81, 130, 300, 17, 100, 256, 48, 200)
GREEDY = SamplingConfig(50, temperature=0, ignore_eos=True)
POLICY = policy_of("gkv", budget=64, window=8, period=16)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("policy_name", "period"), [("gkv", 16), ("h2o", 1), ("tova", 1), ("am", 16), ("full", 1)])
@pytest.mark.few(2)
def test_prompts_in_chunks_give_the_same_results(
    policy_name: str, period: int, exact: bool, open_engine: Callable
) -> None:
    """Prompts are prefilled in several forward passes, beside requests that decode."""
    policy, prompts = policy_of(policy_name, budget=64, window=8, period=period), random_prompts(RAGGED)
    engine = open_engine(policy, "llama", exact=exact, max_num_batched_tokens=64)
    agrees_with_hf(policy, prompts, GREEDY, {"in chunks": engine.generate(prompts, GREEDY)}, "llama")


@pytest.mark.parametrize(
    "policy_name", [pytest.param(p, marks=[pytest.mark.slow] if p == "am" else []) for p in ON_VLLM]
)
@pytest.mark.few(1)
def test_freed_blocks_and_rows_are_reused(policy_name: str, open_engine: Callable) -> None:
    """12 requests run 3 at a time, so a new one reuses the blocks and rows of an ended one; also in opposite order."""
    policy, prompts = policy_of(policy_name, budget=64, window=8, period=4), random_prompts(RAGGED)
    engine = open_engine(policy, "qwen3", max_batch=3, max_num_batched_tokens=48)
    stopping = SamplingConfig(50, temperature=0, stop_token_ids=[3, 9, 21, 40, 50])
    rollouts = engine.generate(prompts, stopping)
    assert len({len(r.completion_ids) for r in rollouts}) >= 5
    agrees_with_hf(policy, prompts, stopping, {"3 at a time": rollouts}, "qwen3")
    backwards = engine.generate(prompts[::-1], stopping)[::-1]
    agrees_with_hf(policy, prompts, stopping, {"backwards": backwards}, "qwen3")


@pytest.mark.slow
def test_a_seed_reproduces_the_samples_in_any_batch(open_engine: Callable) -> None:
    """The n samples of a prompt differ. Another seed, or no seed, gives others."""
    prompts, engine = random_prompts((5, 70, 200)), open_engine(POLICY, max_batch=5)

    def run(prompts: list[list[int]], seed: int | None, n: int) -> list[Any]:
        return engine.generate(prompts, SamplingConfig(40, n=n, seed=seed, ignore_eos=True))

    state = torch.get_rng_state()
    sampled = run(prompts, 7, 4)
    assert [r.prompt_ids for r in sampled] == [p for p in prompts for _ in range(4)]
    assert len({tuple(r.completion_ids) for r in sampled}) == 12
    assert same(run(prompts, 7, 4), sampled)
    reference = make_engine("hf", model=loaded(directory_of("qwen2")), policy=POLICY)
    assert same(reference.generate(prompts, SamplingConfig(40, n=4, seed=7, ignore_eos=True)), sampled)
    assert torch.equal(state, torch.get_rng_state())  # the global random generator is not advanced
    alone = run(prompts[1:2], 7, 4)
    assert same(alone, sampled[4:8])
    repeated = run(prompts[::-1] * 4, 7, 1)  # a repeated prompt gets another sample
    assert same([repeated[3 * k + 2 - i] for i in range(3) for k in range(4)], sampled)
    for seed in (8, None):
        assert not {tuple(r.completion_ids) for r in run(prompts, seed, 4)} & {tuple(r.completion_ids) for r in sampled}

    greedy = engine.generate(prompts[:1], SamplingConfig(40, temperature=0, n=3, ignore_eos=True))
    assert same_decisions(greedy[0], greedy[1])
    assert same_decisions(greedy[1], greedy[2])


@pytest.mark.slow
def test_stop_tokens_end_a_completion(open_engine: Callable, tmp_path: Any) -> None:
    """The stop tokens are those of the model or of the caller, or there are none."""
    prompts = random_prompts(RAGGED[:6])
    model = new_model("llama", hidden_size=128, head_dim=32)
    model.save_pretrained(tmp_path)
    engine = open_engine(POLICY, tmp_path)
    endless = engine.generate(prompts, SamplingConfig(50, seed=4, ignore_eos=True))
    assert {(len(r.completion_ids), r.finish_reason) for r in endless} == {(50, "length")}
    tokens = [endless[0].completion_ids[8], endless[3].completion_ids[35]]
    expected = [shortened(r, set(tokens)) for r in endless]
    assert len({len(r.completion_ids) for r in expected}) >= 3
    assert "stop" in {r.finish_reason for r in expected}
    assert same(engine.generate(prompts, SamplingConfig(50, seed=4, stop_token_ids=tokens)), expected)
    explicit = SamplingConfig(50, seed=4, stop_token_ids=tokens, ignore_eos=True)
    assert same(engine.generate(prompts, explicit), expected)
    immediate = engine.generate(prompts, SamplingConfig(9, seed=4, stop_token_ids=range(64)))
    assert {(len(r.completion_ids), r.finish_reason) for r in immediate} == {(1, "stop")}

    for eos in (tokens[0], tokens):
        model.generation_config.eos_token_id = eos
        model.generation_config.pad_token_id = 0
        model.save_pretrained(tmp_path)
        engine = open_engine(POLICY, tmp_path)
        shortened_rollouts = [shortened(r, {eos} if isinstance(eos, int) else set(eos)) for r in endless]
        assert same(engine.generate(prompts, SamplingConfig(50, seed=4)), shortened_rollouts)
        assert same(engine.generate(prompts, SamplingConfig(50, seed=4, ignore_eos=True)), endless)
        assert same(engine.generate(prompts, SamplingConfig(50, seed=4, stop_token_ids=[])), endless)


@pytest.mark.parametrize("policy_name", ["streaming", "tova", "h2o", "gkv", "am"])
@pytest.mark.few(1)
def test_prompt_lengths_near_budget_and_block_size_give_the_reference_engines_results(
    policy_name: str, open_engine: Callable
) -> None:
    """Prompts of about the budget, budget + period and multiples of the block size; completions of 1 to 40 tokens."""
    policy = policy_of(policy_name, budget=64, window=0 if policy_name == "tova" else 8, period=16)
    prompts = random_prompts((1, 2, 31, 32, 33, 63, 64, 65, 79, 80, 81, 95, 96, 97, 128))
    engine = open_engine(policy)
    for tokens in (1, 2, 16, 17, 18, 40):
        sampling = SamplingConfig(tokens, temperature=0, ignore_eos=True)
        rollouts = engine.generate(prompts, sampling)
        agrees_with_hf(policy, prompts, sampling, {f"{tokens} tokens": rollouts})
        if tokens == 1:
            assert all(bool((r.trace.evict_at == NEVER).all()) for r in rollouts)


@pytest.mark.slow
def test_a_budget_longer_than_the_sequence_equals_the_full_cache(open_engine: Callable) -> None:
    """Control: a budget of 32 gives other rollouts."""
    prompts, sampling = random_prompts((5, 64, 130)), SamplingConfig(40, seed=0, ignore_eos=True)
    full = open_engine("full").generate(prompts, sampling)
    for name in ON_VLLM:
        wide = open_engine(policy_of(name, budget=256, window=8, period=16)).generate(prompts, sampling)
        assert all(bool((r.trace.evict_at == NEVER).all()) for r in wide)
        assert same(wide, full)
    assert not same(open_engine(policy_of("tova", budget=32, period=16)).generate(prompts, sampling), full)


def test_a_temperature_near_zero_is_applied_as_given(open_engine: Callable) -> None:
    """vLLM alone would raise it to 0.01, but our own code samples."""
    policy, sampling = policy_of("streaming", budget=40, period=16), SamplingConfig(60, temperature=0.002, seed=5)
    prompts = random_prompts((5, 90, 33))
    outputs = open_engine(policy).generate(prompts, sampling)
    expected = make_engine("hf", model=loaded(directory_of("qwen2")), policy=policy).generate(prompts, sampling)
    assert [r.completion_ids for r in outputs] == [r.completion_ids for r in expected]
    for output, reference in zip(outputs, expected, strict=True):
        # a gap of 1e-6 in the logits becomes 5e-4 at this temperature
        assert output.logprobs == pytest.approx(reference.logprobs, abs=1e-3)
