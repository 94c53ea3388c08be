"""`sparse-rl doctor` counts layers with a sliding window at their window, beside the cache of the other layers, which a
policy bounds, and compacted contexts. The expected numbers are computed by hand, or are the bytes that are allocated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peaks import kept_for_backward
from planned import GRPO, plan
from transformers import PreTrainedModel

from rollout import SamplingConfig
from rollout.context import PromptCacheConfig
from rollout.context.cache import context_bytes
from rollout.context.compact import stored_queries
from rollout.hf import HFEngine
from sparse_rl.attention.families import policy_shape
from sparse_rl.commands.main import main
from sparse_rl.methods.kvpop.scorers import sketch_scorer
from sparse_rl.models.weights import meta_model
from sparse_rl.policies import make_policy
from sparse_rl.policies.cache import window_bytes
from sparse_rl.recipe import make_recipe
from trainer.memory import activation_bytes, count_parameters

TOKENS = 118  # of a row: a prompt of 18, and a completion; the last token is never fed
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
ENTRY = 2 * 2 * 8 * 4  # bytes of an entry of a layer: keys and values of 2 kv heads of size 8, in float32


@pytest.fixture
def windowed(new_model):
    """windowed(window, **config) -> a tiny Gemma 3 with two layers with that window, and a global layer."""

    def make(window: int = 12, **config: Any) -> PreTrainedModel:
        three = {"num_hidden_layers": 3, "layer_types": LAYERS, "sliding_window": window}
        return new_model("gemma3_text", **{**three, **config})

    return make


def items_of(model: PreTrainedModel, **keys: Any) -> dict[str, Any]:
    return {item.name: item for item in plan(make_recipe({**GRPO, **keys}), model.config, cuda=False).items}


def test_parameters_include_all_norms_and_tied_embeddings_once(windowed):
    model = windowed()
    attention = 32 * (32 + 16 + 16 + 32) + 2 * 8  # and a norm of queries and one of keys
    expected = 64 * 32 + 32 + 3 * (attention + 4 * 32 + 3 * 32 * 48)
    assert plan(make_recipe(GRPO), model.config, cuda=False).parameters == expected
    assert sum(weight.numel() for weight in model.parameters()) == expected


def test_activations_include_four_norms_of_a_layer(windowed):
    model = meta_model(windowed().config)
    kept = (6 + 4) * 32 + 8 * (3 * 4 + 4 * 2) + 4 * 48
    gradients = 2 * 48
    counted = activation_bytes(model, 10, 2, 2, checkpointing=False)
    assert counted == (10 * 2 * (3 * kept + 2 * 32), 10 * 2 * gradients)
    counted = activation_bytes(model, 10, 2, 2, checkpointing=True)
    assert counted == (10 * 2 * (3 + 2) * 32, 10 * 2 * (kept + gradients))


def test_measured_activations_of_a_layer_are_near_the_counted_ones(windowed):
    sizes = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64}
    model = windowed(**sizes)
    hidden, positions = torch.randn(1, 500, 256, requires_grad=True), torch.arange(500)[None]
    rotation = model.model.rotary_emb(hidden, positions, "full_attention")
    where = {"position_embeddings": rotation, "attention_mask": None, "position_ids": positions}
    measured = kept_for_backward(model, lambda: model.model.layers[2](hidden, **where))
    whole, _ = activation_bytes(meta_model(model.config), 500, 4, 4, checkpointing=False)
    counted = (whole - 500 * 2 * 256 * 4) / 3  # without the inputs of the last norm and of the head
    assert counted <= measured <= 1.1 * counted


@pytest.mark.parametrize(("window", "held"), [(12, 12), (40, 40), (500, 117)])
def test_window_layers_hold_their_window_under_any_policy(windowed, window, held):
    model = windowed(window)
    for cache in (GRPO["cache"], "full", {"policy": "h2o", "budget": 32}):
        item = items_of(model, cache=cache)["sliding windows of 8"]
        assert item.device == 8 * 2 * held * ENTRY
        assert item.when == "sampling"
        assert f"2 layers with a window of {window} tokens: {held} entries" in item.note


def test_a_policy_counts_the_global_layers(windowed):
    item = items_of(windowed())["KV cache of 8"]
    assert item.device == 8 * 40 * (ENTRY + 2 * 8)
    assert "40 entries, 5.1 kB per sequence" in item.note
    assert (40 * ENTRY, 117 * ENTRY, (117 + 2 * 12) * ENTRY) == (5120, 14976, 18048)
    assert "windows" not in items_of(windowed(layer_types=["full_attention"] * 3))["KV cache of 8"].note


@pytest.mark.parametrize(("family", "window"), [("gemma3_text", 12), ("gemma3_text", 60), ("olmo3", 12)])
def test_planned_bytes_equal_the_allocated_bytes(new_model, family, window):
    model = new_model(family, num_hidden_layers=3, layer_types=LAYERS, sliding_window=window)
    engine = HFEngine(model, make_policy(GRPO["cache"]))
    engine.generate([[5] * 18] * 8, SamplingConfig(50, seed=0, ignore_eos=True))
    items = items_of(model, max_completion_length=50)
    positions = 8 * 40 * 2 * 8
    planned = items["KV cache of 8"].device - positions + items["sliding windows of 8"].device
    assert planned == engine.peak_cache_bytes == 8 * (40 + 2 * window) * ENTRY
    assert planned not in {8 * 3 * 40 * ENTRY, 8 * 3 * window * ENTRY}


def test_an_evaluation_counts_windows_once_for_all_caches(windowed):
    task = {"kind": "eval", "model": "m", "output_dir": "o", "dtype": "float32", "tasks": {"t": GRPO["data"]}}
    sweep = {"sweep": {"policy": ["full", "streaming"], "cache": {"budget": [16, 32]}}, "max_completion_length": 100}
    made = plan(make_recipe({**task, **sweep, "samples": 4, "rollout": {"engine": "hf"}}), windowed().config)
    of_windows = [item for item in made.items if item.name.startswith("sliding windows")]
    (largest,) = [item for item in made.items if item.name.startswith("KV") and item.when == "sampling"]
    assert len(of_windows) == 1
    assert made.device == 4 * made.parameters + largest.device + of_windows[0].device


def test_traces_record_all_layers(windowed):
    assert items_of(windowed())["traces"].host == 8 * TOKENS * 3 * 2 * 4
    pages = {"policy": "clustered", "page": 4, "window": 8, "sinks": 1, "open_pages": 2}
    recorded = make_policy(pages).config.recorded
    assert recorded > 4
    assert items_of(windowed(), cache=pages)["traces"].host == 8 * TOKENS * 2 * (recorded + 2 * 4)


def test_scorers_are_those_of_the_global_layers(windowed):
    recipe = {key: GRPO[key] for key in ("model", "output_dir", "dtype", "data")} | {"kind": "kvpop", "max_length": 600}
    cache = {"policy": "kvpop", "window": 64, "budget": 128, "scorer": "linear"}
    model = windowed(200)
    made = plan(make_recipe({**recipe, "cache": cache}), model.config, cuda=False)
    scorer = count_parameters(sketch_scorer(make_policy(cache).config.scorer, heads=2, dim=8))
    assert made.parameters == count_parameters(model) + scorer


def test_a_mixed_policy_counts_its_ranges_in_global_layers(windowed):
    model = windowed(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    parts = [{"layers": 1, "cache": {"policy": "lined", "window": 8}}, {"layers": 1, "cache": "full"}]
    items = items_of(model, cache={"policy": "layered", "parts": parts})
    assert items["sliding windows of 8"].device == 8 * 2 * 12 * ENTRY
    notes = [item.note for name, item in items.items() if name.startswith("KV cache")]
    assert any("full in 1 layers: 117 entries, 15.0 kB per sequence" in note for note in notes)
    assert not any("with sliding windows" in note for note in notes)
    for share, remarks in ((1, []), (2, ["layered: the 2 layers under the policy are: 1 lined, 1 full"])):
        recipe = make_recipe({**GRPO, "cache": {"policy": "layered", "parts": [{**p, "layers": share} for p in parts]}})
        assert recipe.resolve(model.config, cuda=False).remarks == remarks


@pytest.mark.parametrize("policy", ["am", "evict", "full"])
def test_counted_bytes_of_contexts_equal_the_allocated_bytes(policy, windowed):
    """The last 12 tokens stay in the windowed layers, before and after the compaction."""
    model, config = windowed(), PromptCacheConfig(policy=policy, ratio=0.1, queries=["context", "repeat"])
    engine = HFEngine(model, make_policy("full"))
    studied = engine.study([*range(3, 63)] * 5, config)
    context = studied.compacted(config)
    entries = config.first + config.last + config.kept(300)
    assert entries == (300 if policy == "full" else 31)
    assert len(context.layers) == 1
    assert context.nbytes + 8 * 2 * entries == context_bytes(entries, *policy_shape(model.config), 4)
    assert context.of_windows.allocated_bytes() == window_bytes(model.config, 300, 4) == 2 * 12 * ENTRY
    assert len(studied.queries) == 1
    engine.generate([[5, 6, 7]] * 4, SamplingConfig(4, seed=0, ignore_eos=True), context)
    own = 4 * 132 * ENTRY  # 3 tokens, padded to 4, and room for 128 more
    assert engine.peak_cache_bytes == context.nbytes + own + 4 * 2 * 12 * ENTRY


def test_a_plan_of_contexts_counts_their_windows(windowed):
    block = {"policy": "am", "ratio": 0.1, "queries": ["self_study", "repeat"], "study_samples": 2, "study_tokens": 7}
    wide, plain = windowed(), windowed(layer_types=["full_attention"] * 3)
    recipe = recipe_of(block)
    made, other = ({i.name: i for i in plan(recipe, m.config, cuda=False).items} for m in (wide, plain))
    window = 2 * 12 * ENTRY
    assert made["sliding windows of the context"].device == window
    assert made["sliding windows of the context"].when == "sampling"
    assert "a window of 12 tokens: 12 entries" in made["sliding windows of the context"].note
    assert "sliding windows of the context" not in other
    for name in ("context", "compacted context", "reference queries"):
        assert 3 * made[name].device == other[name].device
    own, copied = 512 + 100, 30 + 512 + 100
    assert made["KV cache of 8"].device == 8 * ((own + copied) * ENTRY + window)


STUDIED = torch.randint(3, 64, (300,), generator=torch.Generator().manual_seed(0)).tolist()


def recipe_of(prompt_cache: Any, tokens: int = 300, **keys: Any) -> Any:
    """Return an evaluation after compacted contexts of `tokens` tokens."""
    task = {"path": "x.jsonl", "columns": {"context": "text"}, "max_prompt_tokens": tokens, "limit": 4}
    mapping = {"kind": "eval", "model": "m", "output_dir": "o", "dtype": "float32", "tasks": {"one": task}}
    return make_recipe({**mapping, "samples": 2, "max_completion_length": 100, "prompt_cache": prompt_cache, **keys})


@pytest.mark.parametrize("policy", ["am", "evict", "full", "none"])
def test_counted_bytes_of_contexts_without_windows_equal_the_allocated_bytes(policy, new_model):
    model = new_model("qwen2")
    config = PromptCacheConfig(policy=policy, ratio=0.1, queries=["context", "window", "repeat"], window=40)
    studied = HFEngine(model, make_policy("full")).study(STUDIED, config)
    context = studied.compacted(config)
    shape = policy_shape(model.config)
    kept_entries = config.first + config.last + config.kept(300)
    for cached, entries in ((studied.whole, 300), (context, kept_entries)):
        positions = sum(layer.positions.numel() * 8 for layer in cached.layers)
        assert cached.nbytes + positions == context_bytes(entries, *shape, 4)
    assert studied.queries[0].shape[2] == stored_queries(config, 300, 2) == (1278 if config.chooses else 0)


@pytest.mark.parametrize("chunking", ["kv", "text"])
def test_queries_of_parts_and_on_policy_queries_are_counted(chunking, new_model):
    engine = HFEngine(new_model("qwen2"), make_policy("full"))
    parts = PromptCacheConfig(queries=["context", "repeat"], chunking=chunking, chunk=100, first=2, last=3)
    for config in (parts, replace(parts, most_queries=300)):
        stored = [studied.queries[0].shape[2] for _, studied in engine.study(STUDIED, config).parts]
        assert sum(stored) <= stored_queries(config, 300, 2) <= sum(stored) + 12  # parts have 98 or 99 tokens
    on_policy = PromptCacheConfig(queries=["context", "repeat"], on_policy=True)
    assert engine.study(STUDIED, on_policy).queries[0].shape[2] == stored_queries(on_policy, 300, 2) == 600


def test_the_memory_plan_counts_the_largest_context_and_the_largest_stage(new_model):
    config = new_model("qwen2").config
    memory_plan = plan(recipe_of([{"policy": "evict", "ratio": [0.1, 0.5]}, {"policy": "none"}]), config, cuda=False)
    items = {item.name: item for item in memory_plan.items}
    assert items["context"].device == context_bytes(300, 2, 2, 8, 4)
    assert items["compacted context"].device == context_bytes(150, 2, 2, 8, 4)
    assert items["reference queries"].device == 600 * 2 * 2 * 8 * 4  # two query heads per kv head
    with_50_queries = plan(recipe_of({"most_queries": 50}), config, cuda=False).items
    assert next(item.device for item in with_50_queries if item.name == "reference queries") == 50 * 2 * 2 * 8 * 4
    assert items["compacted context"].note.startswith("evict 0.1 ")
    assert "none " in items["compacted context"].note
    longer = plan(recipe_of({}, tokens=600), config, cuda=False)
    assert longer.device > plan(recipe_of({}), config, cuda=False).device
    assert "KV cache of 8" in {item.name for item in plan(recipe_of(None), config, cuda=False).items}


def test_doctor_shows_the_memory_of_contexts_and_says_that_their_time_is_unknown(model, tmp_path, capsys):
    (tmp_path / "e.yaml").write_text(recipe_of({"ratio": 0.05}, model=str(model)).as_yaml(), encoding="utf-8")
    assert main(["doctor", str(tmp_path / "e.yaml")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "compacted context" in out
    assert "am 0.05" in out
    assert "rollouts: " in out
    assert "contexts: the time is not predicted" in out
    assert main(["doctor", str(tmp_path / "e.yaml"), "prompt_cache=null"]) == 0
