"""Prompts are prefilled once; `fork(rows)` then gives a separate copy of the chosen rows of the cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rollout import make_engine
from rollout.hf import PrefilledPrompts
from sparse_rl.errors import UserError
from sparse_rl.methods.eviction.cache import EvictingCache

LENGTHS = (5, 40, 23, 64)
ROWS = [2, 2, 0, 3, 1, 2]


@pytest.fixture
def prefill(model_of: Callable, policy_of: Callable, prompts_of: Callable) -> Callable[..., PrefilledPrompts]:
    """prefill(rows, policy name) -> the prefilled prompts of these rows."""

    def make(rows: list[int], policy_name: str = "gkv") -> PrefilledPrompts:
        policy = policy_of(policy_name, budget=20, window=4, period=8)
        engine = make_engine("hf", model=model_of("qwen2"), policy=policy)
        prompts = prompts_of("qwen2", LENGTHS)
        return engine.prefill([prompts[row] for row in rows])  # type: ignore[return-value]

    return make


def contents_of(cache: EvictingCache, row: int) -> list[torch.Tensor]:
    """Return all cache contents of a row, without its padding."""
    count, parts = cache.lengths[row], [cache.evict_at(row, cache.seen[row])]
    for layer in cache.layers.values():
        parts += [buffer[row, :, :count] for buffer in layer.slotted().values()]
    return parts


@pytest.mark.parametrize("policy_name", ["gkv", "h2o", "full"])
def test_a_fork_equals_the_rows_that_it_selects(prefill: Callable, policy_name: str) -> None:
    """Row i of a fork has the hidden state and the cache contents of row ROWS[i] of the original. Control: different
    rows have different contents.
    """
    whole = prefill([0, 1, 2, 3], policy_name)
    fork = whole.fork(ROWS)
    assert torch.equal(fork.hidden, whole.hidden[ROWS])
    for fork_row, row in enumerate(ROWS):
        ours, theirs = contents_of(fork.cache, fork_row), contents_of(whole.cache, row)
        assert len(ours) == len(theirs)
        assert all(map(torch.equal, ours, theirs))
    # control: different rows have different contents
    assert not torch.equal(contents_of(fork.cache, 0)[1], contents_of(fork.cache, 2)[1])


def test_decoding_a_fork_does_not_change_the_original(prefill: Callable) -> None:
    """Decoding begins in several forks, after all their buffers are overwritten with 0. The contents of the original
    cache do not change.
    """
    whole = prefill([0, 1, 2, 3])
    before = [part.clone() for row in range(4) for part in contents_of(whole.cache, row)]
    for cache in [whole.fork(rows).cache for rows in (ROWS, [3, 3], [0, 1, 2, 3])]:
        for layer in cache.layers.values():
            for buffer in (*layer.slotted().values(), layer.evict_at, layer.queries):
                buffer.zero_()
        cache.begin_decode([True] * len(cache.seen), torch.device("cpu"))
    assert all(map(torch.equal, before, [part for row in range(4) for part in contents_of(whole.cache, row)]))
    assert whole.cache.seen == list(LENGTHS)


def test_recorded_queries_are_those_of_the_last_tokens(prefill: Callable) -> None:
    """`queries` returns the queries of a row's last 4 tokens, oldest first, although the cache stores them in a ring
    buffer; also for a fork. A policy that scores without queries records none.
    """
    whole = prefill([0, 1, 2, 3])
    for layer in range(2):
        queries = whole.queries(layer)
        assert queries.shape == (4, 4, 4, 8)  # rows, query heads, the window, head size
        assert torch.equal(whole.fork(ROWS).queries(layer), queries[ROWS])
        buffer = whole.cache.layers[layer].queries
        assert buffer is not None
        for row, length in enumerate(LENGTHS):
            for place, position in enumerate(range(length - 4, length)):
                assert torch.equal(queries[row, :, place], buffer[row, :, position % 4])
        assert not torch.equal(queries, buffer)
    with pytest.raises(UserError, match="streaming does not score by queries, so its cache keeps none"):
        prefill([0], "streaming").queries(0)


def test_an_empty_prompt_is_refused(model_of: Callable) -> None:
    with pytest.raises(UserError, match="prompt 1 is empty"):
        make_engine("hf", model=model_of("qwen2"), policy="full").prefill([[1], []])
