"""vLLM records from which tokens each token was drawn (tests/rollout/test_support.py tests the same for hf)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from judging import check_support_law
from test_vllm_replay import TRAINED, quickstart_prompts
from tiny import directory_of, loaded, policy_of, random_prompts

from rollout import SamplingConfig, make_engine
from sparse_rl.attention.interface import adopt
from sparse_rl.trace.sections import SUPPORT

CUTS = [{"top_p": 0.9}, {"top_k": 5, "top_p": 0.95}, {"min_p": 0.05}]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", ["quickstart", "llama", "granite", "qwen3_moe"])
@pytest.mark.few(2)
def test_log_probs_among_the_supports_are_the_samplers(
    name: str, cut: dict, temperature: float, open_engine: Callable
) -> None:
    """Prompts are prefilled in pieces, so that some tokens are sampled several times."""
    trained, policy = name == "quickstart", policy_of("gkv", budget=32, window=8, period=8)
    cut = {"min_p": 0.6} if name == "granite" and "min_p" in cut else cut  # its logits are divided by 3
    model = TRAINED if trained else name
    engine = open_engine(policy, model, shared=True, max_num_batched_tokens=64)
    prompts = quickstart_prompts(4) if trained else random_prompts((5, 40, 150))
    sampling = SamplingConfig(90, temperature, n=3, seed=0, ignore_eos=True, record_support=True, **cut)
    rollouts = engine.generate(prompts, sampling)
    check_support_law(adopt(loaded(TRAINED if trained else directory_of(name))), rollouts, temperature, trained)


@pytest.mark.parametrize("policy", ["gkv", "full"])
@pytest.mark.few(1)
def test_both_engines_record_the_same_supports(policy: str, open_engine: Callable) -> None:
    """To the last bit, as they sample the same tokens; forced tokens have none. Control: another top_p."""
    prompts, cache = quickstart_prompts(6), policy_of(policy, budget=32, window=8, period=8)
    settings = {"n": 2, "seed": 1, "ignore_eos": True, "forced": (7, 8), "forced_from": 9, "record_support": True}
    ours = open_engine(cache, TRAINED, shared=True).generate(prompts, SamplingConfig(50, top_p=0.9, **settings))
    reference = make_engine("hf", model=TRAINED, policy=cache)
    same = [reference.generate(prompts, SamplingConfig(50, top_p=top_p, **settings)) for top_p in (0.9, 0.6)]
    for equal, theirs in zip((True, False), same, strict=True):
        traces = [(a.trace.further, b.trace.further) for a, b in zip(ours, theirs, strict=True)]
        assert all(torch.equal(a[name], b[name]) for a, b in traces for name in SUPPORT) is equal
    assert all((r.trace.further["support_sizes"][len(r.prompt_ids) :] > 0).sum() == 48 for r in ours)


def test_nothing_is_recorded_unless_it_is_asked_for(open_engine: Callable) -> None:
    engine, prompts = open_engine(policy_of("gkv", budget=32, window=8, period=8), TRAINED, shared=True), [[5, 6], [7]]
    for setting in ({"record_support": True}, {"top_k": 3}, {"record_support": True, "temperature": 0, "top_k": 3}):
        rollouts = engine.generate(prompts, SamplingConfig(8, seed=0, ignore_eos=True, **setting))
        assert not any(r.trace.further for r in rollouts)
    assert not any(r.trace.further for r in engine.simulate(prompts, [r.completion_ids for r in rollouts]))
