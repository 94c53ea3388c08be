"""The map of kv heads that hold the last evictable tokens equals a count over plain numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_heads import random_trace

from sparse_rl.analysis import kept_heads as module
from sparse_rl.analysis.kept_heads import binned, draw_kept_heads, evictable, kept_heads
from sparse_rl.errors import UserError
from sparse_rl.trace import NEVER, EvictionTrace


def fingerprint(**policy: Any) -> dict[str, str]:
    return {"model": "a-model", "policy": json.dumps(policy)}


def strings(ids: Sequence[int]) -> list[str]:
    return [f"token {token}" for token in ids]


KVPOP = fingerprint(policy="kvpop", budget=9, sinks=2, window=3)


@pytest.mark.parametrize("last", [1, 5, 100, None])
def test_counts_equal_a_loop_over_layers_heads_and_tokens(last: int | None) -> None:
    trace = random_trace(30, 1).beside_windows([0, 0, 6, 0])
    ids = list(range(100, 130))
    numbers = kept_heads(trace, ids, KVPOP, strings, 1, last)
    tokens = list(range(2, 29 - 3))[-(last or 112) :]
    assert numbers["first"] == tokens[0]
    assert numbers["tokens"] == [f"token {100 + token}" for token in tokens]
    assert numbers["layers"] == [0, 1, 3]
    for row, layer in zip(numbers["counts"], (0, 1, 3), strict=True):
        expected = [sum(int(trace.evict_at[layer, head, token]) >= 29 for head in range(2)) for token in tokens]
        assert row == expected


def test_tokens_after_the_last_compaction_are_not_evictable() -> None:
    """Known by hand: the last compaction ran before query 24 with a window of 4, so 19 is the last evictable token. A
    policy that evicts at every token has a window at the end of the sequence.
    """
    evict_at = torch.full((2, 2, 31), NEVER)
    evict_at[0, 0, 3] = 16
    evict_at[1, 1, 8] = 24
    trace = EvictionTrace.recorded(evict_at)
    assert evictable(trace, fingerprint(policy="gkv", window=4, sinks=0, period=8)) == (0, 20)
    assert evictable(trace, fingerprint(policy="gkv", window=4, sinks=0, period=1)) == (0, 26)
    assert evictable(trace.dense_like(), fingerprint(policy="gkv", window=4, sinks=1, period=8)) == (1, 26)
    assert evictable(trace, {}) == (0, 30)


def test_a_sequence_without_evictable_tokens_is_refused() -> None:
    with pytest.raises(UserError, match="no token of line 3 can be evicted"):
        kept_heads(random_trace(6, 0), list(range(6)), KVPOP, strings, 3)


def test_groups_of_tokens_have_their_mean() -> None:
    """Known by hand: 5 tokens in at most 3 columns are groups of 2, 2 and 1."""
    values, group = binned([[1, 3, 0, 1, 7]], 3)
    assert group == 2
    assert values.tolist() == [[2.0, 0.5, 7.0]]
    values, group = binned([[1, 3], [0, 1]], 2)
    assert group == 1
    assert values.tolist() == [[1, 3], [0, 1]]


@pytest.mark.parametrize(("length", "group"), [(60, 1), (800, 5)])
def test_the_map_has_texts_or_says_how_many_tokens_a_column_covers(
    length: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(module, "save_figure", lambda figure, out: figures.append(figure))
    texts = lambda ids: ["$x$ \n" for _ in ids]  # noqa: E731
    numbers = kept_heads(random_trace(length, 2), list(range(length)), KVPOP, texts, 1, 1000)
    draw_kept_heads(json.loads(json.dumps(numbers)), Path("unused"))
    axes, _ = figures[0].axes
    columns = -(-len(numbers["tokens"]) // group)
    assert axes.images[0].get_array().shape == (3, columns)
    labels = axes.get_xticklabels()
    assert (f"a column is the mean over {group} tokens" in axes.get_title(loc="left").replace("\n", " ")) == (group > 1)
    assert (labels[0].get_text() == "$x$␣↵") == (group == 1)
    if group == 1:
        assert len(labels) == len(numbers["tokens"])
        assert not labels[0].get_parse_math()
