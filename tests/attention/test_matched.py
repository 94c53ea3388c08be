"""Attention Matching fits biases and new values at each compaction. The trainer repeats these fits from the trace: its
replay is exact in any batch, has the right gradients, and refuses what it cannot replay."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from dense_matched import DenseMatchedView, dense_logprobs
from judging import check_slope, gradients, padded_gap, trainer_gap, weighted_sum
from solving import least_squares
from tiny import model_of, prompts_of
from transformers import PreTrainedModel

from rollout import Rollout, SamplingConfig, make_engine
from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.attention.views import ReplayView, make_view
from sparse_rl.data.synthetic import RunningSum
from sparse_rl.matching import refit
from sparse_rl.methods.am.view import MatchedView
from sparse_rl.models.directory import model_directory
from sparse_rl.models.load import load_tokenizer
from sparse_rl.trace import EvictionTrace, TraceError, batch_traces, load_traces, pack_traces, save_traces

LENGTHS = (1, 5, 23, 24, 41, 60, 150)
CACHE = {"policy": "am", "budget": 16, "sinks": 1, "window": 4, "period": 8, "reference_queries": 20}
BUDGETS = {"12 to 30": {"tokens": [20, 70], "entries": [12, 30]}, "always 16": {"tokens": [0], "entries": [16]}}
SAMPLING = SamplingConfig(max_tokens=60, seed=1, ignore_eos=True)
SETTINGS = {"sinks": 0, "window": 1, "refitted": 2, "queries": 3, "ridge": 4}  # positions in refit_with


@cache
def sampled(name: str, lengths: Sequence[int] = LENGTHS, **changed: object) -> tuple:
    """Return (model, rollouts sampled under AM)."""
    model, changed = model_of(name), {k: BUDGETS.get(v, v) for k, v in changed.items()}
    engine = make_engine("hf", model=model, policy={**CACHE, **changed})
    return model, engine.generate(prompts_of(name, lengths), SAMPLING)


def with_fit_settings(rollouts: list[Rollout], **changed: float) -> list[Rollout]:
    """Return copies of the rollouts whose traces record other settings of the fit than the sampler used."""

    def change(trace: EvictionTrace) -> EvictionTrace:
        settings = trace.further["refit_with"].clone()
        for name, value in changed.items():
            settings[SETTINGS[name]] = value
        return EvictionTrace(trace.evict_at, {**trace.further, "refit_with": settings}, validate=False)

    return [replace(r, trace=change(r.trace)) for r in rollouts]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"select": "omp"},
        {"select": "omp_fast"},
        {"period": 1, "reference_queries": 16},
        {"sinks": 0, "window": 1, "aggregate": "max"},
        {"reference_queries": 5},
        {"budget": "12 to 30"},
    ],
    ids=lambda changed: "-".join(map(str, changed)) or "as it is",
)
@pytest.mark.parametrize("name", ["qwen2", pytest.param("quickstart", marks=pytest.mark.slow), "llama", "stories260K"])
@pytest.mark.few(2)
def test_trainer_recomputes_the_biases_and_values_of_the_sampler(name: str, changed: dict, tally: Callable) -> None:
    """A trace records evictions and settings of the fit alone. Replay is exact in one batch and in batches of 2."""
    model, rollouts = sampled(name, **changed)
    own_gap = trainer_gap(model, rollouts)
    tally("am", gap=own_gap)
    assert own_gap <= 1e-5
    assert trainer_gap(model, rollouts, batch_size=2) <= 1e-5


def rescaled(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model that computes the same function with other rounding: queries and values times 3, keys
    and the output projection divided by 3."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        attention = layer.self_attn
        for three, third in ((attention.q_proj, attention.k_proj), (attention.v_proj, attention.o_proj)):
            three.weight.data.mul_(3.0)
            third.weight.data.div_(3.0)
    return model


@pytest.mark.parametrize(
    ("select", "equations"),
    [
        *(("omp", equations) for equations in (10, 16, 22, 32)),
        ("attention", 10),
        *(pytest.param("attention", equations, marks=pytest.mark.slow) for equations in (16, 22, 32)),
    ],
)
@pytest.mark.few(1)
def test_fits_with_few_equations_are_replayed(
    select: str, equations: int, monkeypatch: pytest.MonkeyPatch, tally: Callable
) -> None:
    """19 entries, 10 or 16 equations: a trainer that rounds differently has at most 3 times its gap under a full cache.
    Control: least squares without a ridge, over 100 times."""
    fitted = {"budget": 28, "window": 8, "period": 16, "reference_queries": equations // 2, "select": select}
    lengths = (5, 60)
    model, rollouts = sampled("stories260K", lengths, **fitted)  # two query heads share a kv head
    other = rescaled(model)
    full = make_engine("hf", model=model, policy="full").generate([r.prompt_ids for r in rollouts], SAMPLING)
    own_gap, noise = trainer_gap(model, rollouts), trainer_gap(other, full)
    tally("am", gap=own_gap)
    assert own_gap <= 1e-5
    assert 0 < trainer_gap(other, rollouts) <= 3 * noise
    if select == "omp" and equations < 19:
        monkeypatch.setattr("sparse_rl.methods.am.match.pursuit_weights", least_squares)  # control
        model, rollouts = sampled.__wrapped__("stories260K", lengths, **fitted)
        assert trainer_gap(other, rollouts) > 100 * noise


@pytest.mark.parametrize("name", ["quickstart", pytest.param("stories260K", marks=pytest.mark.slow)])
def test_control_wrong_traces_and_a_trainer_without_biases_give_a_large_gap(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rollouts = sampled(name)
    changed = {
        "evict_at alone": [replace(r, trace=EvictionTrace(r.trace.evict_at)) for r in rollouts],
        "values not refitted": with_fit_settings(rollouts, ridge=1e9),
        "one reference query fewer": with_fit_settings(rollouts, queries=19),
        "heads swapped": [
            replace(r, trace=EvictionTrace(r.trace.evict_at.roll(1, dims=1), r.trace.further)) for r in rollouts
        ],
    }
    for change, altered in changed.items():
        assert trainer_gap(model, altered) > 1e-2, change

    def without_biases(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        bias, values = refit(*args)
        return torch.zeros_like(bias), values

    monkeypatch.setattr("sparse_rl.methods.am.view.refit", without_biases)
    assert trainer_gap(model, rollouts) > 1e-2


@pytest.mark.slow
def test_fits_hardly_amplify_rounding() -> None:
    """A change of 1e-6 in all weights moves log-probs at most 1.5 times as far as under G-KV."""

    def mean_change(policy: dict) -> float:
        model = model_of("quickstart")
        rollouts = make_engine("hf", model=model, policy=policy).generate(prompts_of("quickstart", LENGTHS), SAMPLING)
        with torch.no_grad():
            before = replay_logprobs(model, rollouts)
            original = {name: weight.clone() for name, weight in model.named_parameters()}
            generator = torch.Generator().manual_seed(0)
            for weight in model.parameters():
                weight.mul_(1 + 1e-6 * torch.randn(weight.shape, generator=generator))
            after = replay_logprobs(model, rollouts)
            for name, weight in model.named_parameters():
                weight.copy_(original[name])
        return float(torch.cat([(a - b).abs() for a, b in zip(after, before, strict=True)]).mean())

    eviction = {**CACHE, "policy": "gkv"}
    del eviction["reference_queries"]
    assert mean_change(CACHE) <= 1.5 * mean_change(eviction)


# ---- gradients ------------------------------------------------------------------------------------------------------


def test_gradients_of_replay_equal_those_of_the_dense_reference() -> None:
    """It attends once, under a mask, to all tokens and to an entry for each fit; replay goes segment by segment."""
    model, rollouts = sampled("qwen3")
    ours = gradients(model, weighted_sum(replay_logprobs(model, rollouts, batch_size=7)))
    dense = [dense_logprobs(model, r.prompt_ids, r.completion_ids, r.trace) for r in rollouts]
    theirs = gradients(model, weighted_sum(dense))
    model.zero_grad()
    assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


def all_logprobs(model: torch.nn.Module, rollout: Rollout, through: bool = True) -> torch.Tensor:
    """Return the replay's log-probs [S - 1, vocabulary]; `through` is True if gradients flow through the fits."""
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    view = make_view([rollout.trace], [0], ids.shape[1], "cpu", through=through)
    return model(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits[0, :-1].log_softmax(-1)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.few(1)
def test_gradients_equal_finite_differences(seed: int) -> None:
    """In float64, along a random direction of all weights. Control: gradients that do not flow through the fits."""
    model, tokenizer = model_of("quickstart"), load_tokenizer(str(model_directory("quickstart/model")))
    (row,) = RunningSum().rows("evaluation", 1, 0)
    engine = make_engine("hf", model=model, policy=CACHE)
    (rollout,) = engine.generate([tokenizer(row["prompt"])["input_ids"]], SAMPLING)
    model = adopt(copy.deepcopy(model).double())
    ids = torch.tensor([*rollout.prompt_ids, *rollout.completion_ids])[1:, None]

    def loss(through: bool) -> torch.Tensor:
        return all_logprobs(model, rollout, through).gather(-1, ids)[40:].sum()

    check_slope(model, loss, seed, 5e-4, control=2e-2)


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.few(1)
def test_replay_does_not_depend_on_padding(side: str) -> None:
    model, rollouts = sampled("qwen3")
    assert padded_gap(model, rollouts, side) <= 1e-5


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_only_the_matched_view_replays_traces_with_fits() -> None:
    """ReplayView would ignore the fits. Several such traces cannot be packed."""
    _, rollouts = sampled("qwen3")
    trace = rollouts[0].trace
    assert isinstance(make_view([trace], [0], len(trace), "cpu").of_policy, MatchedView)
    assert isinstance(make_view([EvictionTrace(trace.evict_at)], [0], len(trace), "cpu").of_policy, ReplayView)
    with pytest.raises(TraceError, match="ReplayView cannot replay the section 'refit_at'"):
        ReplayView(batch_traces([trace], [0], len(trace)), "cpu")
    with pytest.raises(TraceError, match="cannot be packed"):
        pack_traces([trace, trace])
    assert pack_traces([trace]).sections.keys() == trace.sections.keys()


def test_a_budget_that_grows_is_read_from_the_evictions() -> None:
    """A constant written as a growing budget has the same gap. Control: a record in which the kv heads of a compaction
    keep different numbers, or a later one keeps fewer, is refused."""
    model, rollouts = sampled("qwen3", budget="always 16")
    constant = sampled("qwen3")[1]
    for ours, other in zip(rollouts, constant, strict=True):
        assert ours.logprobs == other.logprobs
        assert torch.equal(ours.trace.evict_at, other.trace.evict_at)
    assert trainer_gap(model, rollouts) == trainer_gap(model, constant)
    trace = rollouts[3].trace
    assert trace.further["refit_with"][SETTINGS["refitted"]] == 0
    second = int(trace.further["refit_at"][1])
    for heads in (slice(1), slice(None)):
        evict_at = trace.evict_at.clone()
        for of_head in evict_at[0, heads]:
            of_head[(of_head > second).nonzero()[1:2]] = second
        with pytest.raises(TraceError, match=f"the compaction at {second} leaves 15 entries"):
            EvictionTrace(evict_at, trace.further)


def test_fit_records_that_contradict_the_evictions_are_refused(tmp_path) -> None:
    """`refit_at`: positions; `refit_with`: settings. Control: correct records survive saving and loading."""
    _, rollouts = sampled("qwen3")
    trace, other = rollouts[0].trace, rollouts[3].trace
    compactions, settings = trace.further["refit_at"], trace.further["refit_with"]

    def trace_with(**further: torch.Tensor) -> EvictionTrace:
        return EvictionTrace(trace.evict_at, {**trace.further, **further})

    wrong_settings = settings.clone()
    wrong_settings[SETTINGS["refitted"]] = 10
    for further, message in (
        ({"refit_at": compactions[1:]}, r"but refit_at .* has no compaction"),
        ({"refit_at": compactions.flip(0)}, "is not ascending from 1"),
        ({"refit_at": torch.cat([compactions, torch.tensor([10**6]).int()])}, "is not ascending from 1"),
        ({"refit_with": settings[:3]}, "is not a valid list of fit settings"),
        ({"refit_with": wrong_settings}, r"compaction at .* leaves 16 entries in layer 0, kv head 0, .* 1 \+ 10 \+ 4"),
    ):
        with pytest.raises(TraceError, match=message):
            trace_with(**further)
    with pytest.raises(TraceError, match="settings differ between the traces"):
        (altered,) = with_fit_settings([rollouts[3]], ridge=0.5)
        batch_traces([trace, altered.trace], [0, 0], 300)
    with pytest.raises(TraceError, match="cannot be replayed; use `fit: ridge`"):
        papers_fit = settings.clone()
        papers_fit[6] = 1  # the fit of the paper, without a ridge
        DenseMatchedView(trace_with(refit_with=papers_fit))
    path = tmp_path / "t.safetensors"
    save_traces(path, [trace, other])
    loaded = load_traces(path)
    assert all(torch.equal(loaded[1].sections[name], other.sections[name]) for name in other.sections)
