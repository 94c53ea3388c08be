"""`sparse-rl doctor` counts layers with a sliding window at their window, beside the cache of the other layers, which a
policy bounds. The expected numbers are computed by hand, or are the bytes that the engine allocates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peaks import Peak, kept_for_backward
from planned import plan
from transformers import PreTrainedModel

from rollout import SamplingConfig
from rollout.context import PromptCacheConfig
from rollout.context.memory import compaction_bytes, context_bytes, layerwise_bytes, reference_queries, texts_read
from rollout.hf import HFEngine
from rollout.timing.estimate import Machine, context_seconds, sampling_seconds
from sparse_rl.attention.families import cache_shape, policy_shape
from sparse_rl.attention.interface import Replayed
from sparse_rl.attention.kernels.gather import gathered_bytes, held_bytes, make_chunks
from sparse_rl.attention.windows.view import WindowedView
from sparse_rl.commands.bench_points import prepare_benches
from sparse_rl.commands.prepared import resolve
from sparse_rl.methods.kvpop.scorers.registry import sketch_scorer
from sparse_rl.models.weights import meta_model
from sparse_rl.policies import make_policy
from sparse_rl.policies.cache import window_bytes
from sparse_rl.recipe import make_recipe
from trainer.memory import activation_bytes, count_parameters

GRPO = {
    "kind": "grpo", "model": "m", "output_dir": "o", "dtype": "float32", "rewards": ["boxed"],
    "data": {"synthetic": {"task": "running_sum", "size": 8}}, "max_completion_length": 100,
    "cache": {"policy": "streaming", "budget": 32, "period": 8}, "rollout": {"engine": "hf"},
}  # fmt: skip
TOKENS = 118  # of a row: a prompt of 18, and a completion; the last token is never fed
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
ENTRY = 2 * 2 * 8 * 4  # bytes of an entry of a layer: keys and values of 2 kv heads of size 8, in float32


@pytest.fixture
def windowed(new_model: Callable[..., PreTrainedModel]) -> Callable[..., PreTrainedModel]:
    """windowed(window, **config) -> a tiny Gemma 3 with two layers with that window, and a global layer."""

    def make(window: int = 12, **config: Any) -> PreTrainedModel:
        three = {"num_hidden_layers": 3, "layer_types": LAYERS, "sliding_window": window}
        return new_model("gemma3_text", **{**three, **config})

    return make


def items_of(model: PreTrainedModel, **keys: Any) -> dict[str, Any]:
    return {item.name: item for item in plan(make_recipe({**GRPO, **keys}), model.config, cuda=False).items}


# ---- parameters and activations --------------------------------------------------------------------------------------


def test_parameters_include_all_norms_and_tied_embeddings_once(windowed: Callable[..., PreTrainedModel]) -> None:
    model = windowed()
    attention = 32 * (32 + 16 + 16 + 32) + 2 * 8  # and a norm of queries and one of keys
    expected = 64 * 32 + 32 + 3 * (attention + 4 * 32 + 3 * 32 * 48)
    assert plan(make_recipe(GRPO), model.config, cuda=False).parameters == expected
    assert sum(weight.numel() for weight in model.parameters()) == expected


def test_activations_include_four_norms_of_a_layer(windowed: Callable[..., PreTrainedModel]) -> None:
    """Control: a layer of Qwen3 has two norms."""
    model = meta_model(windowed().config)
    kept = (6 + 4) * 32 + 8 * (3 * 4 + 4 * 2) + 4 * 48
    assert activation_bytes(model, 10, 2, checkpointing=False, logits=False) == 10 * 2 * 3 * kept
    assert activation_bytes(model, 10, 2, checkpointing=True, logits=False) == 10 * 2 * (3 * 32 + kept)


def test_measured_activations_of_a_layer_are_near_the_counted_ones(windowed: Callable[..., PreTrainedModel]) -> None:
    """The layer also keeps what its norms compute: at most 10 % more in float32."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64}
    model = windowed(**sizes)
    hidden, positions = torch.randn(1, 500, 256, requires_grad=True), torch.arange(500)[None]
    rotation = model.model.rotary_emb(hidden, positions, "full_attention")
    where = {"position_embeddings": rotation, "attention_mask": None, "position_ids": positions}
    measured = kept_for_backward(model, lambda: model.model.layers[2](hidden, **where))
    counted = activation_bytes(meta_model(model.config), 500, 4, checkpointing=False, logits=False) / 3
    assert counted <= measured <= 1.1 * counted


