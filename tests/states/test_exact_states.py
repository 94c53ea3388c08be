"""The invariant in hybrid models: attention under eviction beside layers with a state, in every family and policy.

Controls: wrong traces, padding that enters a state, and two sequences that share one are far from the sampler.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from dense_matched import dense_logprobs
from eager import plain_logprobs, sampled_logprobs
from hybrid import VARIANTS, build, hybrid, packed_logprobs, padded_logprobs, prompts
from judging import gap, gradients, outcome, trainer_gap, weighted_sum, wrong_routes, wrong_traces
from learned import learned_policy, with_scorers
from policy_cases import PAGED, SAMPLED
from tiny import policy_of

from rollout import Rollout, SamplingConfig, make_engine
from rollout.engine import Turn
from sparse_rl.attention import compute_exactly
from sparse_rl.attention.families import HYBRID, cache_shape
from sparse_rl.attention.interface import adopt
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.experts import has_experts
from sparse_rl.methods.kvpop.config import BoundaryConfig, TargetConfig
from sparse_rl.methods.kvpop.view import decisions_agree
from sparse_rl.models.load import head_of
from sparse_rl.states.mixers import MIXERS
from sparse_rl.trace import TraceError
from trainer.batch import Batch, Example
from trainer.losses import ScorerLoss

LENGTHS = (1, 2, 5, 9, 17, 30, 9)
MIXED = [
    {"layers": 1, "cache": {"policy": "lined", "window": 8, "period": 4}},
    {"layers": 1, "cache": {"policy": "clustered", "page": 4, "window": 8, "open_pages": 2}},
]
QUICK_NAMES = [name for name in VARIANTS if name not in ("qwen3_next", "granite_nope", "granite_rope")]
SETTINGS = {"budget": 12, "window": 4, "period": 4, "page": 4, "open_pages": 2, "sinks": 1, "parts": MIXED}
POLICIES = [name for name in (*SAMPLED, *PAGED) if name != "full"]
OFTEN = cycle(("gkv", "streaming", "h2o", "lined", "am", "clustered", "rkv", "layered"))
QUICK = {name: next(OFTEN) for name in QUICK_NAMES}  # in `make test`; all other cases are slow tests


def sampled(
    name: str, policy: str, n: int = 1, lengths: Sequence[int] = (1, 5, 60), seed: int = 1, **options: Any
) -> list[Rollout]:
    engine = make_engine("hf", model=hybrid(name), policy=policy_of(policy, **SETTINGS), max_batch=8)
    return engine.generate(prompts(*lengths), SamplingConfig(max_tokens=36, n=n, seed=seed, **options))


def some_ended(name: str, policy: str) -> list[Rollout]:
    """Return rollouts of the first seed with which some rows end early, and some do not."""
    of_seeds = (sampled(name, policy, 2, LENGTHS, seed) for seed in range(1, 9))
    return next(rollouts for rollouts in of_seeds if {r.finish_reason for r in rollouts} == {"stop", "length"})


def test_each_family_has_a_mixer_and_a_tiny_model() -> None:
    assert set(HYBRID) == set(MIXERS) == {settings.get("model_type", name) for name, settings in VARIANTS.items()}


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy, marks=[] if QUICK.get(name) == policy else [pytest.mark.slow])
        for name in VARIANTS
        for policy in POLICIES
    ],
)
@torch.no_grad()
def test_replay_equals_sampling(name: str, policy: str, tally) -> None:
    """Prompts of 1 to 30 tokens, two samples each, rows that end early. Controls: wrong traces and experts."""
    model, rollouts = hybrid(name), some_ended(name, policy)
    assert rollouts[0].trace.layers == 2 == cache_shape(model.config)[0]
    own = gap(replay_logprobs(model, rollouts), rollouts)
    tally(policy, gap=own)
    assert own <= 1e-5
    if has_experts(model):
        for wrong in wrong_routes(rollouts, 8).values():
            assert trainer_gap(model, wrong) >= 0.1
    if policy in ("gkv", "streaming"):
        for kind, wrong in wrong_traces(rollouts).items():
            assert trainer_gap(model, wrong) >= (0.8 if kind == "causal" else 0.3), kind


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.few(2)
@torch.no_grad()
def test_a_kept_conversation_keeps_its_states(name: str) -> None:
    """Three turns, in which what is read in between has different lengths. Control: states of a turn earlier."""
    model = hybrid(name)
    engine = make_engine("hf", model=model, policy=policy_of("gkv", **SETTINGS), max_batch=8)
    sampling = SamplingConfig(max_tokens=8, seed=1, ignore_eos=True)
    first = engine.converse([Turn(tokens, 8) for tokens in prompts(2, 5, 21)], sampling)
    second = engine.converse([Turn(p, 8, h) for p, (_, h) in zip(prompts(9, 1, 4), first, strict=True)], sampling)
    third = engine.converse([Turn(p, 8, h) for p, (_, h) in zip(prompts(3, 17, 6), second, strict=True)], sampling)
    rollouts = [rollout for rollout, _ in third]
    assert gap(replay_logprobs(model, rollouts), rollouts) <= 1e-5
    for (_, held), (_, early) in zip(second, first, strict=True):
        held.cache.states = early.cache.states
    wrong = engine.converse([Turn(p, 8, h) for p, (_, h) in zip(prompts(3, 17, 6), second, strict=True)], sampling)
    assert gap(replay_logprobs(model, [r for r, _ in wrong]), [r for r, _ in wrong]) >= 0.1  # control


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.few(3)
@torch.no_grad()
def test_padded_and_packed_rows_equal_the_sampler(name: str) -> None:
    """Controls: padding that enters a state, and documents that share one."""
    model, rollouts = hybrid(name), sampled(name, "gkv", ignore_eos=True)
    assert gap(padded_logprobs(model, rollouts), rollouts) <= 1e-5
    assert gap(packed_logprobs(model, rollouts), rollouts) <= 1e-5
    assert gap([dense_logprobs(model, r.prompt_ids, r.completion_ids, r.trace) for r in rollouts], rollouts) <= 1e-5
    assert gap(padded_logprobs(model, rollouts, let_in=True), rollouts) >= (1.0 if name == "lfm2" else 3)  # control
    assert gap(packed_logprobs(model, rollouts, together=True), rollouts) >= (1.0 if name == "lfm2" else 1.9)  # control


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.few(3)
def test_gradients_of_padded_packed_and_checkpointed_rows_equal_those_of_each_sequence(name: str) -> None:
    """Control: padding that enters a state changes the gradient."""
    rollouts, model = sampled(name, "gkv", ignore_eos=True), adopt(build(name))

    def dense() -> list[torch.Tensor]:
        return [dense_logprobs(model, r.prompt_ids, r.completion_ids, r.trace) for r in rollouts]

    alone = gradients(model, weighted_sum(dense()))

    def off(logprobs: list[torch.Tensor]) -> float:
        return float((gradients(model, weighted_sum(logprobs)) - alone).norm() / alone.norm())

    assert off(padded_logprobs(model, rollouts)) <= 1e-6
    assert off(packed_logprobs(model, rollouts)) <= 1e-6
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert off(padded_logprobs(model, rollouts)) <= 1e-6
    assert off(packed_logprobs(model, rollouts)) <= 1e-6
    assert off(padded_logprobs(model, rollouts, let_in=True)) >= 0.1  # control


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "granite_nope"])
@pytest.mark.few(1)
def test_a_prompt_is_sampled_alike_alone_and_in_a_batch(name: str) -> None:
    """Bit for bit, also if its row ends before others. Control: another seed gives other tokens."""
    engine = make_engine("hf", model=hybrid(name), policy=policy_of("gkv", **SETTINGS), max_batch=32)
    sampling = SamplingConfig(max_tokens=24, n=2, seed=1)
    together = engine.generate(prompts(2, 5, 30, 9), sampling)
    alone = engine.generate(prompts(2), sampling)
    assert outcome(alone) == outcome(together[:2])
    assert outcome(alone) != outcome(engine.generate(prompts(2), SamplingConfig(max_tokens=24, n=2, seed=2)))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.few(3)
@torch.no_grad()
def test_a_full_cache_is_as_exact_as_transformers(name: str) -> None:
    """The mean distance from float64 is at most 1.1 times that of transformers' eager attention and own functions."""
    engine = make_engine("hf", model=hybrid(name), policy="full")
    rollouts = engine.generate(prompts(2, 5, 30), SamplingConfig(max_tokens=60, seed=1, ignore_eos=True))
    exact = replay_logprobs(adopt(build(name).double()), rollouts)
    ours, theirs = (
        [float((a - b).abs().mean()) for a, b in zip(exact, computed, strict=True)]
        for computed in (sampled_logprobs(rollouts), [plain_logprobs(build(name), r) for r in rollouts])
    )
    assert 0 < sum(ours) <= 1.1 * sum(theirs)
    assert sum(theirs) <= 1e-4  # of the same computation


