"""The invariant (docs/architecture.md): in replay, every sampled token has the sampler's log-prob.

The tests cover one matrix of policies, periods and models. Controls: under each wrong trace the log-probs are far from
the sampler's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from growing import Growing, GrowingConfig
from judging import gap, wrong_traces
from policy_cases import SAMPLED
from transformers import PreTrainedModel

from rollout import SamplingConfig, make_engine
from sparse_rl.attention.families import FAMILIES
from sparse_rl.attention.logprobs import dense_logprobs, replay_logprobs
from sparse_rl.methods.config import accepted_parameters
from sparse_rl.policies import Policy
from sparse_rl.trace import NEVER

TRAINED = ("quickstart", "stories260K")
MODELS = (*FAMILIES, *TRAINED)
CELLS = [
    (policy, period) for policy in SAMPLED for period in ((1, 8) if "period" in accepted_parameters(policy) else (1,))
]
BUDGET = 20
# prompt lengths shorter and longer than the budget; budget, and budget + period
LENGTHS = (1, 4, 11, 19, 20, 28, 41, 66)
TOKENS = 30
TOLERANCE = 1e-5


def check_cell(
    model: PreTrainedModel,
    policy: Policy,
    prompts: list[list[int]],
    least: float,
    record_property: Callable,
    tally: Callable,
) -> None:
    """Sample, then check that the replay and the dense reference are within TOLERANCE of the sampler, and that the gap
    of each wrong trace is at least `least` and at least 100 times the true gap.
    """
    sampling = SamplingConfig(max_tokens=TOKENS, seed=1, ignore_eos=True)
    rollouts = make_engine("hf", model=model, policy=policy).generate(prompts, sampling)
    with torch.no_grad():
        dense = [dense_logprobs(model, r.prompt_ids, r.completion_ids, r.trace) for r in rollouts]
        own = max(gap(replay_logprobs(model, rollouts), rollouts), gap(dense, rollouts))
        record_property("gap", own)
        tally(policy.name, gap=own)
        assert own <= TOLERANCE

        evicted = [bool((r.trace.evict_at < NEVER).any()) for r in rollouts]
        if policy.name == "full":
            assert not any(evicted)
            return
        assert all(evicted), "a row where nothing is evicted shows nothing"
        for name, wrong in wrong_traces(rollouts).items():
            far = gap(replay_logprobs(model, wrong), rollouts)
            record_property(name, far)
            assert far >= max(100 * own, least), f"{name}: {far:.1e} does not tell it from the right trace, {own:.1e}"


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize(("policy_name", "period"), CELLS)
def test_replay_equals_sampling(
    policy_name: str,
    period: int,
    model_name: str,
    model_of: Callable,
    policy_of: Callable,
    prompts_of: Callable,
    record_property: Callable,
    tally: Callable,
) -> None:
    policy = policy_of(policy_name, budget=BUDGET, window=4, period=period)
    prompts, trained = prompts_of(model_name, LENGTHS), model_name in TRAINED
    check_cell(model_of(model_name), policy, prompts, 1e-3 if trained else 1e-5, record_property, tally)


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("period", [1, 8])
def test_replay_equals_sampling_under_a_budget_that_grows(
    period: int,
    model_name: str,
    model_of: Callable,
    prompts_of: Callable,
    record_property: Callable,
    tally: Callable,
) -> None:
    """Replay equals sampling under a policy that is not registered, whose compaction keeps one more entry for every 4
    tokens seen, so that the rows of a batch keep different counts.
    """
    policy, trained = Growing(GrowingConfig(budget=BUDGET - 8, window=4, period=period)), model_name in TRAINED
    prompts, least = prompts_of(model_name, LENGTHS), 1e-3 if trained else 1e-5
    check_cell(model_of(model_name), policy, prompts, least, record_property, tally)


def test_kv_heads_evict_differently(model_of: Callable, policy_of: Callable, prompts_of: Callable) -> None:
    """The control "heads swapped" has an effect, since a method that scores per kv head evicts differently in each
    head.
    """
    engine = make_engine("hf", model=model_of("qwen3"), policy=policy_of("gkv", budget=BUDGET, window=4, period=8))
    rollouts = engine.generate(prompts_of("qwen3", LENGTHS), SamplingConfig(max_tokens=TOKENS, seed=1, ignore_eos=True))
    assert "heads swapped" in wrong_traces(rollouts)
