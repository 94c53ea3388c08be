"""The invariant (docs/architecture.md) for vLLM: in replay, each token has the log-prob that vLLM reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from judging import wrong_traces
from test_vllm_against_hf import CELLS
from ties import agrees_with_hf, replay_gap
from tiny import policy_of, random_prompts

from rollout import SamplingConfig, make_engine
from sparse_rl.data.synthetic import RunningSum
from sparse_rl.models.load import load_tokenizer
from sparse_rl.policies import make_policy
from sparse_rl.trace import NEVER

TOLERANCE = 1e-5
TRAINED = Path(__file__).parents[2] / "recipes/quickstart/model"
LENGTHS = (5, 40, 64, 79, 80, 81, 150, 300)


def quickstart_prompts(count: int) -> list[list[int]]:
    tokenizer = load_tokenizer(TRAINED)
    return [tokenizer(row["prompt"])["input_ids"] for row in RunningSum().rows("calibration", count, seed=0)]


@pytest.mark.parametrize(("policy_name", "period"), CELLS)
@pytest.mark.few(3)
def test_replay_equals_sampling(policy_name: str, period: int, open_engine: Callable) -> None:
    """Control: under each wrong trace the gap is at least 1e-3, and at least 100 times the true gap."""
    policy, prompts = policy_of(policy_name, budget=64, window=8, period=period), random_prompts(LENGTHS, seed=1)
    engine = open_engine(policy, "qwen3")
    for temperature in (0.0, 1.0):
        rollouts = engine.generate(prompts, SamplingConfig(60, temperature=temperature, seed=3, ignore_eos=True))
        largest_gap = replay_gap(rollouts, "qwen3", temperature)
        assert largest_gap <= TOLERANCE
        if policy_name == "full":
            assert all(bool((r.trace.evict_at == NEVER).all()) for r in rollouts)
            continue
        wrong_rollouts = wrong_traces(rollouts)
        # the traces of these two policies are the same for all heads
        assert ("heads swapped" in wrong_rollouts) is (policy_name not in ("streaming", "tova"))
        for name, traces in wrong_rollouts.items():
            wrong_gap = replay_gap(traces, "qwen3", temperature)
            assert wrong_gap >= max(100 * largest_gap, 100 * TOLERANCE), name


@pytest.mark.parametrize("cache", [{"policy": "gkv", "window": 8}, {"policy": "streaming"}], ids=lambda c: c["policy"])
@pytest.mark.few(1)
def test_exact_rollouts_equal_those_of_hf_to_the_last_bit(cache: dict, open_engine: Callable) -> None:
    """A trained model in float32 on a CPU. Control: vLLM's own kernels give other bits."""
    prompts, sampling = quickstart_prompts(16), SamplingConfig(60, seed=2, ignore_eos=True)
    policy = make_policy({**cache, "budget": 40, "period": 8})
    expected = make_engine("hf", model=TRAINED, policy=policy).generate(prompts, sampling)
    outputs = open_engine(policy, TRAINED).generate(prompts, sampling)
    for output, reference in zip(outputs, expected, strict=True):
        assert output.completion_ids == reference.completion_ids
        assert output.logprobs == reference.logprobs
        assert torch.equal(output.trace.evict_at, reference.trace.evict_at)
    others = open_engine(policy, TRAINED, exact=False).generate(prompts, sampling)
    assert any(output.logprobs != reference.logprobs for output, reference in zip(others, expected, strict=True))


@pytest.mark.parametrize(
    "changed", [{}, {"select": "omp"}, pytest.param({"period": 1}, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.few(1)
def test_attention_matching_is_replayed_as_precisely_as_a_full_cache(changed: dict, open_engine: Callable) -> None:
    """In vLLM's own kernels, a coordinate of the keys holds the biases: at most twice the gap of a full cache."""
    prompts, sampling = quickstart_prompts(16), SamplingConfig(90, seed=2, ignore_eos=True)
    am = {"policy": "am", "budget": 24, "sinks": 1, "window": 8, "period": 16, "reference_queries": 24}
    gap_of_full_cache = replay_gap(open_engine("full", TRAINED, exact=False).generate(prompts, sampling), TRAINED)
    rollouts = open_engine(make_policy({**am, **changed}), TRAINED, exact=False).generate(prompts, sampling)
    largest_gap = replay_gap(rollouts, TRAINED)
    assert largest_gap <= max(2 * gap_of_full_cache, TOLERANCE)
    for name, traces in wrong_traces(rollouts).items():
        assert replay_gap(traces, TRAINED) >= 1e-2, name


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.few(1)
def test_temperature_top_p_and_top_k_equal_the_reference_engines(exact: bool, open_engine: Callable) -> None:
    """`model_logprobs` are those before top-p and top-k, `logprobs` those of the distribution that is sampled from."""
    policy, prompts = policy_of("gkv", budget=64, window=8, period=16), random_prompts(LENGTHS, seed=2)
    engine = open_engine(policy, "llama", exact=exact, max_num_batched_tokens=128)
    for options in ({}, {"top_p": 0.7}, {"top_k": 5}, {"top_p": 0.9, "top_k": 20}):
        sampling = SamplingConfig(60, temperature=0.7, seed=5, ignore_eos=True, **options)
        rollouts = engine.generate(prompts, sampling)
        agrees_with_hf(policy, prompts, sampling, {f"sampled with {options}": rollouts}, "llama")
        assert replay_gap(rollouts, "llama", 1.0) >= 100 * TOLERANCE
        differences = [a - b for r in rollouts for a, b in zip(r.logprobs, r.model_logprobs, strict=True)]
        assert min(differences) >= -1e-6  # the remaining tokens gain probability
        assert (max(differences) > 0.01) is bool(options)


@pytest.mark.parametrize("policy_name", ["tova", "h2o"])
@pytest.mark.few(1)
def test_budgets_below_the_block_size_equal_the_reference_engine(policy_name: str, open_engine: Callable) -> None:
    """Also without a window, where the newest token may be evicted."""
    policy = policy_of(policy_name, budget=3, window=0, period=2)
    prompts = random_prompts((1, 2, 3, 4, 5, 6, 31, 32, 33, 70))
    sampling = SamplingConfig(40, temperature=0, ignore_eos=True)
    agrees_with_hf(policy, prompts, sampling, {"tiny": open_engine(policy).generate(prompts, sampling)})
