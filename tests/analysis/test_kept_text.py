"""The marked text shows each character of each token in the token's colour, in rows that fit the picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_heads import random_trace

from sparse_rl.analysis import kept_text as module
from sparse_rl.analysis.held import visible
from sparse_rl.analysis.kept_text import COLOURS, draw_kept_text, kept_text, rows_of_text, shortened, states
from sparse_rl.trace import NEVER, EvictionTrace

WORDS = ["The", " roots", " of", " $", "x", "^2", "$", " are", "\n", "\n\n", " 你", "a very long token " * 3]


def strings(ids: Sequence[int]) -> list[str]:
    return [WORDS[token % len(WORDS)] for token in ids]


def test_flags_equal_the_last_querys_mask() -> None:
    trace, ids = random_trace(30, 3), list(range(30))
    for layer, head in ((None, None), (0, 1), (1, 0)):
        numbers = kept_text(trace, ids, {}, strings, 1, layer, head)
        visible_at_end = trace.visible(2 if layer is None else layer)[head or 0, 28, :29]
        assert numbers["kept"] == visible_at_end.tolist()
        assert numbers["tokens"] == strings(ids[:29])


def test_tokens_after_the_last_eviction_have_a_state_of_their_own() -> None:
    """Known by hand: the head evicted tokens 1 and 2, the last of them before query 5."""
    evict_at = torch.full((1, 1, 9), NEVER)
    evict_at[0, 0, 1], evict_at[0, 0, 2] = 4, 5
    numbers = kept_text(EvictionTrace.recorded(evict_at), list(range(9)), {}, strings, 1)
    assert states(numbers) == ["held", "evicted", "evicted", "held", "held", "newer", "newer", "newer"]
    whole = kept_text(EvictionTrace.dense(1, 1, 9), list(range(9)), {}, strings, 1)
    assert states(whole) == ["held"] * 8


@pytest.mark.parametrize("columns", [5, 12, 100])
def test_rows_contain_every_character_once_in_its_tokens_state(columns: int) -> None:
    tokens = strings(range(40))
    token_states = [("held", "evicted", "newer")[place % 3] for place in range(40)]
    rows = rows_of_text(tokens, token_states, columns)
    assert all(0 < len(row) <= columns for row in rows)
    expected = [
        (character, state)
        for token, state in zip(tokens, token_states, strict=True)
        for character in visible(token).replace("␣", " ")
    ]
    assert [cell for row in rows for cell in row] == expected
    assert all(character != "↵" for row in rows for character, _ in row[:-1])


def test_rows_end_after_a_space_if_there_is_one_in_their_second_half() -> None:
    texts = ["".join(character for character, _ in row) for row in rows_of_text(["one two three\nfour"], ["held"], 9)]
    assert texts == ["one two ", "three↵", "four"]
    assert ["".join(c for c, _ in row) for row in rows_of_text(["abcdefgh ij"], ["held"], 5)] == ["abcde", "fgh ", "ij"]


def test_a_long_text_says_how_many_lines_are_left_out() -> None:
    rows = [[(str(number % 10), "held")] for number in range(1000)]
    shown = shortened(rows, 100)
    assert len(shown) == 100
    assert shown[:50] == rows[:50]
    assert shown[51:] == rows[-49:]
    assert "".join(character for character, _ in shown[50]) == "[… 901 of 1,000 lines are left out …]"
    assert shortened(rows, 1000) == rows


def test_a_held_token_has_its_colour_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The boxes behind the text cover exactly the columns of held tokens."""
    figures: list[Any] = []
    monkeypatch.setattr(module, "save_figure", lambda figure, out: figures.append(figure))
    evict_at = torch.full((1, 1, 9), NEVER)
    evict_at[0, 0, 0], evict_at[0, 0, 3] = 2, 6
    numbers = kept_text(EvictionTrace.recorded(evict_at), list(range(9)), {"model": "a"}, strings, 1)
    draw_kept_text(json.loads(json.dumps(numbers)), Path("unused"))
    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.texts] == ["The roots of $x^2$ are"]
    assert not axes.texts[0].get_parse_math()
    boxes = {}
    for collection in axes.collections:
        (path,) = collection.get_paths()
        box = path.get_extents()
        colour = tuple(round(255 * part) for part in collection.get_facecolor()[0][:3])
        boxes[(int(box.x0), int(box.x1))] = "#{:02X}{:02X}{:02X}".format(*colour)
    assert boxes == {(3, 12): COLOURS["held"], (14, 17): COLOURS["held"], (17, 22): COLOURS["newer"]}
