"""The text of one sequence, in which the tokens that one kv head holds at the end are marked (G-KV, figures 21-24)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.patches import Patch

from sparse_rl.analysis.drawing import new_figure, save_figure, subject
from sparse_rl.analysis.held import FONT, chosen_head, held, last_eviction, visible
from sparse_rl.trace import EvictionTrace

COLUMNS = 100  # characters in a row of the picture
MOST_ROWS = 200
POINTS = 7.973  # font size at which a character is 10 pixels wide, so that no rounding adds up
WIDTH, HEIGHT = 10 / 150, 0.145  # size of a character's cell, in inches
COLOURS = {"evicted": "#FFFFFF", "held": "#F9B84B", "newer": "#9ED99B"}  # state of a token -> colour behind it
SPACE, BREAK = " ", "↵"
Cell = tuple[str, str]  # a character, and the state of its token


def kept_text(
    trace: EvictionTrace,
    ids: Sequence[int],
    fingerprint: Mapping[str, str],
    strings: Callable[[Sequence[int]], list[str]],
    line: int,
    layer: int | None = None,
    head: int | None = None,
) -> dict[str, Any]:
    """Return the texts of a sequence's fed tokens, and True for each token that one kv head holds at the end.

    ids : token ids of prompt and completion, one for each token of the trace
    strings : function from token ids to the text of each token
    line : line of the sequence in completions.jsonl
    layer, head : indices; by default the last layer without a sliding window, and head 0

    Returns `tokens`, `kept`, indices, and `newer_from`: tokens from this position on came after the head's last
    eviction. It is the number of tokens if there was no eviction.
    """
    layer, head = chosen_head(trace, layer, head)
    kept, last = held(trace)[layer, head].tolist(), last_eviction(trace.evict_at[layer, head])
    return {
        "subject": subject(fingerprint),
        "line": line,
        "layer": layer,
        "head": head,
        "tokens": strings(ids[: len(kept)]),
        "kept": kept,
        "newer_from": len(kept) if last is None else last,
    }


def states(numbers: Mapping[str, Any]) -> list[str]:
    """Return the state of each token, a key of COLOURS."""
    kept, newer_from = numbers["kept"], numbers["newer_from"]
    return [("newer" if i >= newer_from else "held") if flag else "evicted" for i, flag in enumerate(kept)]


def rows_of_text(tokens: Sequence[str], token_states: Sequence[str], columns: int) -> list[list[Cell]]:
    """Return the characters of a text in rows of at most `columns`, which end at line breaks, else after a space."""
    cells = []
    for token, state in zip(tokens, token_states, strict=True):
        for character in token:
            cells += [(SPACE if character == " " else one, state) for one in visible(character)]
    rows, start = [], 0
    while start < len(cells):
        part = [character for character, _ in cells[start : start + columns]]
        length = len(part)
        if BREAK in part:
            length = part.index(BREAK) + 1
        elif start + length < len(cells) and SPACE in part[columns // 2 :]:
            length -= part[::-1].index(SPACE)
        rows.append(cells[start : start + length])
        start += length
    return rows


def shortened(rows: Sequence[list[Cell]], most: int) -> list[list[Cell]]:
    """Return at most `most` rows: all, or the first and the last ones around a row that says how many are left out."""
    if len(rows) <= most:
        return list(rows)
    left_out = len(rows) - (most - 1)
    note = [(character, "evicted") for character in f"[… {left_out:,} of {len(rows):,} lines are left out …]"]
    return [*rows[: most // 2], note, *rows[len(rows) - (most - 1 - most // 2) :]]


def draw_kept_text(numbers: Mapping[str, Any], out: Path) -> None:
    """Draw the text with a colour behind each token that is held. Of a long text, the middle is left out."""
    token_states = states(numbers)
    rows = shortened(rows_of_text(numbers["tokens"], token_states, COLUMNS), MOST_ROWS)
    title = f"{numbers['subject']}: tokens held at the end"
    title += f"\nlayer {numbers['layer']}, kv head {numbers['head']}; line {numbers['line']}, with its prompt"
    title += f" ({BREAK}: line break)"
    figure, axes = new_figure(title)
    figure.set_layout_engine("none")
    lines, margin, bottom = axes.get_title(loc="left").count("\n") + 1, 0.15, 0.45
    top = 0.22 * lines + 0.15
    wide, high = COLUMNS * WIDTH + 2 * margin, len(rows) * HEIGHT + top + bottom
    figure.set_size_inches(wide, high)
    axes.set_position((margin / wide, bottom / high, 1 - 2 * margin / wide, 1 - (top + bottom) / high))
    axes.set_axis_off()
    axes.set(xlim=(0, COLUMNS), ylim=(len(rows), 0))
    for place, row in enumerate(rows):
        start = 0
        for state, cells in groupby(row, key=lambda cell: cell[1]):
            length = len(list(cells))
            if state != "evicted":
                axes.broken_barh([(start, length)], (place, 1), color=COLOURS[state], linewidth=0)
            start += length
        text = "".join(character for character, _ in row)
        style: Any = {"family": FONT, "fontsize": POINTS, "va": "center_baseline", "parse_math": False}
        axes.text(0, place + 0.5, text, **style)
    names = {"evicted": "evicted", "held": "held", "newer": "held, after the last eviction"}
    handles = [
        Patch(facecolor=colour, edgecolor="#999999", label=f"{names[state]}: {count:,} token{'s' * (count != 1)}")
        for state, colour in COLOURS.items()
        for count in [token_states.count(state)]
    ]
    figure.legend(handles=handles, loc="lower left", ncols=3, frameon=False, fontsize=8.5)
    save_figure(figure, out)
