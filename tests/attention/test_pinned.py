"""Every view copies a layer's sections from pinned memory if its device is no CPU, also where views stand beside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import model_of
from torch import Tensor

from rollout import SamplingConfig, make_engine
from sparse_rl.attention.views import make_view
from sparse_rl.methods.config import KVpopPolicyConfig
from sparse_rl.methods.kvpop.view import LearnedView
from sparse_rl.trace import batch_traces

GKV = {"policy": "gkv", "budget": 12, "window": 4, "period": 4}
PAGES = {"policy": "clustered", "page": 4, "window": 8, "open_pages": 2}
PARTS = [{"layers": 1, "cache": GKV}, {"layers": 1, "cache": PAGES}]
CASES: list[tuple[str, dict[str, Any], set[str]]] = [
    ("qwen3", GKV, {"evict_at"}),
    ("qwen3", {"policy": "am", "budget": 12, "window": 4, "period": 4}, {"evict_at"}),
    ("qwen3", PAGES, {"opened"}),
    ("qwen3", {**PAGES, "compressor": "attention"}, {"opened", "pi"}),
    ("qwen3", {"policy": "layered", "parts": PARTS}, {"evict_at", "opened"}),
    ("qwen3_moe", GKV, {"evict_at", "routed"}),
    ("gemma3_text", GKV, {"evict_at"}),
]


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Let pin_memory return a copy, because only a GPU's driver can pin; return the addresses of the copies."""
    copies: list[Tensor] = []
    addresses: set[int] = set()

    def pin(section: Tensor) -> Tensor:
        copies.append(section.clone())
        addresses.add(copies[-1].data_ptr())
        return copies[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    return addresses


def sections(view: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the sections [layers, ...] that a view and the views in it keep in host memory."""
    for name, value in vars(view).items():
        if name in ("evict_at", "opened", "pi", "routed", "recorded") and value is not None:
            yield name, value
        elif name == "of_layer":
            yield from (pair for inner, _ in value.values() for pair in sections(inner))
        elif name == "routers" and value is not None:
            yield from sections(value)


@pytest.mark.parametrize(
    ("family", "cache", "names"),
    CASES,
    ids=lambda value: str(sorted(value))[:40] if isinstance(value, set) else str(value)[:40],
)
def test_every_view_pins_its_sections_on_a_device_and_none_on_a_cpu(
    family: str, cache: dict, names: set, locked: set[int]
) -> None:
    model = model_of(family)
    sampling = SamplingConfig(max_tokens=24, seed=1, ignore_eos=True)
    traces = [r.trace for r in make_engine("hf", model=model, policy=cache).generate([list(range(5, 40))], sampling)]
    kept = list(sections(make_view(traces, [0], len(traces[0]), "cpu")))
    assert {name for name, _ in kept} == names
    assert not locked
    kept = list(sections(make_view(traces, [0], len(traces[0]), "meta")))
    assert {name for name, _ in kept} == names
    assert all(section.data_ptr() in locked for _, section in kept)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_learned_views_pin_recorded_evictions(device: str, locked: set[int]) -> None:
    engine = make_engine("hf", model=model_of("qwen3"), policy=GKV)
    (rollout,) = engine.generate([list(range(5, 40))], SamplingConfig(max_tokens=8, seed=1, ignore_eos=True))
    recorded = batch_traces([rollout.trace], [0], len(rollout.trace))["evict_at"]
    policy = KVpopPolicyConfig(budget=16, sinks=4, window=4)
    view = LearnedView((), policy, torch.empty(1, dtype=torch.long, device=device), recorded=recorded)
    ((_, section),) = sections(view)
    assert (section.data_ptr() in locked) is (device == "meta")
