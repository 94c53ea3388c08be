"""Pictures of attention: their numbers equal slow loops over plain numbers, and cases that are known by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sparse_rl.analysis import attention
from sparse_rl.analysis.attention import (
    LEVELS,
    SHARES,
    attended_levels,
    counted_tokens,
    draw_attention,
    map_numbers,
    observation_windows,
    overlap_numbers,
    overlaps,
    read_shares,
    recall_numbers,
    sparsity,
    sparsity_numbers,
)
from sparse_rl.errors import UserError
from sparse_rl.methods.pages.policy import Pages
from sparse_rl.trace import NEVER, EvictionTrace

WORDS = {"model": "tiny", "method": "gkv", "policy": "gkv, budget 8", "note": ""}


def random_windows(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return scores of 4 windows [2, tokens before the window], with ties, and the tokens that are held."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(1, 40, (2, 40), generator=generator) + torch.arange(40)
    scores, held = [], []
    for first in (24, 28, 32, 36):
        scores.append(torch.randint(0, 9, (2, first), generator=generator) / 8)
        held.append(ends[:, :first] > first)
    return scores, held


def best(scores: Tensor, held: Tensor, percent: int) -> set[int]:
    """Return the tokens of one head with the highest scores, by sorting."""
    tokens = [token for token in range(len(scores)) if held[token]]
    ranked = sorted(tokens, key=lambda token: (-float(scores[token]), token))
    return set(ranked[: math.ceil(percent * len(tokens) / 100)])


@pytest.mark.parametrize("seed", range(3))
def test_overlaps_equal_sets_of_tokens(seed):
    scores, held = random_windows(seed)
    result = overlaps(scores, held)
    assert result.shape == (5, len(SHARES))
    for i, percent in enumerate(SHARES):
        expected = []
        for head in range(2):
            sets = [best(s[head], h[head], percent) for s, h in zip(scores, held, strict=True)]
            common = [best(s[head, :24], held[-1][head, :24], percent) for s in scores]
            rows = [*sets[:-1], set().union(*sets[:-1])]
            shares = [len(sets[-1] & row) / len(sets[-1]) for row in rows]
            expected.append([*shares, len(common[-1] & set().union(*common[:-1])) / len(common[-1])])
        assert result[:, i].numpy() == pytest.approx(np.mean(expected, 0))


def test_windows_that_agree_overlap_wholly_and_windows_that_differ_not_at_all():
    scores = [torch.zeros(1, first) for first in (17, 18, 19, 20)]  # 5 % of each is one token
    for score, token in zip(scores, (3, 4, 5, 3), strict=True):
        score[0, token] = 1.0
    result = overlaps(scores, [torch.ones_like(score, dtype=torch.bool) for score in scores])
    assert result[:, 0].tolist() == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert result[:, -1].tolist() == pytest.approx([17 / 20, 18 / 20, 19 / 20, 19 / 20, 1.0])


def test_earlier_tokens_win_ties():
    levels = attended_levels(torch.ones(1, 20), torch.arange(20)[None] >= 10)
    assert (levels[0] <= SHARES.index(20)).nonzero()[:, 0].tolist() == [10, 11]


@pytest.mark.parametrize(
    ("prompt", "length", "last", "windows"),
    [
        (100, 2000, None, [(1487, 1615), (1615, 1743), (1743, 1871), (1871, 1999)]),
        (10, 81, None, [(40, 50), (50, 60), (60, 70), (70, 80)]),  # half of 80 fed tokens
        (70, 81, None, [(72, 74), (74, 76), (76, 78), (78, 80)]),  # 10 fed tokens of the completion
        (10, 81, 8, [(72, 74), (74, 76), (76, 78), (78, 80)]),
        (78, 81, None, []),
    ],
)
def test_windows_are_at_the_end_of_the_completion(prompt, length, last, windows):
    assert observation_windows(prompt, length, last) == windows


def test_sparsity_equals_a_counting_loop():
    scores = torch.rand(3, 30, generator=torch.Generator().manual_seed(0)) ** 4
    counted = torch.rand(3, 30, generator=torch.Generator().manual_seed(1)) < 0.6
    result = sparsity(scores, counted)
    for level, value in zip(LEVELS, result.tolist(), strict=True):
        shares = []
        for head in range(3):
            tokens = [token for token in range(30) if counted[head, token]]
            bound = level * float(scores[head].max())
            shares.append(sum(float(scores[head, token]) < bound for token in tokens) / len(tokens))
        assert value == pytest.approx(np.mean(shares))


def test_sparsity_of_equal_scores_is_0_and_of_one_large_score_almost_1():
    everything = torch.ones(1, 10, dtype=torch.bool)
    assert sparsity(torch.full((1, 10), 0.1), everything).tolist() == [0.0] * len(LEVELS)
    one = torch.full((1, 10), 1e-5)
    one[0, 2] = 0.9
    assert sparsity(one, everything).tolist() == pytest.approx([0.9] * len(LEVELS))


def test_counted_tokens_are_the_last_ones_of_a_full_cache_and_the_held_ones_of_another():
    full = EvictionTrace.dense(1, 1, 100)
    assert counted_tokens(full, 0, 80, 10)[0].nonzero()[:, 0].tolist() == list(range(70, 80))
    evict_at = torch.full((1, 1, 100), NEVER)
    evict_at[..., 5:75] = 90
    evict_at[..., 3] = 99  # seen by the last query, at position 98
    evicted = EvictionTrace(evict_at.int(), validate=False)
    assert counted_tokens(evicted, 0, 80, 2)[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4, *range(75, 80)]


def test_recall_leaves_out_sequences_without_competition():
    recalls = [torch.tensor([[0.5, 1.0]]).double(), torch.full((1, 2), math.nan).double()]
    numbers = recall_numbers(recalls, [3])
    assert numbers == {"sequences": 1, "layers": [3], "recall": [[0.5, 1.0]], "mean": 0.75}
    with pytest.raises(UserError, match="no sequence is so long"):
        recall_numbers(recalls[1:], [3])


def test_too_short_sequences_are_refused():
    with pytest.raises(UserError, match="no completion is long enough for 4 windows"):
        overlap_numbers({}, [])
    with pytest.raises(UserError, match="no sequence has more than 16 tokens"):
        sparsity_numbers({}, [])


PAGES = Pages(size=3, window=2, sinks=1, most=2, weighed=True, valued=True)


def paged_trace(length: int, prompt: int) -> EvictionTrace:
    """Return a trace in which each query opens two pages that are closed for it, if there are two."""
    closed_at = PAGES.closing(prompt, length)
    opened = torch.full((1, 1, length, 2), -1, dtype=torch.int16)
    for query in range(length - 1):
        closed = int((closed_at <= query).sum())
        pages = sorted({query % closed, query * 2 % closed}) if closed else []
        opened[0, 0, query, : len(pages)] = torch.tensor(pages, dtype=torch.int16)
    further = {"opened": opened, "closed_at": closed_at, "paged_with": PAGES.settings()}
    return EvictionTrace(torch.full((1, 1, length), NEVER, dtype=torch.int32), further)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_shares_of_read_pairs_equal_a_loop(size, monkeypatch):
    monkeypatch.setattr("sparse_rl.analysis.attention.CHUNK", 4)
    trace = paged_trace(24, 5)
    opened, closed_at = trace.further["opened"][0, 0, :23], trace.further["closed_at"]
    read, possible = np.zeros((2, -(-23 // size), -(-23 // size)))
    for query in range(23):
        for token in range(query + 1):
            page = (token - PAGES.sinks) // PAGES.size
            closed = token >= PAGES.sinks and page < len(closed_at) and query >= int(closed_at[page])
            read[query // size, token // size] += not closed or page in opened[query].tolist()
            possible[query // size, token // size] += 1
    shares = read_shares(opened, closed_at, PAGES, size)
    assert shares.numpy() == pytest.approx(read / np.maximum(possible, 1), abs=1e-6)


def many(layers: int, heads: int) -> dict[str, dict[str, Any]]:
    """Return made numbers of every figure, for so large a model."""
    generator = torch.Generator().manual_seed(0)
    by_layer = {layer: [torch.rand(5, len(SHARES), generator=generator).double()] for layer in range(layers)}
    levels = {layer: [torch.rand(len(LEVELS), generator=generator).double()] for layer in range(layers)}
    source = {**WORDS, **sparsity_numbers(levels, [500.0])}
    recall = recall_numbers([torch.rand(layers, heads, generator=generator).double()], range(layers))
    return {
        "overlap": {**WORDS, **overlap_numbers(by_layer, [128])},
        "sparsity": {"levels": list(LEVELS), "sources": [source, source | {"note": "raw scores"}]},
        "recall": {**WORDS, "k": 4, "teacher": "start", **recall},
    }


@pytest.mark.parametrize("name", ["overlap", "sparsity", "recall"])
@pytest.mark.few(1)
def test_large_models_are_drawn(name, tmp_path):
    getattr(attention, f"draw_{name}")(many(28, 8)[name], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


EVICTED = EvictionTrace((torch.arange(24) + 12).masked_fill(torch.arange(24) > 10, NEVER).int().expand(1, 1, -1))


@pytest.mark.parametrize("trace", [paged_trace(24, 5), EvictionTrace.dense(1, 1, 24), EVICTED])
def test_maps_are_drawn_with_and_without_pages(trace, tmp_path):
    cells = torch.rand(12, 12).masked_fill(torch.ones(12, 12).triu(1) > 0, math.nan)
    numbers = map_numbers(cells, trace, 0, [0, 1], 0, 2)
    assert (numbers["pages"] is None) == ("closed_at" not in trace.further)
    draw_attention({**WORDS, **numbers, "note": ""}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
