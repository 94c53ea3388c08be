"""Prompts are prefilled once; `fork(rows)` then gives a separate copy of the chosen rows of the cache."""

from __future__ import annotations

import pytest
import torch
from tiny import model_of, policy_of, prompts_of

from rollout import make_engine
from rollout.hf import PrefilledPrompts
from sparse_rl.errors import UserError
from sparse_rl.policies.cache import EvictingCache

LENGTHS = (5, 40, 23, 64)
ROWS = [2, 2, 0, 3, 1, 2]


def prefill(rows: list[int], policy_name: str = "gkv") -> PrefilledPrompts:
    """Return the prefilled prompts of these rows."""
    policy = policy_of(policy_name, budget=20, window=4, period=8)
    engine = make_engine("hf", model=model_of("qwen2"), policy=policy)
    prompts = prompts_of("qwen2", LENGTHS)
    return engine.prefill([prompts[row] for row in rows])  # type: ignore[return-value]


def contents_of(cache: EvictingCache, row: int) -> list[torch.Tensor]:
    """Return all cache contents of a row, without its padding."""
    count, parts = cache.lengths[row], [cache.evict_at(row, cache.seen[row])]
    for layer in cache.layers.values():
        parts += [buffer[row, :, :count] for buffer in layer.slotted().values()]
    return parts


@pytest.mark.parametrize("policy_name", ["gkv", "h2o", "full"])
def test_a_fork_equals_the_rows_that_it_selects(policy_name: str) -> None:
    """Hidden states and cache contents. Control: different rows have different contents."""
    whole = prefill([0, 1, 2, 3], policy_name)
    fork = whole.fork(ROWS)
    assert torch.equal(fork.hidden, whole.hidden[ROWS])
    for fork_row, row in enumerate(ROWS):
        ours, theirs = contents_of(fork.cache.of_policy, fork_row), contents_of(whole.cache.of_policy, row)
        assert len(ours) == len(theirs)
        assert all(map(torch.equal, ours, theirs))
    # control: different rows have different contents
    assert not torch.equal(contents_of(fork.cache.of_policy, 0)[1], contents_of(fork.cache.of_policy, 2)[1])


def test_decoding_a_fork_does_not_change_the_original() -> None:
    """Even if all its buffers are overwritten."""
    whole = prefill([0, 1, 2, 3])
    before = [part.clone() for row in range(4) for part in contents_of(whole.cache.of_policy, row)]
    for cache in [whole.fork(rows).cache.of_policy for rows in (ROWS, [3, 3], [0, 1, 2, 3])]:
        for layer in cache.layers.values():
            for buffer in (*layer.slotted().values(), layer.evict_at, layer.queries):
                buffer.zero_()
        cache.begin_decode([True] * len(cache.seen), torch.device("cpu"))
    assert all(map(torch.equal, before, [part for row in range(4) for part in contents_of(whole.cache.of_policy, row)]))
    assert whole.cache.seen == list(LENGTHS)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UserError, match="prompt 1 is empty"):
        make_engine("hf", model=model_of("qwen2"), policy="full").prefill([[1], []])
