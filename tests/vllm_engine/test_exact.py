"""Exact attention over the paged cache equals plain softmax, without a tensor of size (query tokens x entries)."""

from __future__ import annotations

import math

import pytest
import torch
from peaks import Largest

pytest.importorskip("vllm")

HEADS, GROUP, SIZE, DIM, BLOCKS = 2, 3, 16, 8, 80
SCALE = DIM**-0.5


def attended(counts: list[int], lengths: list[int], largest: Largest) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention [T, Hq, D] by exact.py, whose operators `largest` records, and by plain softmax."""
    from rollout.vllm.compat.paged import attend, key_value_views

    torch.manual_seed(0)
    keys, values = key_value_views(torch.randn(BLOCKS, HEADS, SIZE, 2 * DIM), transposed=True)
    needed = [-(-length // SIZE) for length in lengths]
    blocks = torch.full((len(lengths), max(needed)), BLOCKS - 1, dtype=torch.int32)
    for row, row_blocks in enumerate(torch.randperm(BLOCKS - 1)[: sum(needed)].split(needed)):
        blocks[row, : len(row_blocks)] = row_blocks
    # in a block table, blocks of other requests follow a request's own blocks
    keys[-1], values[-1] = math.nan, math.nan
    query = torch.randn(sum(counts), HEADS * GROUP, DIM)
    starts, out = torch.tensor([0, *counts]).cumsum(0), torch.empty_like(query)
    with largest:
        attend(query, keys, values, blocks, torch.tensor(lengths), starts, SCALE, out)

    expected = torch.empty_like(query)
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        slots = blocks[row].long().repeat_interleave(SIZE)[:length], torch.arange(length) % SIZE
        for place, last in enumerate(range(length - count, length)):
            token = int(starts[row]) + place
            for head in range(HEADS * GROUP):
                key = keys[slots[0], head // GROUP, slots[1]][: last + 1].double()
                value = values[slots[0], head // GROUP, slots[1]][: last + 1].double()
                weights = (key @ query[token, head].double() * SCALE).softmax(0)
                expected[token, head] = (weights @ value).float()
    return out, expected


@pytest.mark.parametrize(
    ("counts", "lengths"), [([1, 1, 1, 1], [1, 16, 33, 250]), ([1, 40, 7, 1], [50, 40, 30, 17]), ([5], [5])]
)
def test_attention_equals_plain_softmax(counts: list[int], lengths: list[int]) -> None:
    """The batches mix decode steps, whole prompts and last chunks of prompts."""
    out, expected = attended(counts, lengths, Largest())
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_a_prefill_creates_no_matrix_of_scores() -> None:
    tokens, largest = 400, Largest()
    out, expected = attended([tokens], [tokens], largest)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    assert 0 < largest.elements < tokens * tokens