# ---- caches of sampling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "held"), [(12, 12), (40, 40), (500, 117)])
def test_window_layers_hold_their_window_under_any_policy(
    windowed: Callable[..., PreTrainedModel], window: int, held: int
) -> None:
    model = windowed(window)
    for cache in (GRPO["cache"], "full", {"policy": "h2o", "budget": 32}):
        item = items_of(model, cache=cache)["sliding windows of 8"]
        assert item.device == 8 * 2 * held * ENTRY
        assert item.when == "sampling"
        assert f"2 layers with a window of {window} tokens: {held} entries" in item.note


def test_a_policy_counts_the_global_layers(windowed: Callable[..., PreTrainedModel]) -> None:
    """One of three layers is global: 40 entries with a position each. The note compares it with a full cache, without
    and with the other layers."""
    item = items_of(windowed())["KV cache of 8"]
    assert item.device == 8 * 40 * (ENTRY + 2 * 8)
    assert "40 entries, 5.1 kB per sequence; a full cache: 15.0 kB, 18.0 kB with sliding windows" in item.note
    assert (40 * ENTRY, 117 * ENTRY, (117 + 2 * 12) * ENTRY) == (5120, 14976, 18048)
    assert "windows" not in items_of(windowed(layer_types=["full_attention"] * 3))["KV cache of 8"].note


@pytest.mark.parametrize(("family", "window"), [("gemma3_text", 12), ("gemma3_text", 60), ("olmo3", 12)])
def test_planned_bytes_equal_the_allocated_bytes(new_model: Callable, family: str, window: int) -> None:
    """Keys and values of both kinds of layers equal the bytes that the hf engine allocates. Control: the bytes of a
    model whose layers are all global, or all windowed, differ."""
    model = new_model(family, num_hidden_layers=3, layer_types=LAYERS, sliding_window=window)
    engine = HFEngine(model, make_policy(GRPO["cache"]))
    engine.generate([[5] * 18] * 8, SamplingConfig(50, seed=0, ignore_eos=True))
    items = items_of(model, max_completion_length=50)
    positions = 8 * 40 * 2 * 8
    planned = items["KV cache of 8"].device - positions + items["sliding windows of 8"].device
    assert planned == engine.peak_cache_bytes == 8 * (40 + 2 * window) * ENTRY
    assert planned not in {8 * 3 * 40 * ENTRY, 8 * 3 * window * ENTRY}


def test_an_evaluation_counts_windows_once_for_all_caches(windowed: Callable[..., PreTrainedModel]) -> None:
    task = {"kind": "eval", "model": "m", "output_dir": "o", "dtype": "float32", "tasks": {"t": GRPO["data"]}}
    sweep = {"sweep": {"policy": ["full", "streaming"], "cache": {"budget": [16, 32]}}, "max_completion_length": 100}
    made = plan(make_recipe({**task, **sweep, "samples": 4, "rollout": {"engine": "hf"}}), windowed().config)
    of_windows = [item for item in made.items if item.name.startswith("sliding windows")]
    (largest,) = [item for item in made.items if item.name.startswith("KV") and item.when == "sampling"]
    assert len(of_windows) == 1
    assert made.device == 4 * made.parameters + largest.device + of_windows[0].device


# ---- training --------------------------------------------------------------------------------------------------------


def test_traces_record_all_layers(windowed: Callable[..., PreTrainedModel]) -> None:
    """evict_at has 4 bytes for each layer of both kinds; pages are recorded for the global layer alone."""
    assert items_of(windowed())["traces"].host == 8 * TOKENS * 3 * 2 * 4
    pages = {"policy": "clustered", "page": 4, "window": 8, "sinks": 1, "open_pages": 2}
    recorded = make_policy(pages).config.recorded
    assert recorded > 4
    assert items_of(windowed(), cache=pages)["traces"].host == 8 * TOKENS * 2 * (recorded + 2 * 4)


@pytest.mark.parametrize(("window", "names"), [(12, {"gathered keys"}), (60, {"gathered keys, sliding windows"})])
def test_the_view_that_holds_more_is_counted(
    windowed: Callable[..., PreTrainedModel], window: int, names: set[str]
) -> None:
    """With checkpointing, layers are replayed one at a time. Without it, all layers of both kinds hold their keys."""
    items = items_of(windowed(window))
    assert {name for name in items if name.startswith("gathered")} == names
    of_policy = gathered_bytes(16, 18, TOKENS, 40, 8, 8, 1)
    of_window = gathered_bytes(16, 0, TOKENS, window, 8, 8, 1)
    assert max(of_policy, of_window) == items[names.pop()].device
    items = items_of(windowed(window), gradient_checkpointing=False)
    assert items["gathered keys"].device == of_policy
    assert items["gathered keys, sliding windows"].device == 2 * of_window


