"""The engine gives a policy the right inputs (keys, values, queries, positions), and the policy's memory of an entry
moves with the entry.

Replay is exact for any decision of a policy, so it would not detect a cache that gives the policy wrong inputs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dense_matched import DenseMatchedView
from tiny import model_of, prompts_of
from transformers import PreTrainedModel

from rollout import Rollout, SamplingConfig, make_engine
from sparse_rl.attention.interface import NO_MASK
from sparse_rl.methods.config import EvictingConfig
from sparse_rl.policies import Entries, Policy
from sparse_rl.trace import EvictionTrace

BUDGET, WINDOW, PERIOD = 14, 5, 3
LENGTHS = (2, 14, 17, 23, 40)
FRESH = -7.0


class SpyConfig(EvictingConfig):
    name = "spy"


class Spy(Policy):
    """A policy that keeps pseudo-random entries, records inputs, and marks each entry's memory with its position."""

    entry_memory = {"mark": FRESH, "queries": 0.0}
    every_query = True
    score_reads = ("keys", "values")

    def __init__(self) -> None:
        super().__init__(SpyConfig(budget=BUDGET, window=2, period=PERIOD))
        self.shown: list[tuple[int, Entries]] = []
        self.observed: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    @property
    def last_queries(self) -> int:
        return WINDOW

    def observe(self, layer: int, entries: Entries, queries: torch.Tensor, query_positions: torch.Tensor) -> None:
        real = query_positions < entries.seen[:, None]
        sees = entries.positions[..., None, :] <= query_positions[:, None, :, None]
        entries.state["queries"] += (sees & real[:, None, :, None]).sum(2)
        self.observed += [(layer, queries.clone(), query_positions.clone(), entries.seen.clone())]

    def score(self, layer: int, entries: Entries) -> torch.Tensor:
        inputs = {name: value.clone() for name, value in vars(entries).items() if isinstance(value, torch.Tensor)}
        state = {name: value.clone() for name, value in entries.state.items()}
        self.shown.append((layer, replace(entries, **inputs, state=state)))
        entries.state["mark"] = entries.positions.float()
        return torch.sin(entries.positions * 37.0 + 11 * torch.arange(entries.keys.shape[1])[:, None])


class Captures(DenseMatchedView):
    """The dense reference, extended to record each layer's queries, keys and values."""

    def __init__(self, trace: EvictionTrace) -> None:
        super().__init__(trace)
        self.qkv: dict[int, tuple[torch.Tensor, ...]] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        self.qkv[layer] = (query[0], key[0], value[0])
        return super().attend(layer, query, key, value, scaling)


def dense_qkv(model: PreTrainedModel, r: Rollout) -> dict[int, tuple[torch.Tensor, ...]]:
    """Return q [Hq, S, D], k and v [Hkv, S, D] of each layer for one sequence, from the dense reference."""
    view = Captures(r.trace)
    with torch.no_grad():
        model(input_ids=torch.tensor([r.prompt_ids + r.completion_ids]), attention_mask=NO_MASK, kv_view=view)
    return view.qkv


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize("row", range(len(LENGTHS)))
def test_a_policys_inputs_equal_the_dense_reference(row: int) -> None:
    """Keys, values, window of queries and positions. An entry's memory is as the policy left it; a new one is fresh."""
    model, prompts, spy = model_of("qwen3"), prompts_of("qwen3", LENGTHS), Spy()
    engine = make_engine("hf", model=model, policy=spy)
    r = engine.generate(prompts, SamplingConfig(24, seed=0, ignore_eos=True))[row]
    qkv, prompt = dense_qkv(model, r), len(r.prompt_ids)
    checked, last_compaction = 0, {}
    for layer, entries in spy.shown:
        q, k, v = qkv[layer]
        for i, seen in enumerate(entries.seen.tolist()):
            held = int(entries.lengths[i])
            positions = entries.positions[i, :, :held]
            heads = torch.arange(k.shape[0])[:, None]
            if seen >= len(r.trace) or not close(entries.keys[i, :, :held], k[heads, positions]):
                continue  # a row of another sequence
            checked += 1
            assert spy.schedule.due(prompt, seen)
            whole = layer not in last_compaction and seen <= max(prompt, BUDGET + PERIOD)
            assert held == (seen if whole else BUDGET + PERIOD)
            assert close(entries.values[i, :, :held], v[heads, positions])
            assert (positions.diff(dim=-1) > 0).all()
            assert int(positions[0, -1]) == seen - 1
            assert entries.queries is not None
            assert close(entries.queries[i], q[:, seen - WINDOW : seen])
            assert entries.scaling == k.shape[-1] ** -0.5

            first = torch.full_like(positions, FRESH, dtype=torch.float32)
            survived = positions < last_compaction.get(layer, 0)
            assert torch.equal(entries.state["mark"][i, :, :held], torch.where(survived, positions.float(), first))
            assert torch.equal(entries.state["queries"][i, :, :held], (seen - positions).float())
            last_compaction[layer] = seen
    expected_times = [seen for seen in range(prompt, len(r.trace)) if spy.schedule.due(prompt, seen)]
    assert checked == len(qkv) * len(expected_times)
    assert len(expected_times) >= 3


def test_every_query_is_observed_once() -> None:
    """In order, for prompt and completion."""
    model, spy = model_of("qwen3"), Spy()
    engine = make_engine("hf", model=model, policy=spy)
    (r,) = engine.generate(prompts_of("qwen3", [19]), SamplingConfig(24, seed=0, ignore_eos=True))
    for layer, (q, _, _) in dense_qkv(model, r).items():
        ours = [entry for entry in spy.observed if entry[0] == layer]
        positions = torch.cat([p[0] for _, _, p, _ in ours])
        assert positions.tolist() == list(range(len(r.trace) - 1))  # the last token is never fed
        assert close(torch.cat([queries[0] for _, queries, _, _ in ours], dim=1), q[:, :-1])
        assert [int(seen[0]) for _, _, _, seen in ours] == [19, *range(20, len(r.trace))]
