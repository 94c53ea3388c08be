"""`layered` gives groups of layers their own policies. What the hf engine samples, the trainer replays exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from judging import outcome, trainer_gap
from learned import SCORERS, with_scorers
from tiny import model_of, new_model, prompts_of

from rollout import Rollout, SamplingConfig, make_engine
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.attention.views import make_view
from sparse_rl.errors import UserError
from sparse_rl.methods.pages.config import mixed, spans
from sparse_rl.methods.pages.layered import LayeredView
from sparse_rl.models.directory import check_scorers, save_policy
from sparse_rl.policies import make_policy
from sparse_rl.recipe import load_recipe
from sparse_rl.trace import EvictionTrace, TraceError

LENGTHS = (1, 5, 23, 41, 60, 150)
LINED = {"policy": "lined", "window": 8, "period": 3, "compression": 2}
PAGES = {"policy": "clustered", "page": 4, "window": 8, "sinks": 1, "open_pages": 2}
GKV = {"policy": "gkv", "budget": 12, "window": 4, "period": 4}
SAMPLING = SamplingConfig(max_tokens=50, seed=1, ignore_eos=True)
MIXES: dict[str, list[tuple[int, Any]]] = {
    "layers as in the paper": [(8, LINED), (20, PAGES), (8, LINED)],
    "weighed": [(1, {**PAGES, "compressor": "attention"}), (1, GKV)],
    "evictions alone": [(1, GKV), (1, LINED)],
    "full beside pages": [(1, "full"), (1, PAGES)],
}


def block(mix: str) -> dict[str, Any]:
    return {"policy": "layered", "parts": [{"layers": n, "cache": cache} for n, cache in MIXES[mix]]}


def sampled(name: str, cache: dict) -> tuple:
    """Return (model, rollouts)."""
    model = model_of(name)
    return model, make_engine("hf", model=model, policy=cache).generate(prompts_of(name, LENGTHS), SAMPLING)


def with_sections(rollouts: list[Rollout], **sections: Callable[[torch.Tensor], torch.Tensor]) -> list[Rollout]:
    def make(trace: EvictionTrace) -> EvictionTrace:
        further = {name: sections[name](x) if name in sections else x for name, x in trace.further.items()}
        evict_at = sections.get("evict_at", lambda x: x)(trace.evict_at)
        return EvictionTrace(evict_at, further, validate=False)

    return [replace(r, trace=make(r.trace)) for r in rollouts]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", ["quickstart", "stories260K", "qwen3", "llama"])
@pytest.mark.few(2)
def test_replay_is_exact(name: str, mix: str, tally: Callable) -> None:
    model, rollouts = sampled(name, block(mix))
    replay_gap = trainer_gap(model, rollouts)
    tally("layered", gap=replay_gap)
    assert replay_gap <= 1e-5


@pytest.mark.parametrize("cache", [block("weighed"), {**PAGES, "compressor": "attention"}], ids=str)
@pytest.mark.few(1)
def test_simulation_equals_sampling(cache: dict) -> None:
    """Bit for bit; log-probs also if rows are cut so that they end at different times."""
    model, rollouts = sampled("quickstart", cache)
    engine = make_engine("hf", model=model, policy=cache)
    simulated = engine.simulate([r.prompt_ids for r in rollouts], [r.completion_ids for r in rollouts])
    assert [(own[0], *own[2:]) for own in outcome(simulated)] == [(r[0], *r[2:]) for r in outcome(rollouts)]
    # rows that have ended leave the batch, and the others go on
    ends = [5 + 9 * row for row in range(len(rollouts))]
    parts = [r.completion_ids[:end] for r, end in zip(rollouts, ends, strict=True)]
    for ours, theirs in zip(engine.simulate([r.prompt_ids for r in rollouts], parts), rollouts, strict=True):
        assert ours.model_logprobs == theirs.model_logprobs[: len(ours.completion_ids)]


@pytest.mark.parametrize("name", ["quickstart", "stories260K"])
@pytest.mark.few(1)
def test_control_wrong_traces_give_a_large_gap(name: str) -> None:
    model, rollouts = sampled(name, block("layers as in the paper"))
    layers = model.config.num_hidden_layers
    wrong_rollouts = {
        "layers reversed": with_sections(rollouts, evict_at=lambda x: x.flip(0), opened=lambda x: x.flip(0)),
        "nothing opened": with_sections(rollouts, opened=lambda x: torch.full_like(x, -1)),
        "all layers paged": with_sections(rollouts, paged_layers=lambda _: torch.arange(layers, dtype=torch.int32)),
    }
    if layers == 2:  # both layers are paged
        del wrong_rollouts["all layers paged"]
    for control, traces in wrong_rollouts.items():
        assert trainer_gap(model, traces) > 0.1, control


@pytest.mark.parametrize(
    "cache", [PAGES, {**PAGES, "compressor": "attention"}, block("layers as in the paper")], ids=str
)
@pytest.mark.few(1)
def test_checkpointing_changes_no_bit_of_a_gradient(cache: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model("qwen3", num_hidden_layers=5)
    rollouts = make_engine("hf", model=model, policy=cache).generate(prompts_of("qwen3", LENGTHS), SAMPLING)
    calls: list[int] = []
    original = make_view

    def counting_view(*given: Any) -> Any:
        view = original(*given)
        attend = view.attend
        monkeypatch.setattr(view, "attend", lambda layer, *rest: calls.append(layer) or attend(layer, *rest))
        return view

    monkeypatch.setattr("sparse_rl.attention.logprobs.make_view", counting_view)
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train(checkpointing)
        model.zero_grad()
        torch.cat(replay_logprobs(model, rollouts)).sum().backward()
        results.append([weight.grad.clone() for weight in model.parameters()])
        assert model.is_gradient_checkpointing is checkpointing
    assert len(calls) == 5 + 2 * 5  # each layer runs again when its gradients are computed
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][0].abs().sum() > 0


@pytest.mark.parametrize("cache", [PAGES, GKV, LINED], ids=lambda cache: cache["policy"])
@pytest.mark.few(1)
def test_a_single_part_equals_its_policy_alone(cache: dict) -> None:
    _, alone = sampled("quickstart", cache)
    _, layered = sampled("quickstart", {"policy": "layered", "parts": [{"layers": 1, "cache": cache}]})
    ours, theirs = (outcome(rollouts) for rollouts in (layered, alone))
    for (*of_layered, sections), (*of_policy, own_sections) in zip(ours, theirs, strict=True):
        assert of_layered == of_policy
        assert sections.items() >= own_sections.items()


LEARNED = {"policy": "kvpop", "budget": 20, "window": 5, "sinks": 2}
HYBRIDS = {
    "dense below": [(1, "full"), (1, LEARNED)],
    "dense above": [(1, LEARNED), (1, "full")],
    "beside pages": [(1, LEARNED), (1, PAGES)],
    "beside evictions": [(1, GKV), (1, LEARNED)],
}


@pytest.mark.parametrize("scorer", ["mlp", "delayed", "immediate"])
@pytest.mark.parametrize("hybrid", HYBRIDS)
@pytest.mark.parametrize("prefill", ["dense", "masked"])
@pytest.mark.few(2)
def test_learned_layers_beside_others_replay_exactly(prefill: str, hybrid: str, scorer: str) -> None:
    """Control: layers swapped. A learned layer 0 decides as in a model that is learned in all layers."""
    learned = {**LEARNED, "scorer": SCORERS[scorer], "prefill": prefill}
    parts = [{"layers": n, "cache": learned if cache is LEARNED else cache} for n, cache in HYBRIDS[hybrid]]
    model = with_scorers(model_of("quickstart"), make_policy(learned))
    prompts = prompts_of("quickstart", LENGTHS)
    engine = make_engine("hf", model=model, policy={"policy": "layered", "parts": parts})
    rollouts = engine.generate(prompts, SAMPLING)
    assert trainer_gap(model, rollouts) <= 1e-5
    swapped = with_sections(rollouts, evict_at=lambda x: x.flip(0))
    assert trainer_gap(model, swapped) > 0.05
    if HYBRIDS[hybrid][0][1] is LEARNED:
        alone = make_engine("hf", model=model, policy=learned).simulate(prompts, [r.completion_ids for r in rollouts])
        for ours, theirs in zip(rollouts, alone, strict=True):
            assert torch.equal(ours.trace.evict_at[0], theirs.trace.evict_at[0])
            assert ours.trace.evict_at.shape == theirs.trace.evict_at.shape


def test_learned_layers_need_the_models_scorers_and_are_not_trained(tmp_path: Path) -> None:
    cache = {"policy": "layered", "parts": [{"layers": 1, "cache": "full"}, {"layers": 1, "cache": LEARNED}]}
    with pytest.raises(UserError, match="has no scorers, which kvpop needs"):
        make_engine("hf", model=model_of("quickstart"), policy=cache)
    save_policy(tmp_path, make_policy("gkv", budget=20))
    with pytest.raises(UserError, match="has no scorers, which kvpop needs"):
        check_scorers(tmp_path, make_policy(cache))
    check_scorers(tmp_path, make_policy(block("full beside pages")))
    with pytest.raises(UserError, match="kvpop is trained only in all layers") as caught:
        load_recipe("quickstart/grpo", [f"cache={json.dumps(cache)}"])
    assert caught.value.key == "cache.parts[1].cache.policy"


def test_each_part_records_as_its_policy_does_alone() -> None:
    """Layer 0, below which no layer differs, has the evictions of its part's policy alone."""
    model, rollouts = sampled("stories260K", block("layers as in the paper"))
    _, lined = sampled("stories260K", LINED)
    for ours, theirs in zip(rollouts, lined, strict=True):
        prompt = len(ours.prompt_ids)
        assert ours.completion_ids[0] == theirs.completion_ids[0]
        at_the_prompt = [trace.evict_at[0, :, :prompt] == prompt for trace in (ours.trace, theirs.trace)]
        assert torch.equal(*at_the_prompt)
        assert ours.trace.further["paged_layers"].tolist() == [1, 2, 3]
        assert (ours.trace.further["opened"][[0, 4]] == -1).all()
    engine = make_engine("hf", model=model, policy=block("layers as in the paper"))
    engine.generate(prompts_of("stories260K", [60] * 4), replace(SAMPLING, max_tokens=1))
    held = [60, 60, 60]  # a compaction at the prompt's end leaves 8 + (60 - 8) // 2 = 34 of a lined layer
    _, kv_heads, head_dim = 5, model.config.num_key_value_heads, 8
    per_entry = 2 * kv_heads * head_dim * 4
    assert engine.peak_cache_bytes == 4 * per_entry * (sum(held) + 2 * 34)