def test_windows_are_replayed_if_no_eviction_is(windowed: Callable[..., PreTrainedModel]) -> None:
    """A full cache records no evictions that are replayed, but the windows stay. Control: no sequence is longer than
    the window."""
    for keys in ({"cache": "full"}, {"train_attention": "full"}):
        items = items_of(windowed(60), **keys)
        assert "gathered keys, sliding windows" in items
        assert "gathered keys" not in items
        assert "traces" not in items
        assert not any(name.startswith("gathered") for name in items_of(windowed(TOKENS), **keys))


@pytest.mark.parametrize(("length", "window"), [(300, 40), (300, 299), (1000, 130)])
def test_counted_bytes_of_a_windows_gathered_keys_are_exact(length: int, window: int) -> None:
    replayed = Replayed(
        rows=3, prompt=90, length=length, heads=4, kv_heads=2, head_dim=16, layers=1, kernel="gather", itemsize=8,
        model_itemsize=4, cuda=False,
    )  # fmt: skip
    ((name, size, _),) = WindowedView.holds(window, replayed)
    evict_at = (torch.arange(length, dtype=torch.int32) + window).expand(6, -1)
    assert name == "gathered keys, sliding windows"
    assert size == held_bytes(make_chunks(evict_at), 16, 8)
    assert WindowedView.holds(length, replayed) == []


def test_scorers_are_those_of_the_global_layers(windowed: Callable[..., PreTrainedModel]) -> None:
    recipe = {key: GRPO[key] for key in ("model", "output_dir", "dtype", "data")} | {"kind": "kvpop", "max_length": 600}
    cache = {"policy": "kvpop", "window": 64, "budget": 128, "scorer": "linear"}
    model = windowed(200)
    made = plan(make_recipe({**recipe, "cache": cache}), model.config, cuda=False)
    scorer = count_parameters(sketch_scorer(make_policy(cache).config.scorer, heads=2, dim=8))
    assert made.parameters == count_parameters(model) + scorer
    names = {item.name for item in made.items}
    assert "gathered keys, sliding windows" in names or "future attention" in names


