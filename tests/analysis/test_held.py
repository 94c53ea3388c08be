"""Tokens held at the end equal those that the last query sees, and any token's text can be drawn in plain columns."""

from __future__ import annotations

import re

import pytest
import torch
from test_heads import random_trace

from sparse_rl.analysis.drawing import policy_settings
from sparse_rl.analysis.held import chosen_head, cut, held, last_eviction, visible
from sparse_rl.errors import UserError


@pytest.mark.parametrize("length", [2, 9, 30])
def test_held_tokens_are_those_that_the_last_query_sees(length: int) -> None:
    trace = random_trace(length, length)
    for layer in range(trace.layers):
        assert torch.equal(held(trace)[layer], trace.visible(layer)[:, length - 2, : length - 1])


def test_the_last_eviction_is_the_largest_recorded_one() -> None:
    trace = random_trace(20, 0)
    assert last_eviction(trace.evict_at) == max(at for _, _, _, at in trace.to_events().tolist())
    assert last_eviction(trace.dense_like().evict_at) is None


def test_the_default_head_is_the_first_of_the_last_layer_without_a_window() -> None:
    windowed = random_trace(20, 0).beside_windows([0, 5, 0, 0, 5])
    assert chosen_head(random_trace(20, 0), None, None) == (2, 0)
    assert chosen_head(windowed, None, 1) == (3, 1)
    assert chosen_head(windowed, 0, None) == (0, 0)


@pytest.mark.parametrize(
    ("layer", "head", "message"),
    [
        (5, None, "the model has the layers 0 to 4"),
        (1, None, "layer 1 has a sliding window, which no policy changes; use 0, 2, 3"),
        (None, 2, "a layer of the model has the kv heads 0 to 1"),
    ],
)
def test_a_layer_or_head_that_the_model_lacks_is_refused(layer: int | None, head: int | None, message: str) -> None:
    windowed = random_trace(20, 0).beside_windows([0, 5, 0, 0, 5])
    with pytest.raises(UserError, match=re.escape(message)):
        chosen_head(windowed, layer, head)


@pytest.mark.parametrize("text", ["not JSON", "[1]", "3", "[" * 100_000])
def test_a_damaged_fingerprint_has_no_settings(text: str) -> None:
    assert policy_settings({"policy": text}) == {}
    assert policy_settings({"policy": '{"budget": 3}'}) == {"budget": 3}


def test_spaces_controls_and_characters_without_a_picture_are_visible() -> None:
    """Known by hand: characters that draw nothing, join others, run from right to left or are missing in the font."""
    assert visible(" a\n\t") == "␣a↵⇥"
    assert visible("x\r\x1b\u200b\u00a0") == "x\\r\\x1b\\u200b\\xa0"
    assert visible("你\U0001f600e\u0301\u05d0\u0627") == "\\u4f60\\U0001f600e\\u0301\\u05d0\\u0627"
    assert visible("$\\frac{é}∑\ufffd") == "$\\frac{é}∑\ufffd"
    assert visible("\ud800") == "\\ud800"
    assert cut("four", 4) == "four"
    assert cut("fours", 4) == "fou…"