@pytest.mark.slow
def test_a_sequence_does_not_depend_on_its_batch() -> None:
    model, rollouts = sampled("quickstart", block("weighed"))
    engine = make_engine("hf", model=model, policy=block("weighed"))
    for row in (0, 3, 5):
        alone = engine.generate(prompts_of("quickstart", LENGTHS)[row : row + 1], SAMPLING)
        assert outcome(alone) == outcome(rollouts[row : row + 1])


def test_a_layer_keeps_the_queries_that_its_part_needs() -> None:
    """Layer 1, under gkv, keeps queries. Layer 0, under clustered attention, keeps none."""
    engine = make_engine("hf", model=model_of("quickstart"), policy=block("weighed"))
    prefilled = engine.prefill(prompts_of("quickstart", [9, 20])).fork([1, 0, 1])
    none, some = (cache.layers[place].queries for cache, place in prefilled.cache.of_policy.of_layer.values())
    assert none is None
    assert some is not None
    assert some.shape[:1] == (3,)


@pytest.mark.parametrize(
    ("shares", "layers", "expected"),
    [
        ([8, 20, 8], 36, [8, 20, 8]),
        ([8, 20, 8], 28, [6, 16, 6]),
        ([8, 20, 8], 5, [1, 3, 1]),
        ([8, 20, 8], 2, [0, 2, 0]),
        ([1], 7, [7]),
        ([3, 3], 6, [3, 3]),
        ([1, 1], 3, [2, 1]),
    ],
)
def test_layers_are_divided_in_proportion_to_the_parts(shares: list[int], layers: int, expected: list[int]) -> None:
    assert spans(shares, layers) == expected


