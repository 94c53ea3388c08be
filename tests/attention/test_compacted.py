"""Completions after a context that Attention Matching compacted once are replayed exactly from their traces if the
reference queries are those of the context's own tokens. All other compactions are refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_matched import dense_logprobs
from judging import check_slope, gap, gradients, padded_gap, trainer_gap, weighted_sum
from tiny import model_of, prompts_of

from rollout import Rollout, SamplingConfig, make_engine
from rollout.context import PromptCacheConfig, load_context, save_context
from rollout.context.reader import ContextPrompts
from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.attention.views import make_view
from sparse_rl.methods.am.view import ContextView
from sparse_rl.trace import EvictionTrace, TraceError, batch_traces, load_traces, pack_traces, save_traces
from sparse_rl.trace.files import write_sections
from trainer.batch import Batch, Example

LENGTHS = (60, 41, 75)  # of three contexts
QUESTIONS = (7, 1, 30)
COMPLETIONS = (20, 3, 11)
CONFIG = PromptCacheConfig(ratio=0.2, queries=["context"], first=2, last=3)
MODELS = ["qwen2", "qwen3", "llama", "stories260K"]
SETTINGS: dict[str, dict[str, Any]] = {
    "attention": {},
    "omp": {"select": "omp"},
    "omp_fast": {"select": "omp_fast", "ratio": 0.4},
    "parts": {"chunk": 17},
    "parts of numbers": {"chunks": 5, "ratio": 0.05},  # some parts keep no entry
    "no edges": {"first": 0, "last": 0},
    "window": {"queries": ["window"], "window": 9, "last": 9, "aggregate": "max", "pool": 3},
    "both kinds": {"queries": ["context", "window"], "chunk": 30},
    "subset": {"queries": ["window", "context"], "most_queries": 23, "chunk": 30},
    "pyramid": {"heads": "pyramid"},
    "global": {"heads": "global", "chunk": 20},
    "values alone": {"fit_biases": False},
    "biases alone": {"fit_values": False},
}


def sampled(name: str, counts: Sequence[Sequence[int]] | None = None, **changed: Any) -> tuple:
    """Return (model, rollouts after three contexts of different lengths)."""
    return sampled_under(name, json.dumps([counts, changed]))


@cache
def sampled_under(name: str, settings: str) -> tuple:
    model, (counts, changed) = model_of(name), json.loads(settings)
    engine, rollouts = make_engine("hf", model=model, policy="full"), list[Rollout]()
    contexts, questions = prompts_of(name, LENGTHS), prompts_of(name, QUESTIONS)
    for tokens, question, length in zip(contexts, questions, COMPLETIONS, strict=True):
        context = engine.study(tokens, config := replace(CONFIG, **changed)).compacted(config, counts)
        rollouts += engine.generate([question], SamplingConfig(length, seed=1, ignore_eos=True), context)
    return model, rollouts


def changed_sections(rollouts: Sequence[Rollout], change: Callable[[dict[str, torch.Tensor]], Any]) -> list[Rollout]:
    """Return copies of the rollouts, whose traces `change` has changed in place."""

    def changed(trace: EvictionTrace) -> EvictionTrace:
        sections = {name: values.clone() for name, values in trace.sections.items()}
        change(sections)
        return EvictionTrace(sections.pop("evict_at"), sections, validate=False)

    return [replace(r, trace=changed(r.trace)) for r in rollouts]


# ---- exactness ------------------------------------------------------------------------------------------------------


ALL = [(name, setting) for name in MODELS for setting in SETTINGS]


@pytest.mark.parametrize(
    ("name", "setting"),  # each setting with two models by default
    [pytest.param(*pair, marks=[] if (i + i // 13) % 2 else pytest.mark.slow) for i, pair in enumerate(ALL)],
)
@pytest.mark.few(2)
def test_trainer_recomputes_the_entries_of_a_compacted_context(name: str, setting: str, tally: Callable) -> None:
    """A trace records kept tokens and reference queries alone; replay in any batch and the dense reference recompute
    biases and values."""
    model, rollouts = sampled(name, **SETTINGS[setting])
    with torch.no_grad():
        own_gap = trainer_gap(model, rollouts)
        tally("am after a context", gap=own_gap)
        assert own_gap <= 1e-5
        assert trainer_gap(model, rollouts, batch_size=1) <= 1e-5
        dense = [dense_logprobs(model, r.prompt_ids, r.completion_ids, r.trace) for r in rollouts]
        assert gap(dense, rollouts) <= 1e-5


def test_heads_with_budgets_of_their_own_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if heads are fitted one by one, as with many logits."""
    counts = [[1 + layer + 3 * head for head in range(4)] for layer in range(5)]
    model, rollouts = sampled("stories260K", counts)
    with torch.no_grad():
        together = replay_logprobs(model, rollouts)
        assert gap(together, rollouts) <= 1e-5
        monkeypatch.setattr("sparse_rl.methods.am.view.MOST_LOGITS", 1)
        monkeypatch.setattr("sparse_rl.methods.am.view.PIECE", 7)
        assert trainer_gap(model, rollouts) <= 1e-5