def test_copies_have_their_own_mixers_and_weights() -> None:
    """A deep copy does not compute with the first model's weights. Control: the copy's own weights change it."""
    model, rollouts = build("qwen3_next"), sampled("qwen3_next", "gkv")
    adopt(model)
    twin = adopt(copy.deepcopy(model))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "linear_attn" in name:
                weight.zero_()
    assert trainer_gap(twin, rollouts) <= 1e-5
    assert trainer_gap(model, rollouts) >= 0.1  # control
    assert adopt(twin) is twin
    layer = twin.get_decoder().layers[0]
    assert len(layer._forward_pre_hooks) == 1, "a second adoption adds no hook"


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "bamba"])
@pytest.mark.few(2)
def test_transformers_own_functions_are_the_control_of_ours(name: str) -> None:
    """`rollout.exact: false` takes transformers' functions: near, but in another order of summation."""
    rollouts = sampled(name, "gkv")
    try:
        compute_exactly(False)
        own = sampled(name, "gkv")
        assert trainer_gap(hybrid(name), own) <= 1e-3
    finally:
        compute_exactly(True)
    assert trainer_gap(hybrid(name), rollouts) <= 1e-6
    assert outcome(own) != outcome(rollouts)


@pytest.mark.parametrize("scorer", ["mlp", pytest.param("delayed", marks=pytest.mark.slow)])
def test_learned_policies_decide_in_sampler_and_trainer_alike(scorer: str) -> None:
    """The view of a learned policy says where sequences begin. Control: one that does not is refused."""
    policy = learned_policy(scorer, 12, window=4)
    model = with_scorers(build("qwen3_next"), policy)
    rollouts = make_engine("hf", model=model, policy=policy).generate(
        prompts(4, 11, 28), SamplingConfig(24, seed=1, ignore_eos=True)
    )
    assert trainer_gap(model, rollouts) <= 1e-5
    assert decisions_agree(model, policy.config, rollouts) >= 0.999
    batch = Batch.make([Example.from_rollout(r) for r in rollouts], torch.device("cpu"))
    loss = ScorerLoss(policy.config, TargetConfig(), BoundaryConfig(queries=8))
    with torch.no_grad():
        view = loss.view(model, *batch.sizes(), batch.ids.shape[1], kernel="gather")
        assert view.states.spans == [(row, 0, len(r.trace)) for row, r in enumerate(rollouts)]
        logits = head_of(model)(batch.hidden_under(model, view))
        logprobs = logits.log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]
        assert gap(list(logprobs.split([len(r.completion_ids) for r in rollouts])), rollouts) <= 1e-5
        view = loss.view(model, *batch.sizes(), batch.ids.shape[1], kernel="gather")
        view.states = None
        with pytest.raises(TraceError, match="LearnedView does not say where sequences begin"):
            batch.hidden_under(model, view)  # control


@pytest.mark.slow
@pytest.mark.parametrize(("name", "control"), [("qwen3_next", 2048), ("granite_nope", 1024)])
def test_long_completions_are_exact(name: str, control: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 tokens. Control: transformers' own functions exceed the bound, after fewer."""
    engine = make_engine("hf", model=hybrid(name), policy=policy_of("gkv", budget=64, window=8, period=32))

    def gap_of(tokens: int) -> float:
        sampling = SamplingConfig(max_tokens=tokens, seed=1, ignore_eos=True)
        return trainer_gap(hybrid(name), engine.generate(prompts(9, 70, 33, 50), sampling))

    assert gap_of(4096) <= 1e-5
    monkeypatch.setattr(MIXERS[VARIANTS[name].get("model_type", name)][1], "functions", lambda mixer, exact: {})
    assert gap_of(control) > 1e-5