def test_a_remark_gives_the_layers_of_a_model_that_differs_from_the_recipe() -> None:
    config = make_policy("layered").config
    assert config.remark(2, 36) is None
    assert config.remark(2, 5) == "the 5 layers under the policy are: 1 lined, 3 clustered, 1 lined"


def test_the_default_parts_have_the_papers_layers_and_our_default_parameters() -> None:
    assert make_policy("layered").config.ranges == mixed()
    assert [(part.layers, part.cache.name) for part in mixed()] == [(8, "lined"), (20, "clustered"), (8, "lined")]
    assert all(part.cache == make_policy(part.cache.name).config for part in mixed())
    policy = make_policy("layered")
    assert make_policy(json.loads(json.dumps(policy.config.as_block()))).config == policy.config


def test_numbers_of_entries_are_means_over_layers() -> None:
    """Rounded up, here of 2 lined and 3 clustered layers."""
    policy = make_policy(block("layers as in the paper"))
    bound = policy.bound_to(SimpleNamespace(config=SimpleNamespace(num_hidden_layers=5)))
    lined, pages = make_policy(LINED), make_policy(PAGES)
    for prompt, fed in ((30, 60), (1, 200)):
        held = [p.schedule.most_held(prompt, fed) for p in (lined, pages)]
        assert bound.schedule.most_held(prompt, fed) == -(-(2 * held[0] + 3 * held[1]) // 5)
        decoding = [p.schedule.most_decoding(prompt, fed) for p in (lined, pages)]
        assert bound.schedule.most_decoding(prompt, fed) == -(-(2 * decoding[0] + 3 * decoding[1]) // 5)
        read = [p.most_read(prompt, fed) for p in (lined, pages)]
        assert bound.most_read(prompt, fed) == -(-(2 * read[0] + 3 * read[1]) // 5)
        assert bound.schedule.first(prompt) == min(p.schedule.first(prompt) for p in (lined, pages))
    assert bound.schedule.evicts
    assert bound.schedule.peak is None


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "parts: .*name at least one"),
        ([(1, {"policy": "am", "budget": 20})], r"parts\[0\].cache: .*am is for all layers together"),
        ([(1, "full"), (1, {"policy": "dms"})], r"parts\[1\].cache: .*dms is for all layers together"),
        ([(1, {"policy": "layered"})], r"parts\[0\].cache: .*layered is for all layers together"),
        ([(1, PAGES), (1, {**PAGES, "page": 5})], "clustered parts must have the same settings"),
        ([(0, "full")], r"parts\[0\].layers: expected a whole number >= 1, got 0"),
        ([(1, "gkv")], r"parts\[0\].cache: .*'gkv' needs a budget"),
    ],
    ids=str,
)
def test_wrong_parts_are_refused(parts: list, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make_policy({"policy": "layered", "parts": [{"layers": n, "cache": cache} for n, cache in parts]})
    assert "\n" not in str(caught.value)


def test_settings_for_evaluation_are_refused_in_training() -> None:
    """`threshold`, which only evaluations may set, is refused in a part too. Control: without it the recipe loads."""
    cache = {"policy": "layered", "parts": [{"layers": 1, "cache": "full"}, {"layers": 1, "cache": PAGES}]}
    assert load_recipe("quickstart/grpo", [f"cache={json.dumps(cache)}"]).caches()[0].name == "layered"
    cache["parts"][1]["cache"] = {**PAGES, "threshold": 0.1}
    with pytest.raises(UserError) as caught:
        load_recipe("quickstart/grpo", [f"cache={json.dumps(cache)}"])
    assert caught.value.key == "cache.parts[1].cache.threshold"


def test_vllm_refuses_the_policy_layered() -> None:
    with pytest.raises(UserError, match="hf"):
        make_engine("vllm", model="nowhere", policy="layered")


def test_a_record_that_names_missing_layers_is_refused() -> None:
    _, rollouts = sampled("qwen3", block("weighed"))
    trace = rollouts[2].trace
    assert isinstance(make_view([trace], [0], len(trace), "cpu").of_policy, LayeredView)
    for layers in ([2], [1, 0], [0, 0], [-1]):
        with pytest.raises(TraceError, match=r"paged_layers .* is not an ascending list of layers from 0 to 1"):
            EvictionTrace(trace.evict_at, {**trace.further, "paged_layers": torch.tensor(layers, dtype=torch.int32)})
