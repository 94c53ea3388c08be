"""The invariant (docs/architecture.md): in replay, the trainer gives every sampled token the sampler's log-prob.

It holds for every policy, period and model. Controls: under wrong traces (evictions one position too early or too late,
no evictions, kv heads swapped) the log-probs are far from the sampler's.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest
import torch
from growing import Growing, GrowingConfig
from judging import gap, wrong_routes, wrong_traces, wrong_windows
from policy_cases import SAMPLED
from transformers import PreTrainedModel

from rollout import SamplingConfig, make_engine
from sparse_rl.attention.families import FAMILIES, windows_of
from sparse_rl.attention.logprobs import dense_logprobs, replay_logprobs
from sparse_rl.experts.routing import has_experts
from sparse_rl.methods.config import accepted_parameters
from sparse_rl.policies import Policy
from sparse_rl.trace import NEVER

TRAINED = ("quickstart", "stories260K")
FIRST = ("qwen2", "qwen3", "llama")  # families of which `make test` runs every case
CELLS = [
    (policy, period) for policy in SAMPLED for period in ((1, 8) if "period" in accepted_parameters(policy) else (1,))
]
# In `make test`, each other family runs in one case. The others are slow tests.
SHORTENED = dict(
    zip([f for f in FAMILIES if f not in FIRST], cycle([("gkv", 8), ("h2o", 1), ("snapkv", 8), ("am", 8)]))
)
BUDGET = 20
# prompt lengths shorter and longer than the budget; budget, and budget + period
LENGTHS = (1, 4, 11, 19, 20, 28, 41, 66)
TOKENS = 30
TOLERANCE = 1e-5
EXPERTS = 8  # in a layer of a tiny model with experts


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
        true_gap = max(gap(replay_logprobs(model, rollouts), rollouts), gap(dense, rollouts))
        record_property("gap", true_gap)
        tally(policy.name, gap=true_gap)
        assert true_gap <= TOLERANCE
        if has_experts(model):
            for name, with_wrong_routes in wrong_routes(rollouts, EXPERTS).items():
                assert gap(replay_logprobs(model, with_wrong_routes), rollouts) >= 0.1, name
        if any(windows_of(model.config)):
            for name, with_wrong_windows in wrong_windows(rollouts).items():
                assert gap(replay_logprobs(model, with_wrong_windows), rollouts) >= 0.1, name

        evicted = [bool((r.trace.policy_part().evict_at < NEVER).any()) for r in rollouts]
        if policy.name == "full":
            assert not any(evicted)
            return
        assert all(evicted), "a row without evictions cannot test replay"
        for name, with_wrong_trace in wrong_traces(rollouts).items():
            wrong_gap = gap(replay_logprobs(model, with_wrong_trace), rollouts)
            record_property(name, wrong_gap)
            assert wrong_gap >= max(100 * true_gap, least), (
                f"{name}: the gap {wrong_gap:.1e} is too close to the gap of the right trace, {true_gap:.1e}"
            )


def is_slow(model: str, policy: str, period: int) -> bool:
    return model in SHORTENED and SHORTENED[model] != (policy, period)


@pytest.mark.parametrize(
    ("policy_name", "period", "model_name"),
    [
        pytest.param(*cell, model, marks=[pytest.mark.slow] if is_slow(model, *cell) else [])
        for cell in CELLS
        for model in (*FAMILIES, *TRAINED)
    ],
)
@pytest.mark.few(61)
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
    """Completions are sampled with evictions, then replayed under the recorded traces. The gap is at most 1e-5.
    Control: under each wrong trace it is at least 100 times the true gap (`check_cell`).
    """
    policy = policy_of(policy_name, budget=BUDGET, window=4, period=period)
    prompts, trained = prompts_of(model_name, LENGTHS), model_name in TRAINED
    check_cell(model_of(model_name), policy, prompts, 1e-3 if trained else 1e-5, record_property, tally)


@pytest.mark.parametrize("model_name", [*FIRST, *TRAINED])
@pytest.mark.parametrize("period", [1, 8])
@pytest.mark.few(4)
def test_replay_equals_sampling_under_a_budget_that_grows(
    period: int,
    model_name: str,
    model_of: Callable,
    prompts_of: Callable,
    record_property: Callable,
    tally: Callable,
) -> None:
    """Compactions keep one more entry for every 4 tokens seen, so the rows of a batch keep different numbers of
    entries. The policy is defined in tests/growing.py. `check_cell` checks the same law as above.
    """
    policy, trained = Growing(GrowingConfig(budget=BUDGET - 8, window=4, period=period)), model_name in TRAINED
    prompts, least = prompts_of(model_name, LENGTHS), 1e-3 if trained else 1e-5
    check_cell(model_of(model_name), policy, prompts, least, record_property, tally)


def test_kv_heads_evict_differently(model_of: Callable, policy_of: Callable, prompts_of: Callable) -> None:
    """gkv scores each kv head separately, so the heads evict different tokens. `wrong_traces` offers the control "heads
    swapped" only then.
    """
    engine = make_engine("hf", model=model_of("qwen3"), policy=policy_of("gkv", budget=BUDGET, window=4, period=8))
    rollouts = engine.generate(prompts_of("qwen3", LENGTHS), SamplingConfig(max_tokens=TOKENS, seed=1, ignore_eos=True))
    assert "heads swapped" in wrong_traces(rollouts)
