"""The quickstart's trained model amplifies rounding: the gap in float32 is within 1e-5, and evictions add nothing in
bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from judging import wrong_traces
from policy_cases import ON_VLLM
from ties import agrees_with_hf, replay_gap
from tiny import policy_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout import Rollout, SamplingConfig
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.data.synthetic import RunningSum
from sparse_rl.policies import Policy, make_policy

pytestmark = pytest.mark.slow
SAMPLING = SamplingConfig(100, seed=0)
TRAINED = Path(__file__).parents[2] / "recipes/quickstart/model"
BUDGET = {"budget": 40, "window": 8, "period": 8}


@cache
def problems() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TRAINED)
    return [tokenizer(row["prompt"])["input_ids"] for row in RunningSum().rows("calibration", 192, seed=0)]


@pytest.mark.parametrize("policy_name", ON_VLLM)
def test_float32_equals_the_reference_engine(policy_name: str, open_engine: Callable) -> None:
    """Control: under wrong traces the gap is at least 1e-2."""
    policy, prompts = policy_of(policy_name, **BUDGET), problems()[:32]
    rollouts = open_engine(policy, TRAINED, max_batch=32).generate(prompts, SAMPLING)
    agrees_with_hf(policy, prompts, SAMPLING, {"trained": rollouts}, TRAINED)
    if policy_name != "full":  # control: with wrong traces the gap, which agrees_with_hf has bounded, is large
        for name, wrong_rollouts in wrong_traces(rollouts).items():
            assert replay_gap(wrong_rollouts, TRAINED) >= 1e-2, name


def test_evictions_add_nothing_to_the_gap_of_bfloat16(open_engine: Callable) -> None:
    """By the 99th percentile over 10,000 tokens: at most 1.5 times that of a full cache under a large budget; under a
    small one, where log-probs are more sensitive, both in units of |bfloat16 - float32| of the trainer."""
    models = [AutoModelForCausalLM.from_pretrained(TRAINED, dtype=torch.bfloat16).eval() for _ in range(2)]
    models[1].float()  # the same weights, converted from bfloat16

    def measure(policy: Policy) -> tuple[float, float, list[Rollout]]:
        rollouts = open_engine(policy, TRAINED, dtype="bfloat16", max_batch=64).generate(problems(), SAMPLING)
        with torch.no_grad():
            bfloat16, float32 = (torch.cat(replay_logprobs(model, rollouts, batch_size=16)) for model in models)
        sampled = torch.cat([torch.tensor(r.model_logprobs) for r in rollouts])
        assert len(bfloat16) >= 64 * 100
        gap, noise = (float((bfloat16 - other).abs().quantile(0.99)) for other in (sampled, float32))
        return gap, gap / noise, rollouts

    full_gap, full_units, _ = measure(make_policy("full"))
    for name in ON_VLLM[1:]:
        gap, _, _ = measure(policy_of(name, budget=72, window=8, period=8))
        assert gap <= 1.5 * full_gap, f"{name}: {gap:.3f} against {full_gap:.3f}"
        gap, units, rollouts = measure(policy_of(name, budget=40, window=8, period=8))
        assert units <= 1.5 * full_units, f"{name}: {units:.2f} against {full_units:.2f}"
        with torch.no_grad():
            causal = torch.cat(replay_logprobs(models[0], wrong_traces(rollouts)["causal"], batch_size=16))
        sampled = torch.cat([torch.tensor(r.model_logprobs) for r in rollouts])
        assert float((causal - sampled).abs().quantile(0.99)) >= 10 * gap, name  # control