@pytest.mark.parametrize("changed", [{}, {"select": "omp"}, {"chunk": 20}], ids=str)
@pytest.mark.few(1)
def test_fits_hardly_amplify_rounding(changed: dict) -> None:
    """A trainer that rounds differently (rescaled weights) has at most 3 times its gap under a full cache."""
    model, rollouts = sampled("stories260K", **changed)
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        attention = layer.self_attn
        for three, third in ((attention.q_proj, attention.k_proj), (attention.v_proj, attention.o_proj)):
            three.weight.data.mul_(3.0)
            third.weight.data.div_(3.0)
    full = make_engine("hf", model=model, policy="full").generate(
        [r.prompt_ids for r in rollouts], SamplingConfig(max(COMPLETIONS), seed=1, ignore_eos=True)
    )
    assert 0 < trainer_gap(other, rollouts) <= 3 * trainer_gap(other, full)


def test_traces_survive_files(tmp_path: Path) -> None:
    model, rollouts = sampled("qwen3", chunk=20)
    save_traces(tmp_path / "t.safetensors", [r.trace for r in rollouts])
    loaded = [replace(r, trace=t) for r, t in zip(rollouts, load_traces(tmp_path / "t.safetensors"), strict=True)]
    assert trainer_gap(model, loaded) <= 1e-5


def test_a_context_file_keeps_the_record(tmp_path: Path) -> None:
    """The engine vllm continues from files of contexts."""
    engine, (tokens,) = make_engine("hf", model=model_of("qwen2"), policy="full"), prompts_of("qwen2", [60])
    for changed in ({}, {"queries": ["repeat"]}):
        context = engine.compact(tokens, replace(CONFIG, **changed))
        save_context(tmp_path / "context", context)
        ours, theirs = (c.trace(70).sections for c in (load_context(tmp_path / "context"), context))
        assert ours.keys() == theirs.keys()
        assert ("compacted_queries" in ours) is (not changed)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_replay_does_not_depend_on_padding(side: str) -> None:
    """GRPO pads prompts on the left and completions on the right."""
    model, rollouts = sampled("qwen3", chunk=20)
    assert isinstance(make_view([rollouts[0].trace], [0], 100, "cpu").of_policy, ContextView)
    assert padded_gap(model, rollouts, side) <= 1e-5


def test_batches_of_the_trainers_accept_these_traces() -> None:
    """Distillation and the replay panel of GRPO make these batches."""
    model, rollouts = sampled("qwen2")
    adopt(model)
    batch = Batch.make([Example.from_rollout(r) for r in rollouts], torch.device("cpu"))
    with torch.no_grad():
        logits = model.lm_head(batch.hidden(model, replayed=True))
    logprobs = logits.log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]
    assert gap(logprobs.split(list(COMPLETIONS)), rollouts) <= 1e-5


# ---- controls -------------------------------------------------------------------------------------------------------


def other_tokens(sections: dict[str, torch.Tensor]) -> None:
    end = int(sections["compacted_at"])
    sections["compacted_queries"][:, 1] = end - 1 - sections["compacted_queries"][:, 1] // 2


def other_end(sections: dict[str, torch.Tensor]) -> None:
    sections["compacted_at"] += 1
    sections["evict_at"][sections["evict_at"] < 2**30] += 1


