"""Policies that tests/test_exactness.py does not sample, on models whose layers have sliding windows. Policies act on
the other layers, the global layers, which they count from 0.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from dense_matched import dense_logprobs
from judging import gap, trainer_gap, wrong_windows
from learned import learned_policy, with_scorers
from tiny import prompts_of
from windowed import GLOBAL, WINDOWS, model, windowed_model

from rollout import Rollout, SamplingConfig, make_engine
from sparse_rl.methods.kvpop.view import decisions_agree
from sparse_rl.policies import Policy, make_policy
from sparse_rl.trace import NEVER

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


def check_exactness(model: Any, policy: Policy | dict[str, Any], prompts: list[list[int]]) -> list[Rollout]:
    """Check that the gaps of replay and dense reference are at most 1e-5, and at least 0.1 under wrong windows."""
    rollouts = make_engine("hf", model=model, policy=policy).generate(prompts, SAMPLING)
    assert all(r.trace.windows == WINDOWS for r in rollouts)
    with torch.no_grad():
        assert trainer_gap(model, rollouts) <= 1e-5
        if "opened" in rollouts[0].trace.further:
            assert trainer_gap(model, rollouts, attention_kernel="dense") <= 1e-5
        else:
            dense = [dense_logprobs(model, r.prompt_ids, r.completion_ids, r.trace) for r in rollouts]
            assert gap(dense, rollouts) <= 1e-5
        for name, wrong in wrong_windows(rollouts).items():
            if name in ("window + 1", "window - 1", "windows as global layers"):
                assert trainer_gap(model, wrong) >= 0.1, name
    return rollouts


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.few(3)
def test_policies_with_fits_and_pages(name: str) -> None:
    rollouts = check_exactness(model(), POLICIES[name], prompts_of("gemma3_text", LENGTHS))
    sections = rollouts[-1].trace.further
    if name.startswith("am"):
        assert len(sections["refit_at"]) > 1
    else:
        assert sections["opened"].shape[0] == len(GLOBAL)
        assert bool((sections["opened"] >= 0).any())


@pytest.mark.parametrize("prefill", ["dense", "masked"])
@pytest.mark.parametrize("scorer", ["linear", "delayed", "immediate"])
@pytest.mark.few(3)
def test_learned_scores(scorer: str, prefill: str) -> None:
    """Decoding decides as in training. Control: the scorers of the other layer."""
    policy = learned_policy(scorer, budget=14, prefill=prefill)
    learned = with_scorers(model(), policy)
    assert len(learned.cache_scorers) == len(GLOBAL)
    rollouts = check_exactness(learned, policy, prompts_of("gemma3_text", LENGTHS))
    right = decisions_agree(learned, policy.config, rollouts)
    learned.cache_scorers = torch.nn.ModuleList(list(learned.cache_scorers)[::-1])
    wrong = decisions_agree(learned, policy.config, rollouts)
    assert right > 0.999
    assert wrong < 0.99


@pytest.mark.parametrize("prefill", ["dense", "masked"])
def test_gates(prefill: str) -> None:
    policy = make_policy("dms", window=5, sinks=2, bias=0.1, scorer={"name": "mlp"}, prefill=prefill)
    rollouts = check_exactness(with_scorers(model(), policy), policy, prompts_of("gemma3_text", LENGTHS))
    assert bool((rollouts[-1].trace.policy_part().evict_at < NEVER).any())


@pytest.mark.skipif(importlib.util.find_spec("kvpress") is None, reason="kvpress is not installed")
@pytest.mark.parametrize(
    ("press", "options"), [("SnapKVPress", {"window_size": 8}), ("KeyDiffPress", {}), ("TOVAPress", {})]
)
def test_presses(press: str, options: dict) -> None:
    """A press halves the prompt in the global layers."""
    model = windowed_model()  # binding a press adds hooks to the model
    policy, prompts = make_policy("press", press=press, options=options), prompts_of("gemma3_text", (25, 40, 60))
    for r in check_exactness(model, policy, prompts):
        evict_at = r.trace.policy_part().evict_at
        assert bool(((evict_at < NEVER).sum(-1) == len(r.prompt_ids) - len(r.prompt_ids) // 2).all())


def test_spans_of_layers_count_global_layers() -> None:
    """Of 4 layers, two are global: layer 1 has the first part, layer 3 the second."""
    parts = [{"layers": 1, "cache": GKV}, {"layers": 1, "cache": "full"}]
    engine = make_engine("hf", model=model(), policy={"policy": "layered", "parts": parts})
    (r,) = engine.generate(prompts_of("gemma3_text", [60]), SAMPLING)
    evicted = (r.trace.evict_at < NEVER).any(-1).any(-1)
    assert evicted.tolist() == [True, True, True, False]
    assert int((r.trace.evict_at[1] == NEVER).sum(-1).max()) < 60