def test_a_mixed_policy_counts_its_ranges_in_global_layers(windowed: Callable[..., PreTrainedModel]) -> None:
    """Two of four layers are global, and each has a policy of its own. The remark for other parts counts the same."""
    model = windowed(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    parts = [{"layers": 1, "cache": {"policy": "lined", "window": 8}}, {"layers": 1, "cache": "full"}]
    items = items_of(model, cache={"policy": "layered", "parts": parts})
    assert items["sliding windows of 8"].device == 8 * 2 * 12 * ENTRY
    notes = [item.note for name, item in items.items() if name.startswith("KV cache")]
    assert any("full in 1 layers: 117 entries, 15.0 kB per sequence; a full cache: 15.0 kB" in note for note in notes)
    assert not any("with sliding windows" in note for note in notes)
    for share, remarks in ((1, []), (2, ["layered: the 2 layers under the policy are: 1 lined, 1 full"])):
        recipe = make_recipe({**GRPO, "cache": {"policy": "layered", "parts": [{**p, "layers": share} for p in parts]}})
        assert resolve(recipe, model.config, cuda=False).remarks == remarks


# ---- contexts --------------------------------------------------------------------------------------------------------


def contexts_of(prompt_cache: Any) -> Any:
    task = {"path": "x.jsonl", "columns": {"context": "text"}, "max_prompt_tokens": 300, "limit": 4}
    mapping = {"kind": "eval", "model": "m", "output_dir": "o", "dtype": "float32", "tasks": {"one": task}}
    return make_recipe({**mapping, "samples": 2, "max_completion_length": 100, "prompt_cache": prompt_cache})


@pytest.mark.parametrize("policy", ["am", "evict", "full"])
def test_counted_bytes_of_contexts_equal_the_allocated_bytes(
    policy: str, windowed: Callable[..., PreTrainedModel]
) -> None:
    """The compacted context has the global layer's entries. The last 12 tokens stay in the other layers, before and
    after the compaction. Each question gets a copy of them."""
    model, config = windowed(), PromptCacheConfig(policy=policy, ratio=0.1, queries=["context", "repeat"])
    engine = HFEngine(model, make_policy("full"))
    studied = engine.study([*range(3, 63)] * 5, config)
    context = studied.compacted(config)
    entries = config.first + config.last + config.kept(300)
    assert entries == (300 if policy == "full" else 31)
    assert len(context.layers) == 1
    assert context.nbytes + 8 * 2 * entries == context_bytes(entries, *policy_shape(model.config), 4)
    assert context.of_windows is not None
    assert context.of_windows.nbytes == window_bytes(model.config, 300, 4) == 2 * 12 * ENTRY
    assert len(studied.queries) == 1
    engine.generate([[5, 6, 7]] * 4, SamplingConfig(4, seed=0, ignore_eos=True), context)
    own = 4 * 132 * ENTRY  # 3 tokens, padded to 4, and room for 128 more
    assert engine.peak_cache_bytes == context.nbytes + own + 4 * 2 * 12 * ENTRY


def test_a_plan_of_contexts_counts_their_windows(windowed: Callable[..., PreTrainedModel]) -> None:
    """Windows are counted for the context, for each of 8 questions, and for each text that asks about the context.
    Reference queries are counted for the global layer. Control: the plan of a model without windows has no such item.
    """
    block = {"policy": "am", "ratio": 0.1, "queries": ["self_study", "repeat"], "study_samples": 2, "study_tokens": 7}
    wide, plain = windowed(), windowed(layer_types=["full_attention"] * 3)
    recipe = contexts_of(block)
    made, other = ({i.name: i for i in plan(recipe, m.config, cuda=False).items} for m in (wide, plain))
    window = 2 * 12 * ENTRY
    assert made["sliding windows of the context"].device == window
    assert made["sliding windows of the context"].when == "sampling"
    assert "the last 12 tokens" in made["sliding windows of the context"].note
    assert "sliding windows of the context" not in other
    for name in ("context", "compacted context", "reference queries"):
        assert 3 * made[name].device == other[name].device
    (config,), own, copied = recipe.prompt_caches(), 512 + 100, 30 + 512 + 100
    assert made["KV cache of 8"].device == 8 * ((own + copied) * ENTRY + window)
    assert texts_read(config) == 6 * 2 + 1
    queries = reference_queries(config, 300, 2) * 2 * 8 * 4
    assert other["reading"].device - made["reading"].device == 2 * queries - 13 * window


@pytest.mark.parametrize("window", [12, 200])
def test_measured_bytes_of_on_policy_queries_are_near_the_counted_bytes(
    windowed: Callable[..., PreTrainedModel], window: int
) -> None:
    """The pass over the texts takes at most the counted bytes."""
    model, config = windowed(window), PromptCacheConfig(policy="evict", queries=["repeat"], on_policy=True, ratio=0.1)
    studied = HFEngine(model, make_policy("full")).study([*range(3, 63)] * 5, config)
    with Peak() as peak:
        studied.compacted(config)
    counted = compaction_bytes(config, 300, 2, 2, 8) + layerwise_bytes(config, 300, model.config, 4)
    assert counted / 2.5 < peak.bytes <= counted


# ---- benches ---------------------------------------------------------------------------------------------------------


def test_a_bench_computes_windows_beside_the_policy(
    windowed: Callable[..., PreTrainedModel], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, machine = windowed(), Machine(1e12, 1e10, 1e-4, 1e-3)
    model.config.save_pretrained(tmp_path / "m")
    monkeypatch.setattr("sparse_rl.commands.bench_points.measured_machine", lambda *_: machine)
    bench = {"kind": "bench", "model": str(tmp_path / "m"), "output_dir": "o", "dtype": "float32", "batch": [4]}
    bench |= {"random_weights": True, "prompt_tokens": 18, "length": [118], "rollout": {"engine": "hf"}}
    (made,) = prepare_benches(make_recipe({**bench, "cache": GRPO["cache"]}))
    memory = made._memory(make_policy(GRPO["cache"]), 4, 118)
    assert memory["keys and values"] == 4 * 40 * ENTRY
    assert memory["sliding windows"] == 4 * 2 * 12 * ENTRY
    assert memory["trace"] == 4 * 118 * 3 * 2 * 4


def test_estimated_times_count_windows_at_their_length(windowed: Callable[..., PreTrainedModel]) -> None:
    """A step moves the entries of both kinds of layers; a reading attends to min(window, tokens) tokens in a layer with
    a window. The two layers count as a third of three full layers if the window is as long as the text."""
    memory_bound = Machine(1e30, 1.0, 0.0, 0.0)  # seconds are bytes
    policy = make_policy(GRPO["cache"])
    seconds = [
        sampling_seconds(memory_bound, windowed(window).config, 0, policy, 4, 18, 118, "float32", False)
        for window in (12, 24, 68, 1000)
    ]
    assert seconds == [100 * 4 * (40 + 2 * held) * ENTRY for held in (12, 24, 68, 68)]
    compute_bound, config = Machine(1.0, 1e30, 0.0, 0.0), PromptCacheConfig(policy="full")
    pairs = [
        context_seconds(compute_bound, windowed(window).config, 0, config, 400) / (2 * 4 * 8) for window in (10, 1000)
    ]
    assert pairs == [400 * 400 + 2 * 400 * 20, 3 * 400 * 400]
    assert cache_shape(windowed().config)[0] == 3
