"""Completions after a context that Attention Matching compacted once are replayed from their traces, if the reference
queries are those of the context's own tokens. The replay is exact, in any batch, and has the right gradients; all other
compactions are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import gap, gradients, weighted_sum

from rollout import Rollout, SamplingConfig, make_engine
from rollout.context import PromptCacheConfig, load_context, save_context
from rollout.context.prompts import ContextPrompts
from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.attention.logprobs import dense_logprobs, replay_logprobs
from sparse_rl.attention.views.dense import DenseView
from sparse_rl.attention.views.factory import make_view
from sparse_rl.methods.am.context_view import ContextView
from sparse_rl.trace import EvictionTrace, TraceError, batch_traces, load_traces, pack_traces, save_traces
from sparse_rl.trace.files import write_sections
from trainer.batches import Batch
from trainer.examples import Example

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


@pytest.fixture
def sampled(model_of: Callable, prompts_of: Callable) -> Callable[..., tuple]:
    """sampled(model name, **changes of CONFIG) -> (model, rollouts after three contexts of different lengths)."""

    def make(name: str, counts: Sequence[Sequence[int]] | None = None, **changed: Any) -> tuple:
        model = model_of(name)
        engine, rollouts = make_engine("hf", model=model, policy="full"), list[Rollout]()
        contexts, questions = prompts_of(name, LENGTHS), prompts_of(name, QUESTIONS)
        for tokens, question, length in zip(contexts, questions, COMPLETIONS, strict=True):
            context = engine.compact(tokens, replace(CONFIG, **changed), counts=counts)
            rollouts += engine.generate([question], SamplingConfig(length, seed=1, ignore_eos=True), context)
        return model, rollouts

    return make


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
@pytest.mark.few(8)
def test_trainer_recomputes_the_entries_of_a_compacted_context(
    name: str, setting: str, sampled: Callable, tally: Callable
) -> None:
    """A trace records the kept tokens and the reference queries, but no bias or value. The trainer recomputes these,
    and its log-probs equal the sampler's up to 1e-5: in a batch of contexts and completions of different lengths,
    alone, and in the dense reference. Heads may keep different numbers of entries.
    """
    model, rollouts = sampled(name, **SETTINGS[setting])
    with torch.no_grad():
        own_gap = gap(replay_logprobs(model, rollouts), rollouts)
        tally("am after a context", gap=own_gap)
        assert own_gap <= 1e-5
        assert gap(replay_logprobs(model, rollouts, batch_size=1), rollouts) <= 1e-5
        dense = [dense_logprobs(model, r.prompt_ids, r.completion_ids, r.trace) for r in rollouts]
        assert gap(dense, rollouts) <= 1e-5


def test_heads_with_budgets_of_their_own_are_replayed(sampled: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each head keeps another number of entries. Heads that are fitted one by one, as with many logits, give the same
    log-probs.
    """
    counts = [[1 + layer + 3 * head for head in range(4)] for layer in range(5)]
    model, rollouts = sampled("stories260K", counts)
    with torch.no_grad():
        together = replay_logprobs(model, rollouts)
        assert gap(together, rollouts) <= 1e-5
        monkeypatch.setattr("sparse_rl.methods.am.context_view.MOST_LOGITS", 1)
        monkeypatch.setattr("sparse_rl.methods.am.context_view.PIECE", 7)
        assert gap(replay_logprobs(model, rollouts), rollouts) <= 1e-5


@pytest.mark.parametrize("changed", [{}, {"select": "omp"}, {"chunk": 20}], ids=str)
@pytest.mark.few(1)
def test_fits_hardly_amplify_rounding(changed: dict, sampled: Callable) -> None:
    """A trainer that rounds differently than the sampler has at most 3 times its gap under a full cache. The trainer's
    queries and values are multiplied by 3, and its keys and output projections are divided by 3.
    """
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
    with torch.no_grad():
        assert 0 < gap(replay_logprobs(other, rollouts), rollouts) <= 3 * gap(replay_logprobs(other, full), full)


