"""Style of all pictures: one colour per method, texts that can be read on a phone. No display is needed."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

from sparse_rl.errors import UserError, one_line
from sparse_rl.methods.config import budget_words

# The colour of each method in all pictures. The first colours are from Okabe and Ito's palette for the colour-blind.
COLOURS = {
    # cache policies, and runs that sample under them
    "streaming": "#0072B2",
    "gkv": "#E69F00",
    "rkv": "#009E73",
    "snapkv": "#CC79A7",
    "h2o": "#8C5A3C",
    "am": "#5D3A9B",
    "kvpop": "#8B0A3C",
    "tova": "#8F8F00",
    "dms": "#C020B0",
    "morphkv": "#E8798A",
    "cake": "#00B8B0",
    "lined": "#66A61E",
    "clustered": "#1F4E2E",
    "layered": "#56B4E9",
    "press": "#B58900",
    "triattention": "#2F4F9E",
    "full": "#000000",
    # other ways to compact a context once
    "evict": "#E03C31",
    "cartridge": "#7A4A1E",
    "none": "#A8A8A8",
    # runs that do not sample, and runs whose training attention differs from their sampling attention
    "sft": "#808080",
    "mismatched": "#D55E00",
}
SHADES = (0.0, 0.45, -0.4, 0.25, -0.2)  # weights for `shade`, one for each line of a method
MARKERS = "os^Dv"  # one for each line of a method
GREY = "#999999"  # for elements that are not methods, such as edges and single layers
NAME_WIDTH = 50  # maximum number of characters in a row of a line's wrapped name
TITLE_WIDTH = 50
MOST_TICKS = 16  # maximum number of labelled rows of a map
STYLE: Any = {
    "figure.figsize": (4.8, 3.4),
    "figure.dpi": 240,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "grid.color": "#e6e6e6",
    "lines.linewidth": 1.8,
}


def method_colours(methods: Sequence[str | None]) -> list[str]:
    """Return a colour for each line, given the lines' methods; lines of one method get shades of its colour in COLOURS.

    A line whose method is not in COLOURS, or is None (unknown), gets a colour of its own, unless none is left.
    """
    spare = cycle(colour for name, colour in COLOURS.items() if name not in methods and name != "none")
    shades = {method: cycle(SHADES) for method in methods}
    return [shade(COLOURS[m], next(shades[m])) if m in COLOURS else next(spare) for m in methods]


def shade(colour: str, weight: float) -> str:
    """Return a colour mixed with white (weight above 0) or black (weight below 0) by the share |weight|."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    end = 255 if weight > 0 else 0
    return "#" + "".join(f"{round(part + (end - part) * abs(weight)):02X}" for part in parts)


def policy_settings(fingerprint: Mapping[str, str]) -> dict[str, Any]:
    try:
        block = json.loads(fingerprint.get("policy", "{}"))
    except (ValueError, RecursionError):  # a file from another program
        return {}
    return block if isinstance(block, dict) else {}


def policy_words(fingerprint: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the name of the policy in a fingerprint (None means unknown), and a description with the budget."""
    settings = policy_settings(fingerprint)
    if "policy" not in settings:
        return None, "unnamed policy"
    name, budget = str(settings["policy"]), budget_words(settings.get("budget"))
    return name, one_line(name, 40) + (f", budget {one_line(budget, 40)}" if budget else "")


def subject(fingerprint: Mapping[str, str]) -> str:
    """Return the model, the policy and its budget in words, for the beginning of a title."""
    return ", ".join(filter(None, (one_line(fingerprint.get("model", ""), 50), policy_words(fingerprint)[1])))


def new_figure(title: str) -> tuple[Any, Any]:
    matplotlib.use("Agg")
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(layout="constrained")
        axes.set_title("\n".join(textwrap.fill(line, TITLE_WIDTH) for line in title.splitlines()))
        return figure, axes


def new_grid(
    title: str, columns: int, rows: int = 1, cell: tuple[float, float] | None = None
) -> tuple[Any, Sequence[Any]]:
    """Return a figure with a grid of axes, and the axes, row by row.

    cell : width and height of one of several axes in inches
    """
    matplotlib.use("Agg")
    with plt.rc_context(STYLE):
        wide, high = STYLE["figure.figsize"]
        size = (wide if columns == 1 else 1.5 + 3.9 * columns, high if rows == 1 else 0.9 + 2.7 * rows)
        size = size if cell is None else (cell[0] * columns, cell[1] * rows)
        figure, axes = plt.subplots(rows, columns, layout="constrained", squeeze=False, figsize=size)
        lines = [textwrap.fill(line, round(TITLE_WIDTH * size[0] / wide)) for line in title.splitlines()]
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=STYLE["axes.titlesize"])
        return figure, list(axes.flat)


def layer_ticks(axis: Any, layers: Sequence[int], most: int = MOST_TICKS) -> None:
    """Label the places 0, 1, ... on an axis by the indices of layers, at most `most` of them."""
    stride = -(-len(layers) // most)
    axis.set_ticks(range(0, len(layers), stride), [str(layer) for layer in layers[::stride]])


def name_lines(axes: Any) -> None:
    """Write the names of the lines below the axes, in the lines' colours, the line with the largest value first."""
    lines = sorted(axes.get_legend_handles_labels()[0], key=lambda line: -max(line.get_ydata()))
    names = [textwrap.fill(line.get_label(), NAME_WIDTH) for line in lines]
    columns = 2 if len(names) > 1 and max(map(len, names)) < NAME_WIDTH // 2 else 1
    style: Any = {"ncols": columns, "frameon": False, "labelcolor": "linecolor", "fontsize": 9}
    axes.figure.legend(lines, names, loc="outside lower left", **style)
    rows = sum(name.count("\n") + 1 for name in names) / columns
    axes.figure.set_figheight(axes.figure.get_figheight() + 0.18 * rows)


def save_figure(figure: Any, out: str | Path) -> Path:
    """Write a figure in the file format of the suffix, and close the figure. Raises UserError if writing fails."""
    out = Path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out)
    except (OSError, ValueError) as error:  # not writable, or the suffix is not a picture format
        raise UserError(f"{out} cannot be written: {error}", "--out") from error
    finally:
        plt.close(figure)
    return out
