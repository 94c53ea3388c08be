"""The memory that `doctor` predicts for compacted contexts agrees with the memory that is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planned import plan
from test_memory import Peak

from rollout.context import PromptCacheConfig
from rollout.context.memory import (
    compaction_bytes,
    context_bytes,
    layerwise_bytes,
    reference_queries,
    stored_queries,
)
from rollout.hf import HFEngine
from sparse_rl.attention.families import cache_shape
from sparse_rl.commands.main import main
from sparse_rl.policies import make_policy
from sparse_rl.recipe import make_recipe

TOKENS = torch.randint(3, 64, (300,), generator=torch.Generator().manual_seed(0)).tolist()


def recipe_of(prompt_cache: Any, tokens: int = 300, **keys: Any) -> Any:
    """Return an evaluation after compacted contexts of `tokens` tokens."""
    task = {"path": "x.jsonl", "columns": {"context": "text"}, "max_prompt_tokens": tokens, "limit": 4}
    mapping = {"kind": "eval", "model": "m", "output_dir": "o", "dtype": "float32", "tasks": {"one": task}}
    return make_recipe({**mapping, "samples": 2, "max_completion_length": 100, "prompt_cache": prompt_cache, **keys})


@pytest.mark.parametrize("policy", ["am", "evict", "full", "none"])
def test_counted_bytes_of_contexts_equal_the_allocated_bytes(policy: str, new_model: Callable) -> None:
    """The bytes that are counted for the whole context and for the compacted one equal the allocated bytes. The number
    of reference queries is counted exactly, too."""
    model = new_model("qwen2")
    config = PromptCacheConfig(policy=policy, ratio=0.1, queries=["context", "window", "repeat"], window=40)
    studied = HFEngine(model, make_policy("full")).study(TOKENS, config)
    context = studied.compacted(config)
    shape = cache_shape(model.config)
    kept_entries = config.first + config.last + config.kept(300)
    for cached, entries in ((studied.whole, 300), (context, kept_entries)):
        positions = sum(layer.positions.numel() * 8 for layer in cached.layers)
        assert cached.nbytes + positions == context_bytes(entries, *shape, 4)
    assert studied.queries[0].shape[2] == reference_queries(config, 300, 2) == (1278 if config.chooses else 0)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"select": "omp", "ratio": 0.1},
        {"policy": "evict"},
        {"select": "omp_fast", "ratio": 0.1},
        {"policy": "evict", "select": "omp"},
        {"chunk": 70},
        {"most_queries": 90},
        {"on_policy": True},
        {"on_policy": True, "policy": "evict", "chunk": 70},
        {"chunking": "text", "chunk": 150},
        {"chunking": "text", "chunk": 150, "policy": "evict"},
    ],
)
@pytest.mark.few(4)
def test_measured_bytes_of_a_compaction_are_near_the_counted_bytes(
    changed: dict[str, Any], new_model: Callable
) -> None:
    """The measured peak is at most the counted bytes, and more than 1/2.5 of them. A full cache has 0."""
    config = PromptCacheConfig(**{"ratio": 0.2, **changed})
    model = new_model("qwen2")
    studied = HFEngine(model, make_policy("full")).study(TOKENS, config)
    with Peak() as peak:
        studied.compacted(config)
    counted = compaction_bytes(config, 300, 2, 2, 8) + layerwise_bytes(config, 300, model.config, 4)
    assert counted / 2.5 < peak.bytes <= counted
    assert compaction_bytes(PromptCacheConfig(policy="full"), 300, 2, 2, 8) == 0


@pytest.mark.parametrize("chunking", ["kv", "text"])
def test_queries_of_parts_and_on_policy_queries_are_counted(chunking: str, new_model: Callable) -> None:
    """The counted number of stored queries equals the stored one: that of all parts of a context, a subset of each, and
    none of the queries that are on-policy.
    """
    engine = HFEngine(new_model("qwen2"), make_policy("full"))
    parts = PromptCacheConfig(queries=["context", "repeat"], chunking=chunking, chunk=100, first=2, last=3)
    for config in (parts, replace(parts, most_queries=300)):
        stored = [studied.queries[0].shape[2] for _, studied in engine.study(TOKENS, config).parts]
        assert reference_queries(config, 300, 2) == 2 * (99 + 5 + 99)
        assert sum(stored) <= stored_queries(config, 300, 2) <= sum(stored) + 12  # parts have 98 or 99 tokens
    on_policy = PromptCacheConfig(queries=["context", "repeat"], on_policy=True)
    assert engine.study(TOKENS, on_policy).queries[0].shape[2] == stored_queries(on_policy, 300, 2) == 600


def test_with_many_queries_only_one_of_two_kv_heads_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above MOST_LOGITS products of queries and entries, kv heads are compacted one after the other, so the peak is
    half as large with two kv heads."""
    config = PromptCacheConfig()
    whole = compaction_bytes(config, 300, 2, 2, 8)
    monkeypatch.setattr("rollout.context.compact.MOST_LOGITS", 600 * 300)
    assert compaction_bytes(config, 300, 2, 2, 8) * 2 == whole


def test_the_memory_plan_counts_the_largest_context_and_the_largest_stage(new_model: Callable) -> None:
    """Of several caches, the plan counts the largest compacted context. Of the stages that follow each other (reading,
    compacting, answering) it counts the largest."""
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
    alternatives = [items["reading"], items["compaction"], items["KV cache of 8"]]
    assert [item.when for item in alternatives].count("sampling") == 1
    counted = next(item for item in alternatives if item.when == "sampling")
    assert counted.device == max(item.device for item in alternatives)
    longer = plan(recipe_of({}, tokens=600), config, cuda=False)
    assert longer.device > plan(recipe_of({}), config, cuda=False).device
    assert "KV cache of 8" in {item.name for item in plan(recipe_of(None), config, cuda=False).items}


def test_doctor_shows_the_memory_of_contexts_and_says_that_their_time_is_unknown(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "e.yaml").write_text(recipe_of({"ratio": 0.05}, model=str(model)).as_yaml(), encoding="utf-8")
    assert main(["doctor", str(tmp_path / "e.yaml")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "compacted context" in out
    assert "am 0.05" in out
    assert "rollouts: " in out
    assert "contexts: the time is not predicted" in out
    assert main(["doctor", str(tmp_path / "e.yaml"), "prompt_cache=null"]) == 0
    assert "contexts:" not in capsys.readouterr().out
