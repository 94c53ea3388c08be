"""Word cloud of the tokens that one kv head holds at the end of its sequences (G-KV, figure 20)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy
import torch
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

from sparse_rl.analysis.drawing import new_figure, save_figure, subject
from sparse_rl.analysis.held import chosen_head, cut, held, visible
from sparse_rl.errors import UserError
from sparse_rl.trace import EvictionTrace

MOST_WORDS = 120
SMALLEST = 0.14  # font size of the smallest word, as a share of the largest
INCOMPLETE = "\ufffd"  # text of the bytes of an incomplete character
LONGEST = 24  # characters of a token that are shown
FONT, FONT_SIZE = "DejaVu Sans", 100.0  # matplotlib contains the font; the size is that in which words are laid out


def cloud(
    sequences: Iterable[tuple[Sequence[int], EvictionTrace]],
    strings: Callable[[Sequence[int]], list[str]],
    fingerprint: Mapping[str, str],
    layer: int | None = None,
    head: int | None = None,
) -> dict[str, Any]:
    """Count how often each token occurs in the sequences, and how often one kv head holds it at the end.

    Texts of tokens are counted without the spaces around them, so that "Wait" and " Wait" are one. Tokens of spaces
    alone are counted under `blank`, and bytes of incomplete characters under `incomplete`.

    sequences : (token ids of prompt and completion, trace) of each sequence
    strings : function from token ids to the text of each token
    layer, head : indices; by default the last layer without a sliding window, and head 0

    Returns `tokens`, rows of token, kept and total with the largest kept first; `blank` and `incomplete`, both [kept,
    total]; the indices, and the number of `sequences`. Raises UserError if the head holds none of these tokens.
    """
    kept, total = (numpy.zeros(0, dtype=numpy.int64) for _ in range(2))
    chosen, count = (0, 0), 0
    for count, (ids, trace) in enumerate(sequences, start=1):  # noqa: B007 (the number of sequences is returned)
        chosen = chosen_head(trace, layer, head)
        fed = torch.tensor(ids[: len(trace) - 1], dtype=torch.long)
        kept = _added(kept, fed[held(trace)[chosen]])
        total = _added(total, fed)
    occurring = total.nonzero()[0].tolist()
    kept_of, total_of = Counter[str](), Counter[str]()
    for token, text in zip(occurring, strings(occurring), strict=True):
        name = INCOMPLETE if text and not text.strip(INCOMPLETE) else text.strip()
        kept_of[name] += int(kept[token]) if token < len(kept) else 0
        total_of[name] += int(total[token])
    blank, incomplete = ([kept_of.pop(text, 0), total_of.pop(text, 0)] for text in ("", INCOMPLETE))
    if not any(kept_of.values()):
        raise UserError(f"kv head {chosen[1]} of layer {chosen[0]} holds no token with a text at the end", "--head")
    return {
        "subject": subject(fingerprint),
        "layer": chosen[0],
        "head": chosen[1],
        "sequences": count,
        "blank": blank,
        "incomplete": incomplete,
        "tokens": [
            {"token": text, "kept": kept_of[text], "total": total_of[text]}
            for text in sorted(kept_of, key=lambda text: (-kept_of[text], text))
        ],
    }


def _added(counts: Any, ids: torch.Tensor) -> Any:
    """Return the counts by token id, int64 [largest id + 1], after adding one for each id."""
    further = torch.bincount(ids, minlength=len(counts)).numpy()
    further[: len(counts)] += counts
    return further


def placed(sizes: Sequence[tuple[float, float]], wide: float = 1.8) -> list[list[float]]:
    """Return left, bottom, right and top of each box (width, height), such that no two boxes overlap.

    Each box is placed at the first free point of a spiral from the centre, which is `wide` times as wide as high.
    """
    boxes = numpy.zeros((0, 4))
    for width, height in sizes:
        for x, y in _spiral(wide, min(height, width) / 3):
            box = numpy.array([x - width / 2, y - height / 2, x + width / 2, y + height / 2])
            apart = (
                (boxes[:, 0] >= box[2]) | (boxes[:, 2] <= box[0]) | (boxes[:, 1] >= box[3]) | (boxes[:, 3] <= box[1])
            )
            if apart.all():
                boxes = numpy.vstack([boxes, box])
                break
    return list(boxes.tolist())


def _spiral(wide: float, step: float) -> Iterator[tuple[float, float]]:
    """Yield points of an endless spiral whose turns, and whose points in a turn, are about `step` apart."""
    angle = 0.0
    while True:
        radius = step * angle / (2 * math.pi)
        yield wide * radius * math.cos(angle), radius * math.sin(angle)
        angle += step / max(radius, step)


def _ink(text: str) -> list[float]:
    """Return left, bottom, right and top of the letters of a text that is written from the origin at FONT_SIZE."""
    corners, _ = TextToPath().get_text_path(FontProperties(family=FONT, size=FONT_SIZE), text, False)
    points = numpy.asarray(corners).reshape(-1, 2)
    return [0.0, 0.0, FONT_SIZE, FONT_SIZE] if not len(points) else [*points.min(0).tolist(), *points.max(0).tolist()]


def draw_cloud(numbers: Mapping[str, Any], out: Path) -> None:
    """Draw the tokens with the largest counts; the area of a letter grows with the count, its colour with the share."""
    words = [word for word in numbers["tokens"] if word["kept"]][:MOST_WORDS]
    largest = words[0]["kept"]
    texts = [cut(visible(word["token"]), LONGEST) for word in words]
    scales = [max(math.sqrt(word["kept"] / largest), SMALLEST) for word in words]
    inks = [_ink(text) for text in texts]
    boxes = placed(
        [
            (1.06 * scale * (ink[2] - ink[0]) + 10 * scale, 1.06 * scale * (ink[3] - ink[1]) + 10 * scale)
            for ink, scale in zip(inks, scales, strict=True)
        ]
    )
    left, bottom, right, top = (pick(box[side] for box in boxes) for side, pick in enumerate((min, min, max, max)))
    kinds = sum(1 for word in numbers["tokens"] if word["kept"])
    sequences, left_out = numbers["sequences"], numbers["blank"][0] + numbers["incomplete"][0]
    title = f"{numbers['subject']}: tokens held at the end"
    title += f"\nlayer {numbers['layer']}, kv head {numbers['head']}; {sequences:,} sequence{'s' * (sequences > 1)}"
    title += f"; size by count (largest {largest:,})"
    remarks = [f"{len(words)} most frequent of {kinds:,} kinds"] if kinds > len(words) else []
    remarks += [f"{left_out:,} without text left out"] if left_out else []
    title += f"\n{'; '.join(remarks)}" if remarks else ""
    figure, axes = new_figure(title)
    shares = [word["kept"] / word["total"] for word in words]
    colours = ListedColormap(matplotlib.colormaps["viridis_r"](numpy.linspace(0.25, 1, 256)))
    norm = Normalize(0, max(shares))
    figure.colorbar(
        matplotlib.cm.ScalarMappable(norm, colours),
        ax=axes,
        label="share of the token's occurrences that is held",
        fraction=0.05,
        pad=0.02,
    )
    axes.set_axis_off()
    figure.canvas.draw()  # so that the size of the axes is final
    room = axes.get_window_extent()
    fit = min(room.width / (right - left), room.height / (top - bottom), 1.5 * figure.dpi / 72)  # pixels for each unit
    middle = ((left + right) / 2, (bottom + top) / 2)
    axes.set(xlim=(middle[0] - room.width / fit / 2, middle[0] + room.width / fit / 2))
    axes.set(ylim=(middle[1] - room.height / fit / 2, middle[1] + room.height / fit / 2))
    for text, size, share, ink, box in zip(texts, scales, shares, inks, boxes, strict=True):
        x, y = ((box[i] + box[i + 2]) / 2 - size * (ink[i] + ink[i + 2]) / 2 for i in range(2))  # start of the baseline
        points = FONT_SIZE * size * fit * 72 / figure.dpi
        axes.text(x, y, text, color=colours(norm(share)), fontsize=points, family=FONT, parse_math=False)
    save_figure(figure, out)