WRONG: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "evict_at alone": lambda sections: [sections.pop(name) for name in list(sections) if name != "evict_at"],
    "other query tokens": other_tokens,
    "one query head": lambda sections: sections["compacted_queries"][:, 2].zero_(),
    "values not fitted": lambda sections: sections["compacted_with"][0].fill_(1e9),
    "no biases": lambda sections: sections["compacted_with"][2].fill_(0),
    "one part": lambda sections: sections.update(
        compacted_parts=sections["compacted_parts"][[0, -1]],
        compacted_queries=sections["compacted_queries"] * torch.tensor([0, 1, 1], dtype=torch.int32),
    ),
    "another end": other_end,
    "heads swapped": lambda sections: sections.update(evict_at=sections["evict_at"].roll(1, dims=1)),
}


@pytest.mark.parametrize("name", ["qwen3", "stories260K"])
@pytest.mark.few(1)
def test_control_wrong_traces_give_a_large_gap(name: str) -> None:
    model, rollouts = sampled(name, chunk=30)
    assert trainer_gap(model, rollouts) <= 1e-5
    for wrong, change in WRONG.items():
        assert trainer_gap(model, changed_sections(rollouts, change)) > 1e-3, wrong


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["parts", "global", "subset"])
@pytest.mark.few(1)
def test_gradients_of_replay_equal_those_of_the_dense_reference(setting: str) -> None:
    """It attends once, under a mask, to all tokens and to the fitted entries."""
    model, rollouts = sampled("qwen3", **SETTINGS[setting])
    ours = gradients(model, weighted_sum(replay_logprobs(model, rollouts)))
    dense = [dense_logprobs(model, r.prompt_ids, r.completion_ids, r.trace) for r in rollouts]
    theirs = gradients(model, weighted_sum(dense))
    model.zero_grad()
    assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


@pytest.mark.parametrize(
    ("changed", "seed", "step"), [({"select": "omp"}, 1, 1e-4), ({"fit_biases": False}, 2, 5e-4)], ids=str
)
def test_gradients_equal_finite_differences(changed: dict, seed: int, step: float) -> None:
    """In float64, along a random direction of all weights. Control: gradients that do not flow through the fits. Biases
    of keys chosen by attention are left out: many are at their bounds, where the loss has kinks."""
    model, (r, *_) = sampled("qwen3", chunk=30, **changed)
    model = adopt(copy.deepcopy(model).double())
    ids = torch.tensor([[*r.prompt_ids, *r.completion_ids]])

    def loss(through: bool) -> torch.Tensor:
        view = make_view([r.trace], [0], ids.shape[1], "cpu", through=through)
        logits = model(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits[0, :-1]
        return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[len(r.prompt_ids) - 1 :].sum()

    check_slope(model, loss, seed, step)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {"queries": ["repeat"]},
        {"queries": ["context", "self_study"], "study_tokens": 4},
        {"queries": ["random"]},
        {"queries": ["repeat", "context"], "on_policy": True},
        {"fit": "paper"},
        {"chunking": "text", "chunk": 20},
        {"chunking": "text", "chunk": 20, "policy": "evict"},
    ],
    ids=str,
)
def test_other_compactions_are_refused(changed: dict) -> None:
    """Their traces have the section `compacted_at` alone. The refusal says which compactions can be replayed."""
    model, (tokens, question) = model_of("qwen2"), prompts_of("qwen2", [60, 5])
    engine = make_engine("hf", model=model, policy="full")
    context = engine.compact(tokens, replace(CONFIG, **changed), ContextPrompts(requests=[question]))
    rollouts = engine.generate([question], SamplingConfig(5, seed=1), context)
    assert rollouts[0].trace.further.keys() == {"compacted_at"}
    with pytest.raises(TraceError, match=r"no view replays .* compacted_at; a compacted context can be replayed only"):
        replay_logprobs(model, rollouts)


@pytest.mark.parametrize(
    "changed", [{"chunking": "text"}, {"policy": "evict"}, {"fit_biases": False, "fit_values": False}], ids=str
)
def test_single_parts_and_contexts_without_fits_are_replayed(changed: dict) -> None:
    """With `chunking: text`, a single part is the whole context. Without fits there is no record."""
    model, rollouts = sampled("qwen2", **changed)
    assert all(bool(r.trace.further) is ("chunking" in changed) for r in rollouts)
    assert trainer_gap(model, rollouts) <= 1e-5


