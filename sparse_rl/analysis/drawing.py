"""How every picture looks: lines carry their own names, and no display is needed.

The colours are those of Okabe and Ito, distinct to colour-blind eyes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparse_rl.errors import UserError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LABEL_WIDTH = 20  # characters of a line's name before it is wrapped
STYLE: Any = {
    "figure.figsize": (7.2, 4.2),
    "figure.dpi": 150,
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "lines.linewidth": 2.0,
}


def colours(count: int) -> list[str]:
    """So many colours, for curves; they repeat where there are more than in COLOURS."""
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def new_figure() -> tuple[Any, Any]:
    """(figure, axes) of matplotlib, in our style."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        return plt.subplots(layout="constrained")


def label_ends(axes: Any, ends: Sequence[tuple[float, float, str, str]], size: float = 10) -> None:
    """A name at the end of each line, wrapped, moved apart where they would overlap, and no legend."""
    ends = [(x, y, textwrap.fill(label, LABEL_WIDTH), colour) for x, y, label, colour in ends]
    figure = axes.figure
    figure.canvas.draw()
    line = 1.35 * size * figure.dpi / 72
    placed = sorted((axes.transData.transform((x, y))[1], y, x, label, colour) for x, y, label, colour in ends)
    heights = [pixel for pixel, *_ in placed]
    lines = [label.count("\n") + 1 for *_, label, _ in placed]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + line * (lines[i - 1] + lines[i]) / 2)
    for height, (pixel, y, x, label, colour) in zip(heights, placed, strict=True):
        shift = (8, (height - pixel) * 72 / figure.dpi)
        axes.annotate(
            label,
            (x, y),
            shift,
            textcoords="offset points",
            color=colour,
            fontsize=size,
            va="center",
            annotation_clip=False,
        )


def save_figure(figure: Any, out: str | Path) -> Path:
    """Write a figure, and close it; the suffix says the format. Raises UserError where it cannot be written."""
    import matplotlib.pyplot as plt

    out = Path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out)
    except (OSError, ValueError) as error:  # not writable, or a suffix that is no picture format
        raise UserError(f"{out} cannot be written: {error}", "--out") from error
    finally:
        plt.close(figure)
    return out