def test_traces_survive_files(sampled: Callable, tmp_path: Path) -> None:
    model, rollouts = sampled("qwen3", chunk=20)
    save_traces(tmp_path / "t.safetensors", [r.trace for r in rollouts])
    loaded = [replace(r, trace=t) for r, t in zip(rollouts, load_traces(tmp_path / "t.safetensors"), strict=True)]
    with torch.no_grad():
        assert gap(replay_logprobs(model, loaded), rollouts) <= 1e-5


def test_a_context_file_keeps_the_record(model_of: Callable, prompts_of: Callable, tmp_path: Path) -> None:
    """The engine vllm continues from files of contexts. Their traces are those of the original context."""
    engine, (tokens,) = make_engine("hf", model=model_of("qwen2"), policy="full"), prompts_of("qwen2", [60])
    for changed in ({}, {"queries": ["repeat"]}):
        context = engine.compact(tokens, replace(CONFIG, **changed))
        save_context(tmp_path / "context", context)
        ours, theirs = (c.trace(70).sections for c in (load_context(tmp_path / "context"), context))
        assert ours.keys() == theirs.keys()
        assert ("compacted_queries" in ours) is (not changed)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_replay_does_not_depend_on_padding(side: str, sampled: Callable) -> None:
    """GRPO pads prompts on the left and completions on the right."""
    model, rollouts = sampled("qwen3", chunk=20)
    width = max(len(r.trace) for r in rollouts) + 3
    starts = [{"left": width - len(r.trace), "right": 0, "both": (width - len(r.trace)) // 2}[side] for r in rollouts]
    ids, positions = torch.ones(len(rollouts), width, dtype=torch.long), torch.zeros(len(rollouts), width).long()
    for row, (r, start) in enumerate(zip(rollouts, starts, strict=True)):
        ids[row, start : start + len(r.trace)] = torch.tensor([*r.prompt_ids, *r.completion_ids])
        positions[row, start : start + len(r.trace)] = torch.arange(len(r.trace))
    view = make_view([r.trace for r in rollouts], starts, width, "cpu")
    assert isinstance(view, ContextView)
    with torch.no_grad():
        out = model(input_ids=ids, position_ids=positions, attention_mask=NO_MASK, kv_view=view, use_cache=False)
    assert out.logits.isfinite().all()
    for row, (r, start) in enumerate(zip(rollouts, starts, strict=True)):
        logprobs = out.logits[row, start : start + len(r.trace) - 1].log_softmax(-1)
        ours = logprobs.gather(-1, torch.tensor([*r.prompt_ids, *r.completion_ids])[1:, None])[:, 0]
        assert gap([ours[len(r.prompt_ids) - 1 :]], [r]) <= 1e-5


def test_batches_of_the_trainers_accept_these_traces(sampled: Callable) -> None:
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


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["qwen3", "stories260K"])
@pytest.mark.few(6)
def test_control_wrong_traces_give_a_large_gap(name: str, wrong: str, sampled: Callable) -> None:
    """Each change of the recorded traces moves some log-prob by more than 1e-3."""
    model, rollouts = sampled(name, chunk=30)
    altered = changed_sections(rollouts, WRONG[wrong])
    with torch.no_grad():
        assert gap(replay_logprobs(model, altered), rollouts) > 1e-3
        assert gap(replay_logprobs(model, rollouts), rollouts) <= 1e-5


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["parts", "global", "subset"])
@pytest.mark.few(1)
def test_gradients_of_replay_equal_those_of_the_dense_reference(setting: str, sampled: Callable) -> None:
    """The dense reference attends once, under a mask, to all tokens and to the fitted entries."""
    model, rollouts = sampled("qwen3", **SETTINGS[setting])
    ours = gradients(model, weighted_sum(replay_logprobs(model, rollouts)))
    dense = [dense_logprobs(model, r.prompt_ids, r.completion_ids, r.trace) for r in rollouts]
    theirs = gradients(model, weighted_sum(dense))
    model.zero_grad()
    assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