def test_mixed_batches_are_refused() -> None:
    """A batch has one kind of traces, with the same settings of the fits. Several such traces cannot be packed."""
    _, rollouts = sampled("qwen2")
    first, second, _ = (r.trace for r in rollouts)
    width = len(first) + len(second)
    with pytest.raises(TraceError, match="trace 1 has the sections evict_at, but trace 0 has evict_at, compacted_at"):
        batch_traces([first, EvictionTrace(second.evict_at)], [0, 0], width)
    settings = {**second.further, "compacted_with": second.further["compacted_with"] * torch.tensor([2.0, 1, 1, 1])}
    with pytest.raises(TraceError, match="settings differ between the traces of a batch"):
        batch_traces([first, EvictionTrace(second.evict_at, settings)], [0, 0], width)
    with pytest.raises(TraceError, match="cannot be packed"):
        pack_traces([first, second])


DAMAGED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "a token after the context": (
        lambda sections: sections["compacted_queries"][3, 1].fill_(60),
        r"compacted_queries\[3\] = \[0, 60, -1\] is not a query of a context with 3 parts and 60 tokens",
    ),
    "a part that does not exist": (
        lambda sections: sections["compacted_queries"][0, 0].fill_(3),
        r"compacted_queries\[0\] = \[3, 0, -1\] is not a query of a context",
    ),
    "a part without queries": (
        lambda sections: sections["compacted_queries"][:, 0].clamp_(max=1),
        "compacted_queries has no reference query for part 2",
    ),
    "a query of two numbers": (
        lambda sections: sections.update(compacted_queries=sections["compacted_queries"][:, :2].contiguous()),
        "compacted_queries has 2 numbers per reference query, not 3",
    ),
    "a part that ends after the context": (
        lambda sections: sections["compacted_parts"][-1].fill_(61),
        "compacted_parts .* is not a list of at least two ascending positions from 0 to 60",
    ),
    "an empty part": (
        lambda sections: sections["compacted_parts"][1].copy_(sections["compacted_parts"][2]),
        "is not a list of at least two ascending positions",
    ),
    "an eviction outside the parts": (
        lambda sections: sections["evict_at"][0, 0, 0].fill_(60),
        "a token is evicted that is in none of the parts",
    ),
    "a ridge of 0": (lambda sections: sections["compacted_with"][0].fill_(0), "not a valid list of fit settings"),
    "no fit": (lambda sections: sections["compacted_with"][2:].fill_(0), "not a valid list of fit settings"),
    "no settings": (lambda sections: sections.pop("compacted_with"), "also needs compacted_with"),
    "no parts": (lambda sections: sections.pop("compacted_parts"), "also needs compacted_parts"),
    "no queries": (lambda sections: sections.pop("compacted_queries"), "also needs compacted_queries"),
    "no end": (lambda sections: sections.pop("compacted_at"), "also needs compacted_at"),
}


@pytest.mark.parametrize(("change", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_records_are_refused(change: Callable, message: str, tmp_path: Path) -> None:
    """When a trace is made, loaded, or replayed after a change in place. Control: the original record."""
    _, (rollout, *_) = sampled("qwen3", chunk=20)
    sections = {section: values.clone() for section, values in rollout.trace.sections.items()}
    batch_traces([rollout.trace], [0], len(rollout.trace))
    change(sections)
    write_sections(tmp_path / "t.safetensors", [sections], None)
    with pytest.raises(TraceError, match=message):
        load_traces(tmp_path / "t.safetensors")
    evict_at = sections.pop("evict_at")
    with pytest.raises(TraceError, match=message):
        EvictionTrace(evict_at, sections)
    changed = EvictionTrace(evict_at, sections, validate=False)
    object.__setattr__(changed, "validate", True)
    with pytest.raises(TraceError, match=message):
        make_view([changed], [0], len(changed), "cpu")


def test_a_query_head_that_does_not_exist_is_refused() -> None:
    model, rollouts = sampled("qwen2")
    altered = changed_sections(rollouts, lambda sections: sections["compacted_queries"][:, 2].fill_(9))
    with pytest.raises(TraceError, match="compacted_queries names query head 9 of a group, but the model has only"):
        replay_logprobs(model, altered)
