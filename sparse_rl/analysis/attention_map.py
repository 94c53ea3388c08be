"""A map of the attention of one layer, with evicted tokens, and with pages (LuKA figure 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm
from torch import Tensor

from sparse_rl.analysis.attention import raw_note
from sparse_rl.analysis.drawing import new_figure, save_figure
from sparse_rl.methods.pages.pages import Pages
from sparse_rl.methods.pages.sections import paged_layers
from sparse_rl.trace import NEVER, EvictionTrace

FINEST = 500  # maximum number of cells in a row or column
CHUNK = 512  # queries at a time
BORDERS = 4  # minimum number of cells of a page whose borders are drawn
PALEST = 0.3  # opacity of a cell of which almost all pairs are evicted
LOWEST = -7  # smallest power of ten on the scale
GREYS = ListedColormap(plt.get_cmap("Greys")(torch.linspace(0.25, 0.9, 256).numpy()))  # without white


def read_shares(opened: Tensor, closed_at: Tensor, pages: Pages, size: int) -> Tensor:
    """Return the share of pairs in which a query reads a token itself, not through a summary: float32 [R, R].

    The share is of the pairs of a query and a token up to it; it is 0 in cells without such pairs. A cell covers `size`
    queries (rows) and tokens (columns).

    opened : the pages that each query opened in one kv head, -1 for unused places: int16 [S, K]
    closed_at : the first query for which each page is closed: int32 [P]
    """
    fed, count = len(opened), len(closed_at)
    until = torch.full((fed,), NEVER)
    until[pages.tokens(torch.arange(count)).flatten()] = closed_at.repeat_interleave(pages.size).long()
    inside = slice(pages.sinks, pages.sinks + count * pages.size)  # the tokens of the closed pages
    step, pad, rows = size * max(CHUNK // size, 1), -fed % size, []
    for start in range(0, fed, step):
        part = opened[start : start + step].long()
        read = torch.arange(start, start + len(part))[:, None] < until
        is_open = torch.zeros(len(part), count + 1, dtype=torch.bool)
        is_open.scatter_(1, torch.where(part < 0, count, part), True)
        read[:, inside] |= is_open[:, :count].repeat_interleave(pages.size, 1)
        causal = torch.arange(fed) <= torch.arange(start, start + len(part))[:, None]
        seen, possible = (
            F.pad(pairs.float(), (0, pad, 0, -len(part) % size)).unflatten(0, (-1, size)).sum(1)
            for pairs in (read & causal, causal)
        )
        rows.append(seen.unflatten(1, (-1, size)).sum(2) / possible.unflatten(1, (-1, size)).sum(2).clamp(min=1))
    return torch.cat(rows)


def seen_shares(evict_at: Tensor, size: int) -> Tensor:
    """Return the share of the pairs of a query and a token up to it that see each other, for each cell: float32 [R, R].

    It is 0 in cells without such pairs. A cell covers `size` queries (rows) and tokens (columns).

    evict_at : int32 [S] of one kv head, for S fed tokens
    """
    fed = len(evict_at)
    token, pad, rows = torch.arange(fed, dtype=torch.int32), -fed % size, []
    ends = torch.stack([evict_at.clamp(max=fed), torch.full_like(evict_at, fed)])  # of the seen and of all pairs
    for start in range(0, fed, size):
        pairs = (ends.clamp(max=start + size) - token.clamp(min=start)).clamp(min=0)
        seen, possible = F.pad(pairs, (0, pad)).unflatten(1, (-1, size)).sum(-1).float()
        rows.append(seen / possible.clamp(min=1))
    return torch.stack(rows)


def map_numbers(
    cells: Tensor, trace: EvictionTrace, layer: int, heads: Sequence[int], kv_head: int, size: int
) -> dict[str, Any]:
    """Return the numbers of figure `attention`.

    cells : float32 [R, R], the largest attention in a cell of `size` queries (rows) and tokens (columns), NaN for cells
        in which no query sees a token
    layer : index of the layer in the model
    heads, kv_head : the query heads whose mean the cells show, and their kv head

    Returns, besides these, the number of `tokens`; and if pages close in the layer, `pages`: the size of a page, the
    number of sinks and of closed pages, and `read`, the percentages of `read_shares`. If a cell has several tokens, and
    some are evicted, `seen` has the percentages of `seen_shares`.
    """
    numbers: dict[str, Any] = {
        "layer": layer,
        "heads": list(heads),
        "kv_head": kv_head,
        "tokens": len(trace) - 1,
        "cell": size,
        "cells": [[None if v != v else float(f"{v:.3g}") for v in row] for row in cells.tolist()],
        "note": "",
        "pages": None,
        "seen": None,
    }
    evict_at = trace.evict_at[layer, kv_head, : len(trace) - 1]
    if size > 1 and bool((evict_at < len(trace) - 1).any()):
        numbers["seen"] = _percentages(seen_shares(evict_at, size))
    place, part = trace.global_layers.index(layer), trace.policy_part()
    if "closed_at" not in part.further:
        return numbers | {"note": raw_note(part)}
    if place not in paged_layers(part.sections).tolist():
        return numbers
    pages, closed_at = Pages.read(part.further["paged_with"]), part.further["closed_at"]
    read = read_shares(part.further["opened"][place, kv_head, : len(trace) - 1], closed_at, pages, size)
    counts = {"size": pages.size, "sinks": pages.sinks, "closed": len(closed_at)}
    return numbers | {"note": raw_note(part), "pages": counts | {"read": _percentages(read)}}


def _percentages(shares: Tensor) -> list[list[int]]:
    """Return shares as whole percentages, rounded up so that only 0 becomes 0."""
    return (100 * shares).ceil().int().tolist()


def _opacity(percentages: list[list[int]]) -> Tensor:
    """Return the opacity of each cell: 0 for 0 %, else between PALEST and 1."""
    shares = torch.tensor(percentages) / 100
    return (PALEST + (1 - PALEST) * shares).masked_fill(shares == 0, 0.0)


def draw_attention(numbers: Mapping[str, Any], out: Path) -> None:
    """Draw the map: tokens from left to right, queries from top to bottom; a cell that no query sees is white."""
    heads, size, fed, pages = numbers["heads"], numbers["cell"], numbers["tokens"], numbers["pages"]
    cells = torch.tensor([[float("nan") if v is None else v for v in row] for row in numbers["cells"]])
    which = f"query head {heads[0]}" if len(heads) == 1 else f"mean of query heads {heads[0]} to {heads[-1]}"
    title = [f"{numbers['model']}, {numbers['policy']}", f"attention in layer {numbers['layer']}, {which}"]
    title += [f"a cell shows the maximum of {size} × {size} queries × tokens"] if size > 1 else []
    if numbers["seen"] is not None:
        title += ["paler: more of the cell's pairs are evicted; white: all"]
    elif bool(cells.isnan().tril().any()):
        title += ["white below the diagonal: evicted"]
    title += [numbers["note"]] if numbers["note"] else []
    figure, axes = new_figure("\n".join(title))
    figure.set_size_inches(7.2, 6.6)
    norm = LogNorm(10.0 ** max(LOWEST, math.floor(math.log10(_common(cells)))), 1, clip=True)
    end = len(cells) * size - 0.5
    drawn = {"norm": norm, "extent": (-0.5, end, end, -0.5), "interpolation": "nearest", "aspect": "auto"}
    colours = {"cmap": "viridis_r", **drawn}
    if pages is None:
        axes.imshow(cells, alpha=None if numbers["seen"] is None else _opacity(numbers["seen"]), **colours)
    else:
        axes.imshow(cells, cmap=GREYS, **drawn)
        axes.imshow(cells, alpha=_opacity(pages["read"]), **colours)
        legend = f"grey: read only through the summary of a page of {pages['size']} tokens; in colour: read directly"
        legend += "\nthe stronger the colour, the more of the cell's pairs are read directly" if size > 1 else ""
        if pages["size"] >= BORDERS * size:
            ends = [pages["sinks"] + page * pages["size"] - 0.5 for page in range(pages["closed"] + 1)]
            axes.vlines(ends, ends, fed - 0.5, color="#444444", linewidth=0.4)
        else:
            legend += f"\npages are smaller than {BORDERS} cells; their borders are not drawn"
        figure.supxlabel(legend, fontsize=9, x=0.02, ha="left")
    figure.colorbar(ScalarMappable(norm, "viridis_r"), ax=axes, label="attention (probability)", extend="min")
    axes.grid(visible=False)
    axes.set(
        xlabel="token (position in the sequence)",
        ylabel="query (position)",
        xlim=(-0.5, fed - 0.5),
        ylim=(fed - 0.5, -0.5),
    )
    save_figure(figure, out)


def _common(cells: Tensor) -> float:
    """Return a value that 98 % of the drawn cells exceed."""
    drawn = cells[cells > 0]
    return float(drawn.kthvalue(len(drawn) // 50 + 1).values)