@pytest.mark.parametrize(
    ("changed", "seed", "step"), [({"select": "omp"}, 1, 1e-4), ({"fit_biases": False}, 2, 5e-4)], ids=str
)
def test_gradients_equal_finite_differences(changed: dict, seed: int, step: float, sampled: Callable) -> None:
    """In float64, the slope of a loss along a random direction of all weights is the same by gradients and by finite
    differences. Control: with gradients that do not flow through the fits, the slope differs.

    Biases of keys that are chosen by attention are left out: many of them are at their bounds, where the loss has
    kinks.
    """
    model, (r, *_) = sampled("qwen3", chunk=30, **changed)
    model = adopt(copy.deepcopy(model).double())
    generator = torch.Generator().manual_seed(seed)
    directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64) * p.std() for p in model.parameters()]
    ids = torch.tensor([[*r.prompt_ids, *r.completion_ids]])

    def loss(through: bool = True) -> torch.Tensor:
        view = make_view([r.trace], [0], ids.shape[1], "cpu", through=through)
        logits = model(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits[0, :-1]
        return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[len(r.prompt_ids) - 1 :].sum()

    def slope(through: bool) -> float:
        model.zero_grad()
        loss(through).backward()
        return sum(float((p.grad * d).detach().sum()) for p, d in zip(model.parameters(), directions, strict=True))

    def loss_at(by: float) -> float:
        """Return the loss after a step of size `by` along the direction."""
        moved = copy.deepcopy(list(model.parameters()))
        with torch.no_grad():
            for p, d in zip(model.parameters(), directions, strict=True):
                p.add_(by * d)
            value = float(loss())
            for p, original in zip(model.parameters(), moved, strict=True):
                p.copy_(original)
        return value

    near, far = ((loss_at(by) - loss_at(-by)) / (2 * by) for by in (step, 2 * step))
    finite_difference = (4 * near - far) / 3  # Richardson extrapolation
    assert slope(True) == pytest.approx(finite_difference, rel=1e-3)
    assert slope(False) != pytest.approx(finite_difference, rel=1e-2)  # control


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
def test_other_compactions_are_refused(changed: dict, model_of: Callable, prompts_of: Callable) -> None:
    """Their traces have the section `compacted_at` alone. The refusal says which compactions can be replayed."""
    model, (tokens, question) = model_of("qwen2"), prompts_of("qwen2", [60, 5])
    engine = make_engine("hf", model=model, policy="full")
    context = engine.compact(tokens, replace(CONFIG, **changed), ContextPrompts(requests=[question]))
    rollouts = engine.generate([question], SamplingConfig(5, seed=1), context)
    assert rollouts[0].trace.further.keys() == {"compacted_at"}
    with pytest.raises(TraceError, match=r"no view replays .* compacted_at; a compacted context can be replayed only"):
        replay_logprobs(model, rollouts)
    with pytest.raises(TraceError, match="cannot replay a trace with compacted_at but without the section"):
        DenseView(rollouts[0].trace)


def test_contexts_read_as_a_whole_are_replayed_also_with_chunking_text(sampled: Callable) -> None:
    """A single part is the whole context."""
    model, rollouts = sampled("qwen2", chunking="text")
    with torch.no_grad():
        assert gap(replay_logprobs(model, rollouts), rollouts) <= 1e-5


@pytest.mark.parametrize("changed", [{"policy": "evict"}, {"fit_biases": False, "fit_values": False}], ids=str)
def test_contexts_without_fits_have_no_record(changed: dict, sampled: Callable) -> None:
    model, rollouts = sampled("qwen2", **changed)
    assert all(not r.trace.further for r in rollouts)
    with torch.no_grad():
        assert gap(replay_logprobs(model, rollouts), rollouts) <= 1e-5


def test_mixed_batches_are_refused(sampled: Callable) -> None:
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


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.few(5)
def test_damaged_records_are_refused(name: str, sampled: Callable, tmp_path: Path) -> None:
    """A damaged record is refused when a trace is made, loaded from a file, or replayed after its tensors were changed
    in place. Control: the original record is accepted.
    """
    change, message = DAMAGED[name]
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


def test_a_query_head_that_does_not_exist_is_refused(sampled: Callable) -> None:
    model, rollouts = sampled("qwen2")
    altered = changed_sections(rollouts, lambda sections: sections["compacted_queries"][:, 2].fill_(9))
    with pytest.raises(TraceError, match="compacted_queries names query head 9 of a group, but the model has only"):
        replay_logprobs(model, altered)
