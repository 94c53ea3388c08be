"""A run by recipe that is resumed equals an uninterrupted run bit for bit, for each kind of training and policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from trainer_runs import GKV, SAMPLED, check_resumed, small

from sparse_rl.metrics import read_metrics
from sparse_rl.policies import make_policy
from sparse_rl.recipe import make_recipe

FOUR = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
KVPOP = {"policy": "kvpop", "budget": 12, "sinks": 2, "window": 4}
DELAYED = {**KVPOP, "scorer": {"name": "mlstm", "chunk": 16}}
DMS = {"policy": "dms", "sinks": 2, "window": 4, "compression": 2.0, "bias": 1.0}
AM = {"policy": "am", "budget": 12, "sinks": 1, "window": 4, "period": 6, "reference_queries": 16}
PAGED = {"policy": "clustered", "page": 4, "window": 4, "sinks": 1, "open_pages": 1}
PARTS = ({"policy": "lined", "window": 4, "period": 2}, {**PAGED, "compressor": "attention"})
LAYERED = {"policy": "layered", "parts": [{"layers": 1, "cache": part} for part in PARTS]}
LEARN = {"weight": 0.5, "learning_rate": 0.01, "boundary": {"queries": 8}}
RETROFIT = {"max_length": 128, "scorer_learning_rate": 0.05, "scorer_warmup_steps": 1, "packing": False, "top_k": None}
HELD_OUT = {"synthetic": {"task": "running_sum", "size": 8, "n": 4, "split": "evaluation"}}
# stopped in the second epoch, between two logged steps
LATER = {"at": 4, "max_steps": 6, "logging_steps": 3, "validation": {"data": HELD_OUT, "every": 3}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # case -> kind and keys of the recipe
    "distill, packed": ("distill", {"cache": GKV, "packing": True, **LATER}),
    "on-policy": ("distill", {"cache": GKV, "completions": "student", "max_completion_length": 12, **LATER}),
    "refreshed": ("distill", {"cache": GKV, "refresh_every": 2, **LATER}),
    "kvpop": ("kvpop", {"cache": KVPOP, **LATER}),
    "kvpop, packed": ("kvpop", {"cache": {**KVPOP, "scorer": "mlstm"}, **LATER, "packing": True, "max_length": 90}),
    "dms": ("kvpop", {"cache": DMS, "gates": {"anneal_steps": 10}}),
    "kvpop, windows": ("kvpop", {"cache": KVPOP, "windows": True}),
    "dms, windows": ("kvpop", {"cache": DMS, "windows": True}),
    **{f"{kind}, {cache['policy']}": (kind, {"cache": cache}) for kind in SAMPLED for cache in (AM, PAGED, LAYERED)},
    **{f"{kind}, frozen": (kind, {"cache": DELAYED}) for kind in SAMPLED},
    **{f"{kind}, learning": (kind, {"cache": DELAYED, "scorers": LEARN}) for kind in SAMPLED},
    **{f"{kind}, learning, windows": (kind, {"cache": KVPOP, "scorers": LEARN, "windows": True}) for kind in SAMPLED},
}
FAST = ("distill, packed", "kvpop", "grpo, learning")


@pytest.mark.parametrize("case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_a_resumed_run_equals_an_uninterrupted_run(case, tiny, learned, tmp_path, monkeypatch):
    """Scorers that learn change all of their weights, frozen ones none, and the gap is at most 1e-5."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    kind, keys = CASES[case]
    keys = dict(keys)
    model = tiny("gemma3_text", **FOUR) if keys.pop("windows", False) else tiny()
    has_scorers = kind in SAMPLED and keys["cache"]["policy"] == "kvpop"
    start = learned(make_policy(keys["cache"]), model) if has_scorers else model
    shared = {**small(start, tmp_path), **SAMPLED.get(kind, {"kind": kind, **RETROFIT}), "gradient_checkpointing": True}
    if kind == "kvpop":
        del shared["rollout"]
    final = check_resumed(lambda **changed: make_recipe({**shared, **changed}), tmp_path, **keys)
    lines = [line for line in read_metrics(tmp_path / "whole") if "loss" in line]
    gaps = [line["replay/gap_max"] for line in lines if "replay/gap_max" in line]
    assert bool(gaps) is (kind == "grpo")
    assert all(gap <= 1e-5 for gap in gaps)
    if has_scorers:
        before, after = (load_file(Path(folder) / "cache_scorer.safetensors") for folder in (start, final))
        assert {bool((before[name] != after[name]).any()) for name in before} == {"scorers" in keys}
        assert all(line["boundary_loss"] > 0 for line in lines if "scorers" in keys)
