"""The vLLM engine samples the same tokens and evicts the same entries as the reference engine, except for ties."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from policy_cases import ON_VLLM
from ties import agrees_with_hf
from tiny import policy_of, random_prompts

from rollout import SamplingConfig
from sparse_rl.attention.families import FAMILIES
from sparse_rl.methods.config import accepted_parameters
from sparse_rl.trace import NEVER

ON_BOTH = [family for family, only_hf in FAMILIES.items() if only_hf is None]
CELLS = [
    (policy, period) for policy in ON_VLLM for period in ((1, 16) if "period" in accepted_parameters(policy) else (1,))
]
# In `make test`, every policy runs, most of them with two families, and every family runs. The other cases are slow
# tests, and so is am with period 1: its fits take 18 seconds, and test_vllm_replay.py runs them too. Every policy runs
# with the first three families; every family runs with the policies of EVERYWHERE.
FIRST, EVERYWHERE = 3, (("gkv", 16), ("am", 16))
FIRST_RUNS = {cell: ON_BOTH[i if i < len(ON_BOTH) else i % FIRST] for i, cell in enumerate(CELLS)}
MATRIX = [
    pytest.param(*cell, family, marks=[] if FIRST_RUNS[cell] == family and cell != ("am", 1) else pytest.mark.slow)
    for cell in CELLS
    for family in ON_BOTH
    if FIRST_RUNS[cell] == family or family in ON_BOTH[:FIRST] or cell in EVERYWHERE
]
assert set(FIRST_RUNS.values()) == set(ON_BOTH)
LENGTHS = (5, 17, 33, 48, 63, 64, 79, 80, 81, 100, 130, 200, 256, 333, 450, 600)
GREEDY = SamplingConfig(48, temperature=0, ignore_eos=True)


@pytest.mark.parametrize(("policy_name", "period", "family"), MATRIX)
@pytest.mark.few(3)
def test_greedy_tokens_and_traces_equal_the_reference_engines(
    policy_name: str, period: int, family: str, open_engine: Callable
) -> None:
    """With the trainer's arithmetic (`exact`) and with vLLM's own kernels."""
    policy, prompts = policy_of(policy_name, budget=64, window=8, period=period), random_prompts(LENGTHS)
    sampled = {
        "exact": open_engine(policy, family).generate(prompts, GREEDY),
        "vLLM's kernels": open_engine(policy, family, exact=False).generate(prompts, GREEDY),
    }
    agrees_with_hf(policy, prompts, GREEDY, sampled, family)
    for r in (r for rollouts in sampled.values() for r in rollouts):
        unevicted = policy_name == "full" or len(r.trace) - 1 <= 64 + period
        assert bool((r.trace.evict_at == NEVER).all()) is unevicted


def test_forced_tokens_are_the_same_in_both_engines(open_engine: Callable) -> None:
    """In the middle of a completion; then both sample the same tokens."""
    policy, prompts = policy_of("am", budget=32, window=8, period=16), random_prompts((5, 33, 60))
    forced = SamplingConfig(40, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True, forced=(7, 8, 9), forced_from=20)
    sampled = open_engine(policy).generate(prompts, forced)
    assert all(r.completion_ids[20:23] == [7, 8, 9] for r in sampled)
    agrees_with_hf(policy, prompts, forced, {"exact": sampled})


def test_control_another_policy_is_detected(open_engine: Callable) -> None:
    """Control: a sampler with another policy is detected, for one prompt and for several."""
    morphkv, snapkv = (policy_of(name, budget=64, window=8, period=16) for name in ("morphkv", "snapkv"))
    prompts = random_prompts((90, 200))
    sampled = open_engine(morphkv).generate(prompts, GREEDY)
    agrees_with_hf(morphkv, prompts, GREEDY, {"itself": sampled})
    with pytest.raises(AssertionError, match=r"sequences \[0, 1\] differ"):
        agrees_with_hf(snapkv, prompts, GREEDY, {"another": sampled})
    for i in (0, 1):
        with pytest.raises(AssertionError, match="sequence 0 differs where the choice was clear"):
            agrees_with_hf(snapkv, prompts[i : i + 1], GREEDY, {"another": sampled[i : i + 1]})


def test_keys_can_be_read_on_a_cpu_with_amx(open_engine: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """There vLLM would pack the keys of bfloat16."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    monkeypatch.setattr("vllm.v1.attention.backends.cpu_attn._get_attn_isa", lambda *_, **__: "amx")
    llm = open_engine(policy_of("gkv", budget=64, window=8, period=8), dtype="bfloat16").llm.llm_engine
    layers = get_layers_from_vllm_config(llm.vllm_config, Attention).values()
    (groups,) = llm.model_executor.driver_worker.worker.model_runner.attn_groups
    assert {groups[0].get_metadata_builder().isa, *(layer.isa for layer in layers)} == {"vec"}
