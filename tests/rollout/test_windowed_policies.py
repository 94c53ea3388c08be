"""Policies that tests/test_exactness.py does not sample, on models whose layers have sliding windows. Policies act on
the other layers, the global layers, which they count from 0.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from judging import gap, wrong_windows
from learned import learned_policy, with_scorers
from transformers import PreTrainedModel
from windowed import GLOBAL, WINDOWS, windowed_model

from rollout import Rollout, SamplingConfig, make_engine
from sparse_rl.attention.logprobs import dense_logprobs, replay_logprobs
from sparse_rl.policies import Policy, make_policy
from sparse_rl.trace import NEVER
from trainer.scored.loss import decisions_agree

LENGTHS = (1, 7, 12, 25, 60)
SAMPLING = SamplingConfig(40, seed=1, ignore_eos=True)
PAGES = {"policy": "clustered", "page": 4, "window": 8, "sinks": 1, "open_pages": 2}
GKV = {"policy": "gkv", "budget": 12, "window": 4, "period": 4}
POLICIES: dict[str, dict[str, Any]] = {
    "am": {"policy": "am", "budget": 16, "window": 4, "sinks": 1, "period": 9, "reference_queries": 20},
    "am with omp": {"policy": "am", "budget": 16, "window": 4, "period": 9, "select": "omp", "reference_queries": 20},
    "clustered": PAGES,
    "clustered by attention": {**PAGES, "compressor": "attention"},
    "layered": {"policy": "layered", "parts": [{"layers": 1, "cache": PAGES}, {"layers": 1, "cache": GKV}]},
    "layered, pages last": {"policy": "layered", "parts": [{"layers": 1, "cache": GKV}, {"layers": 1, "cache": PAGES}]},
}


@pytest.fixture(scope="module")
def model(new_model: Callable) -> PreTrainedModel:
    return windowed_model(new_model)


def check_exactness(
    model: Any, policy: Policy | dict[str, Any], prompts: list[list[int]], record_property: Callable
) -> list[Rollout]:
    """Check that the gaps of replay are at most 1e-5, and so are those of the dense reference, which replays no pages.
    Under wrong windows, the gap must be at least 0.1. Returns the rollouts.
    """
    rollouts = make_engine("hf", model=model, policy=policy).generate(prompts, SAMPLING)
    assert all(r.trace.windows == WINDOWS for r in rollouts)
    with torch.no_grad():
        assert gap(replay_logprobs(model, rollouts), rollouts) <= 1e-5
        if "opened" in rollouts[0].trace.further:
            assert gap(replay_logprobs(model, rollouts, attention_kernel="dense"), rollouts) <= 1e-5
        else:
            dense = [dense_logprobs(model, r.prompt_ids, r.completion_ids, r.trace) for r in rollouts]
            assert gap(dense, rollouts) <= 1e-5
        for name, wrong in wrong_windows(rollouts).items():
            if name in ("window + 1", "window - 1", "windows as global layers"):
                wrong_gap = gap(replay_logprobs(model, wrong), rollouts)
                record_property(name, wrong_gap)
                assert wrong_gap >= 0.1, name
    return rollouts


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.few(3)
def test_policies_with_fits_and_pages(
    name: str, model: PreTrainedModel, prompts_of: Callable, record_property: Callable
) -> None:
    rollouts = check_exactness(model, POLICIES[name], prompts_of("gemma3_text", LENGTHS), record_property)
    sections = rollouts[-1].trace.further
    if name.startswith("am"):
        assert len(sections["refit_at"]) > 1
    else:
        assert sections["opened"].shape[0] == len(GLOBAL)
        assert bool((sections["opened"] >= 0).any())


@pytest.mark.parametrize("prefill", ["dense", "masked"])
@pytest.mark.parametrize("scorer", ["linear", "delayed", "immediate"])
@pytest.mark.few(3)
def test_learned_scores(
    scorer: str, prefill: str, model: PreTrainedModel, prompts_of: Callable, record_property: Callable
) -> None:
    """Each global layer has a scorer. Decoding decides as in training. Control: with the scorers of the other layer,
    fewer decisions agree.
    """
    policy = learned_policy(scorer, budget=14, prefill=prefill)
    learned = with_scorers(model, policy)
    assert len(learned.cache_scorers) == len(GLOBAL)
    rollouts = check_exactness(learned, policy, prompts_of("gemma3_text", LENGTHS), record_property)
    right = decisions_agree(learned, policy.config, rollouts)
    learned.cache_scorers = torch.nn.ModuleList(list(learned.cache_scorers)[::-1])
    wrong = decisions_agree(learned, policy.config, rollouts)
    assert right > 0.999
    assert wrong < 0.99


@pytest.mark.parametrize("prefill", ["dense", "masked"])
def test_gates(prefill: str, model: PreTrainedModel, prompts_of: Callable, record_property: Callable) -> None:
    policy = make_policy("dms", window=5, sinks=2, bias=0.1, scorer={"name": "mlp"}, prefill=prefill)
    rollouts = check_exactness(with_scorers(model, policy), policy, prompts_of("gemma3_text", LENGTHS), record_property)
    assert bool((rollouts[-1].trace.policy_part().evict_at < NEVER).any())


@pytest.mark.skipif(importlib.util.find_spec("kvpress") is None, reason="kvpress is not installed")
@pytest.mark.parametrize(
    ("press", "options"), [("SnapKVPress", {"window_size": 8}), ("KeyDiffPress", {}), ("TOVAPress", {})]
)
def test_presses(
    press: str, options: dict, new_model: Callable, prompts_of: Callable, record_property: Callable
) -> None:
    """A press halves the prompt in the global layers."""
    model = windowed_model(new_model)  # binding a press adds hooks to the model
    policy, prompts = make_policy("press", press=press, options=options), prompts_of("gemma3_text", (25, 40, 60))
    for r in check_exactness(model, policy, prompts, record_property):
        evict_at = r.trace.policy_part().evict_at
        assert bool(((evict_at < NEVER).sum(-1) == len(r.prompt_ids) - len(r.prompt_ids) // 2).all())


def test_spans_of_layers_count_global_layers(model: PreTrainedModel, prompts_of: Callable) -> None:
    """Of 4 layers, two are global. The first part has layer 1 of the model, and the second part has layer 3."""
    parts = [{"layers": 1, "cache": GKV}, {"layers": 1, "cache": "full"}]
    engine = make_engine("hf", model=model, policy={"policy": "layered", "parts": parts})
    (r,) = engine.generate(prompts_of("gemma3_text", [60]), SAMPLING)
    evicted = (r.trace.evict_at < NEVER).any(-1).any(-1)
    assert evicted.tolist() == [True, True, True, False]
    assert int((r.trace.evict_at[1] == NEVER).sum(-1).max()) < 60
