"""Queries and keys that a model hands out under a trace, and the scores made from them, against plain numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny import model_of, prompts_of

from rollout import SamplingConfig
from rollout.attended import LayerAttention, attention_cells, cell_size, hand_out, window_scores
from rollout.hf import HFEngine
from sparse_rl.errors import UserError
from sparse_rl.policies import make_policy
from sparse_rl.trace import NEVER


def made(length: int, seed: int, heads: int = 2, group: int = 2, evicts: bool = True) -> LayerAttention:
    """Return random queries and keys, with tokens that are evicted at random times, or never."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(heads * group, length, 4, generator=generator)
    key = torch.randn(heads, length, 4, generator=generator)
    times = torch.arange(length) + torch.randint(1, length, (heads, length), generator=generator)
    never = torch.rand(heads, length, generator=generator) < (0.3 if evicts else 2.0)
    return LayerAttention(0, query, key, times.masked_fill(never, NEVER).int(), 0.5)


def probabilities(layer: LayerAttention, head: int, query: int) -> np.ndarray:
    """Return the attention of one query head and query to every token; 0 for tokens that it does not see."""
    kv_head = head // layer.group
    weights = np.zeros(layer.key.shape[1])
    for token in range(query + 1):
        if query < int(layer.evict_at[kv_head, token]):
            dot = float(layer.query[head, query].double() @ layer.key[kv_head, token].double())
            weights[token] = math.exp(dot * layer.scaling)
    return weights / weights.sum()


@pytest.mark.parametrize(("first", "last"), [(12, 16), (8, 9), (1, 16), (4, 12)])
@pytest.mark.parametrize("evicts", [True, False])
def test_scores_of_a_window_equal_a_loop(first: int, last: int, evicts: bool) -> None:
    layer = made(16, first, evicts=evicts)
    scores = window_scores(layer, first, last)
    assert scores.shape == (2, first)
    for head in range(2):
        members = range(head * layer.group, (head + 1) * layer.group)
        per_query = [np.max([probabilities(layer, h, q) for h in members], 0) for q in range(first, last)]
        assert scores[head].numpy() == pytest.approx(np.mean(per_query, 0)[:first], abs=1e-6)


def test_scores_that_are_known_by_hand() -> None:
    """Keys of zeros give equal attention to all seen tokens: 1/4 of each query; token 0 is evicted for the second."""
    zeros = torch.zeros(1, 5, 2)
    evict_at = torch.tensor([[4, NEVER, NEVER, NEVER, NEVER]], dtype=torch.int32)
    scores = window_scores(LayerAttention(0, zeros, zeros, evict_at, 1.0), 3, 5)
    assert scores.tolist() == [[0.125, 0.25, 0.25]]


@pytest.mark.parametrize("most", [100, 13, 5])
@pytest.mark.parametrize("heads", [[1], [2, 3]])
def test_cells_of_a_map_equal_a_loop(most: int, heads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.attended.CHUNK", 4)
    layer, length = made(25, 3), 25
    cells, size = attention_cells(layer, heads, most), cell_size(length, most)
    assert len(cells) <= most
    maps = [np.stack([probabilities(layer, head, q) for q in range(length)]) for head in heads]
    mean = np.mean(maps, 0)
    for i, row in enumerate(cells.tolist()):
        for j, value in enumerate(row):
            block = mean[i * size : (i + 1) * size, j * size : (j + 1) * size]
            if block.max() == 0:
                assert math.isnan(value)
            else:
                assert value == pytest.approx(block.max(), abs=1e-6)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_a_model_hands_out_the_layers_without_windows(family: str) -> None:
    """They are those of transformers' own eager attention, for a sequence without evictions."""
    model = model_of(family)
    (rollout,) = HFEngine(model, make_policy("full")).generate(
        prompts_of(family, [6]), SamplingConfig(max_tokens=8, seed=0, ignore_eos=True)
    )
    layers: list[LayerAttention] = []
    hand_out(model, rollout, layers.append)
    assert [layer.index for layer in layers] == rollout.trace.global_layers
    tokens = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    model.set_attn_implementation("eager")
    try:
        weights = model(input_ids=tokens[:, :-1], output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sparse_rl")
    for layer in layers:
        ours = torch.stack([torch.from_numpy(probabilities(layer, head, 12)) for head in range(len(layer.query))])
        assert torch.allclose(ours.float(), weights[layer.index][0, :, 12], atol=1e-5)


def test_a_trace_that_does_not_fit_is_refused() -> None:
    engine = HFEngine(model_of("qwen3"), make_policy("full"))
    (rollout,) = engine.generate(prompts_of("qwen3", [4]), SamplingConfig(max_tokens=3, seed=0))
    rollout.completion_ids = rollout.completion_ids[:-1]
    with pytest.raises(UserError, match="does not fit the model and the sequence"):
        hand_out(model_of("qwen3"), rollout, print)
