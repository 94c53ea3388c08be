"""Attention Matching (AM) fits biases and new values to the kept entries at each compaction. The trainer repeats these
fits from the trace: its replay is exact in every model and any batch, has the right gradients, and refuses traces and
settings that it cannot replay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from judging import gap, gradients, weighted_sum
from solving import least_squares
from transformers import PreTrainedModel

from rollout import Rollout, SamplingConfig, make_engine
from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.attention.logprobs import dense_logprobs, replay_logprobs
from sparse_rl.attention.views.dense import DenseView
from sparse_rl.attention.views.factory import make_view
from sparse_rl.attention.views.replay import ReplayView
from sparse_rl.data.running_sum import rows
from sparse_rl.methods.am.view import MatchedView
from sparse_rl.models.directory import model_directory
from sparse_rl.models.load import load_tokenizer
from sparse_rl.trace import EvictionTrace, TraceError, batch_traces, load_traces, pack_traces, save_traces

LENGTHS = (1, 5, 23, 24, 41, 60, 150)
CACHE = {"policy": "am", "budget": 16, "sinks": 1, "window": 4, "period": 8, "reference_queries": 20}
SAMPLING = SamplingConfig(max_tokens=60, seed=1, ignore_eos=True)
SETTINGS = {"sinks": 0, "window": 1, "refitted": 2, "queries": 3, "ridge": 4}  # positions in refit_with


@pytest.fixture
def sampled(model_of: Callable, prompts_of: Callable) -> Callable[..., tuple]:
    """sampled(model name, prompt lengths, **changes of CACHE) -> (model, rollouts sampled under AM)."""

    def make(name: str, lengths: Sequence[int] = LENGTHS, **changed: object) -> tuple:
        model = model_of(name)
        engine = make_engine("hf", model=model, policy={**CACHE, **changed})
        return model, engine.generate(prompts_of(name, lengths), SAMPLING)

    return make


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
    ],
    ids=lambda changed: "-".join(map(str, changed)) or "as it is",
)
@pytest.mark.parametrize("name", ["qwen2", pytest.param("quickstart", marks=pytest.mark.slow), "llama", "stories260K"])
@pytest.mark.few(6)
def test_trainer_recomputes_the_biases_and_values_of_the_sampler(
    name: str, changed: dict, sampled: Callable, tally: Callable
) -> None:
    """A trace records the evictions and the settings of the fit, but no bias or value. The trainer recomputes these,
    and its log-probs equal the sampler's up to 1e-5, in one batch and in batches of 2.
    """
    model, rollouts = sampled(name, **changed)
    with torch.no_grad():
        own_gap = gap(replay_logprobs(model, rollouts), rollouts)
        tally("am", gap=own_gap)
        assert own_gap <= 1e-5
        assert gap(replay_logprobs(model, rollouts, batch_size=2), rollouts) <= 1e-5


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
    select: str, equations: int, monkeypatch: pytest.MonkeyPatch, sampled: Callable, tally: Callable
) -> None:
    """A fit of 19 entries (the budget without window and sink) to 10 or 16 equations is underdetermined, but replay is
    still accurate: for a trainer that rounds differently than the sampler (`rescaled`), the gap is at most 3 times its
    gap under a full cache. Control: with least squares without a ridge, the gap is over 100 times that under a full
    cache.
    """
    fitted = {"budget": 28, "window": 8, "period": 16, "reference_queries": equations // 2, "select": select}
    lengths = (5, 41, 150)
    model, rollouts = sampled("stories260K", lengths, **fitted)  # two query heads share a kv head
    other = rescaled(model)
    full = make_engine("hf", model=model, policy="full").generate([r.prompt_ids for r in rollouts], SAMPLING)
    with torch.no_grad():
        own_gap, noise = gap(replay_logprobs(model, rollouts), rollouts), gap(replay_logprobs(other, full), full)
        tally("am", gap=own_gap)
        assert own_gap <= 1e-5
        assert 0 < gap(replay_logprobs(other, rollouts), rollouts) <= 3 * noise
        if select == "omp" and equations < 19:
            monkeypatch.setattr("sparse_rl.matching.block.pursuit_weights", least_squares)  # control
            model, rollouts = sampled("stories260K", lengths, **fitted)
            assert gap(replay_logprobs(other, rollouts), rollouts) > 100 * noise


@pytest.mark.parametrize("name", ["quickstart", pytest.param("stories260K", marks=pytest.mark.slow)])
def test_control_wrong_traces_give_a_large_gap(name: str, sampled: Callable) -> None:
    """Each change of the recorded traces below moves some log-prob by more than 1e-2."""
    model, rollouts = sampled(name)
    further = [r.trace.further for r in rollouts]
    changed = {
        "evict_at alone": [replace(r, trace=EvictionTrace(r.trace.evict_at)) for r in rollouts],
        "values not refitted": with_fit_settings(rollouts, ridge=1e9),
        "one reference query fewer": with_fit_settings(rollouts, queries=19),
        "heads swapped": [
            replace(r, trace=EvictionTrace(r.trace.evict_at.roll(1, dims=1), f))
            for r, f in zip(rollouts, further, strict=True)
        ],
    }
    with torch.no_grad():
        for change, altered in changed.items():
            assert gap(replay_logprobs(model, altered), altered) > 1e-2, change


def test_control_a_trainer_without_biases_has_a_large_gap(sampled: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rollouts = sampled("quickstart")
    from sparse_rl.matching import refit

    def without(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        bias, values = refit(*args)  # type: ignore[arg-type]
        return torch.zeros_like(bias), values

    monkeypatch.setattr("sparse_rl.methods.am.view.refit", without)
    with torch.no_grad():
        assert gap(replay_logprobs(model, rollouts), rollouts) > 1e-2


@pytest.mark.slow
def test_fits_hardly_amplify_rounding(sampled: Callable, model_of: Callable, prompts_of: Callable) -> None:
    """A relative change of 1e-6 in all weights moves log-probs at most 1.5 times as far under AM as under plain
    eviction (G-KV).
    """

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


def test_gradients_of_replay_equal_those_of_the_dense_reference(sampled: Callable) -> None:
    """Replay attends segment by segment (tokens between two compactions), with padding and recomputation. The dense
    reference attends once, under a mask, to all tokens and to a separate entry for each fit of each token.
    """
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
def test_gradients_equal_finite_differences(seed: int, model_of: Callable) -> None:
    """In float64, the slope of a loss along a random direction of all weights is the same by gradients and by finite
    differences. Control: with gradients that do not flow through the fits, the slope differs.
    """
    model, tokenizer = model_of("quickstart"), load_tokenizer(str(model_directory("quickstart/model")))
    (row,) = rows("evaluation", 1, 0)
    engine = make_engine("hf", model=model, policy=CACHE)
    (rollout,) = engine.generate([tokenizer(row["prompt"])["input_ids"]], SAMPLING)
    model = adopt(copy.deepcopy(model).double())
    generator = torch.Generator().manual_seed(seed)
    directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64) * p.std() for p in model.parameters()]
    ids = torch.tensor([*rollout.prompt_ids, *rollout.completion_ids])[1:, None]

    def loss(through: bool = True) -> torch.Tensor:
        return all_logprobs(model, rollout, through).gather(-1, ids)[40:].sum()

    def slope(through: bool) -> float:
        model.zero_grad()
        loss(through).backward()
        return sum(float((p.grad * d).detach().sum()) for p, d in zip(model.parameters(), directions, strict=True))

    def loss_at(by: float) -> float:
        """Return the loss after a step of size `by` along the direction."""
        with torch.no_grad():
            for p, d in zip(model.parameters(), directions, strict=True):
                p.add_(by * d)
            value = float(loss())
            for p, d in zip(model.parameters(), directions, strict=True):
                p.sub_(by * d)
        return value

    near, far = ((loss_at(by) - loss_at(-by)) / (2 * by) for by in (5e-4, 1e-3))
    finite_difference = (4 * near - far) / 3  # Richardson extrapolation
    assert slope(True) == pytest.approx(finite_difference, rel=1e-3)
    assert slope(False) != pytest.approx(finite_difference, rel=2e-2)  # control


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.few(1)
def test_replay_does_not_depend_on_padding(side: str, sampled: Callable) -> None:
    """With padding on the left, on the right or on both sides, log-probs equal the sampler's up to 1e-5."""
    model, rollouts = sampled("qwen3")
    width = max(len(r.trace) for r in rollouts) + 3
    start_for = {"left": lambda n: width - n, "right": lambda n: 0, "both": lambda n: (width - n) // 2}[side]
    ids, positions = torch.ones(len(rollouts), width, dtype=torch.long), torch.zeros(len(rollouts), width).long()
    starts = []
    for row, r in enumerate(rollouts):
        start = start_for(len(r.trace))
        starts.append(start)
        ids[row, start : start + len(r.trace)] = torch.tensor([*r.prompt_ids, *r.completion_ids])
        positions[row, start : start + len(r.trace)] = torch.arange(len(r.trace))
    view = make_view([r.trace for r in rollouts], starts, width, "cpu")
    with torch.no_grad():
        logits = model(
            input_ids=ids, position_ids=positions, attention_mask=NO_MASK, kv_view=view, use_cache=False
        ).logits
        assert logits.isfinite().all()
        for row, (r, start) in enumerate(zip(rollouts, starts, strict=True)):
            logprobs = logits[row, start : start + len(r.trace) - 1].log_softmax(-1)
            ours = logprobs.gather(-1, torch.tensor([*r.prompt_ids, *r.completion_ids])[1:, None])[:, 0]
            assert gap([ours[len(r.prompt_ids) - 1 :]], [r]) <= 1e-5


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_only_the_matched_view_replays_traces_with_fits(sampled: Callable) -> None:
    """`make_view` chooses MatchedView for a trace with fits. ReplayView, which would ignore the fits, refuses
    the trace. Several such traces cannot be packed.
    """
    _, rollouts = sampled("qwen3")
    trace = rollouts[0].trace
    assert isinstance(make_view([trace], [0], len(trace), "cpu"), MatchedView)
    assert isinstance(make_view([EvictionTrace(trace.evict_at)], [0], len(trace), "cpu"), ReplayView)
    with pytest.raises(TraceError, match="ReplayView cannot replay the section 'refit_at'"):
        ReplayView(batch_traces([trace], [0], len(trace)), "cpu")
    with pytest.raises(TraceError, match="cannot be packed"):
        pack_traces([trace, trace])
    assert pack_traces([trace]).sections.keys() == trace.sections.keys()


def test_fit_records_that_contradict_the_evictions_are_refused(sampled: Callable, tmp_path) -> None:
    """`refit_at` holds the positions of the compactions, `refit_with` the settings of the fit. Wrong values are
    refused. Control: correct records survive saving and loading.
    """
    _, rollouts = sampled("qwen3")
    trace, other = rollouts[0].trace, rollouts[3].trace
    compactions, settings = trace.further["refit_at"], trace.further["refit_with"]

    def trace_with(**further: torch.Tensor) -> EvictionTrace:
        return EvictionTrace(trace.evict_at, {**trace.further, **further})

    with pytest.raises(TraceError, match=r"but refit_at .* has no compaction"):
        trace_with(refit_at=compactions[1:])
    with pytest.raises(TraceError, match="is not ascending from 1"):
        trace_with(refit_at=compactions.flip(0))
    with pytest.raises(TraceError, match="is not ascending from 1"):
        trace_with(refit_at=torch.cat([compactions, torch.tensor([10**6], dtype=torch.int32)]))
    with pytest.raises(TraceError, match="is not a valid list of fit settings"):
        trace_with(refit_with=settings[:3])
    with pytest.raises(TraceError, match="settings differ between the traces"):
        (altered,) = with_fit_settings([rollouts[3]], ridge=0.5)
        batch_traces([trace, altered.trace], [0, 0], 300)
    with pytest.raises(TraceError, match="cannot be replayed; use `fit: ridge`"):
        papers_fit = settings.clone()
        papers_fit[6] = 1  # the fit of the paper, without a ridge
        DenseView(trace_with(refit_with=papers_fit))
    wrong_settings = settings.clone()
    wrong_settings[SETTINGS["refitted"]] = 10
    with pytest.raises(TraceError, match=r"compaction at .* leaves 16 entries in layer 0, kv head 0, .* 1 \+ 10 \+ 4"):
        trace_with(refit_with=wrong_settings)
    path = tmp_path / "t.safetensors"
    save_traces(path, [trace, other])
    loaded = load_traces(path)
    assert all(torch.equal(loaded[1].sections[name], other.sections[name]) for name in other.sections)
