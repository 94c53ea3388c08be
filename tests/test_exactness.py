"""The invariant (docs/architecture.md): in replay, the trainer gives every sampled token the sampler's log-prob.

It holds for every policy, period and model. Controls: under wrong traces (evictions one position too early or too late,
no evictions, kv heads swapped) the log-probs are far from the sampler's.
"""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from dense_matched import dense_logprobs
from judging import gap, wrong_routes, wrong_traces, wrong_windows
from policy_cases import BOUNDED, CALIBRATED, SAMPLED, UNCALIBRATED
from tiny import centred

from rollout import SamplingConfig, make_engine
from sparse_rl.attention import compute_exactly
from sparse_rl.attention.families import FAMILIES, windows_of
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.experts import has_experts
from sparse_rl.kernels.exact import computing_dtype
from sparse_rl.methods.config import accepted_parameters
from sparse_rl.recipe import Run, load_recipe
from sparse_rl.recipe.sampling import engines
from sparse_rl.trace import NEVER

TRAINED = ("quickstart", "stories260K")
FIRST = ("qwen2", "qwen3", "llama")  # families of which `make test` runs every case
CELLS = [
    (policy, period)
    for policy in (*SAMPLED, *CALIBRATED)
    for period in ((1, 8) if "period" in accepted_parameters(policy) else (1,))
]
# In `make test`, each other family runs in one case. The others are slow tests.
SHORTENED = dict(
    zip([f for f in FAMILIES if f not in FIRST], cycle([("gkv", 8), ("h2o", 1), ("snapkv", 8), ("am", 8)]))
)
BUDGET = 20
# prompt lengths shorter and longer than the budget; budget, and budget + period
LENGTHS = (1, 4, 19, 20, 28, 66)
TOKENS = 30
TOLERANCE = 1e-5
EXPERTS = 8  # in a layer of a tiny model with experts


def check_cell(model, policy, prompts, least, tally):
    """Sample, then check that the replay and the dense reference are within TOLERANCE of the sampler, and that the gap
    of each wrong trace is at least `least` and at least 100 times the true gap.
    """
    sampling = SamplingConfig(max_tokens=TOKENS, seed=1, ignore_eos=True)
    rollouts = make_engine("hf", model=model, policy=policy).generate(prompts, sampling)
    with torch.no_grad():
        dense = [dense_logprobs(model, r.prompt_ids, r.completion_ids, r.trace) for r in rollouts]
        true_gap = max(gap(replay_logprobs(model, rollouts), rollouts), gap(dense, rollouts))
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
        if cell[0] not in CALIBRATED or model not in UNCALIBRATED
    ],
)
@pytest.mark.few(31)
def test_replay_equals_sampling(policy_name, period, model_name, model_of, policy_of, prompts_of, tally):
    """Control: under each wrong trace the gap is at least 100 times the true gap (`check_cell`)."""
    policy = policy_of(policy_name, budget=BUDGET, window=4, period=period)
    prompts, trained = prompts_of(model_name, LENGTHS), model_name in TRAINED
    model = centred(model_name) if policy_name in CALIBRATED else model_of(model_name)
    check_cell(model, policy, prompts, 1e-3 if trained else 1e-5, tally)


@pytest.mark.parametrize("model_name", [*FIRST, *TRAINED])
@pytest.mark.parametrize(("policy_name", "period"), [*((name, 8) for name in BOUNDED), ("gkv", 1), ("streaming", 1)])
@pytest.mark.few(4)
def test_replay_equals_sampling_under_a_budget_that_grows(
    policy_name, period, model_name, model_of, policy_of, prompts_of, tally
):
    """The rows of a batch keep different numbers of entries, and grow while they sample."""
    budget = {"tokens": [8, 40, 80], "entries": [BUDGET - 8, BUDGET, BUDGET + 8]}
    policy = policy_of(policy_name, budget=budget, window=4, period=period)
    prompts, trained = prompts_of(model_name, LENGTHS), model_name in TRAINED
    check_cell(model_of(model_name), policy, prompts, 1e-3 if trained else 1e-5, tally)


def test_kv_heads_evict_differently(model_of, policy_of, prompts_of):
    """gkv scores each kv head separately; only then does `wrong_traces` offer the control "heads swapped"."""
    engine = make_engine("hf", model=model_of("qwen3"), policy=policy_of("gkv", budget=BUDGET, window=4, period=8))
    rollouts = engine.generate(prompts_of("qwen3", LENGTHS), SamplingConfig(max_tokens=TOKENS, seed=1, ignore_eos=True))
    assert "heads swapped" in wrong_traces(rollouts)


RECIPE = ("quickstart/grpo", ["model=m", "rollout.engine=hf"])


@pytest.fixture(autouse=True)
def exact_again():
    """Restore the default after each test."""
    yield
    compute_exactly(True)


def test_the_key_exact_sets_the_dtype_of_the_engine():
    in_float32, in_bfloat16 = torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)
    for exact, dtype in ((True, torch.float64), (False, torch.float32), (True, torch.float64)):
        recipe = load_recipe(RECIPE[0], [*RECIPE[1], f"rollout.exact={exact}"])
        engines(Run(recipe=recipe, config=None, live=torch.nn.Module()))
        assert computing_dtype(in_float32, in_float32) == dtype
        assert computing_dtype(in_bfloat16, in_bfloat16) == torch.bfloat16


@pytest.mark.parametrize("policy", ["streaming", "gkv"])
@pytest.mark.parametrize(("name", "most"), [("quickstart", 1e-5), ("stories260K", 5e-5)])
@pytest.mark.few(1)
def test_the_gap_stays_small_in_float32(name, most, policy, model_of, policy_of, prompts_of):
    """`most` is larger for stories260K, which amplifies rounding. Controls: in float64 the gap is at most 1e-5."""
    model, cache, results = model_of(name), policy_of(policy, budget=24, window=8, period=8), {}
    prompts, sampling = prompts_of(name, (3, 20, 41)), SamplingConfig(max_tokens=60, seed=1, ignore_eos=True)
    for exact in (True, False):
        compute_exactly(exact)
        rollouts = make_engine("hf", model=model, policy=cache).generate(prompts, sampling)
        with torch.no_grad():
            results[exact] = replay_logprobs(model, rollouts)
        current_gap = gap(results[exact], rollouts)
        assert current_gap <= (1e-5 if exact else most)
    assert any(not torch.equal(a, b) for a, b in zip(results[True], results[False], strict=True))
