"""Pictures of attention, from scores that an engine hands out (rollout/attended.py) and from traces.

A score S is the attention of the queries of a window to an earlier token, per kv head (G-KV section 3, eqs. 1 and 2):
the maximum over the query heads of the kv head, and the mean over the queries.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from sparse_rl.analysis.drawing import COLOURS, GREY, layer_ticks, new_figure, new_grid, save_figure
from sparse_rl.errors import UserError
from sparse_rl.methods.pages.policy import Pages
from sparse_rl.methods.pages.sections import paged_layers
from sparse_rl.trace import NEVER, EvictionTrace

WINDOWS = 4  # observation windows of `overlap`
OBSERVED = 16  # queries of `sparsity`
LAST = 512  # tokens of `overlap`'s windows together, and tokens that `sparsity` counts
SHARES = tuple(range(5, 101, 5))  # of the tokens, in percent
LEVELS = tuple(round(10 ** (-3 + i / 10), 8) for i in range(31))  # shares of the largest score
RED = "#D00000"
DEPTH = "viridis_r"  # colours of layers


def raw_note(trace: EvictionTrace) -> str:
    """Return a note for policies that change entries: scores use raw keys. Empty if the trace only evicts."""
    if "closed_at" in trace.further:
        return "raw scores of all tokens, also of those read through a page's summary"
    if not {"refit_at", "compacted_at"}.isdisjoint(trace.further):
        return "raw scores, without fitted biases"
    return ""


def plain(values: Tensor, digits: int = 6) -> list[Any]:
    """Return a tensor as nested lists for JSON, rounded; NaN becomes None."""
    if values.ndim > 1:
        return [plain(row, digits) for row in values]
    return [None if value != value else round(value, digits) for value in values.tolist()]


def _array(values: Sequence[Any]) -> Any:
    return torch.tensor([[float("nan") if v is None else v for v in row] for row in values]).numpy()


# ---- overlap of windows --------------------------------------------------------------------------------------------


def observation_windows(prompt: int, length: int, last: int | None = None) -> list[tuple[int, int]]:
    """Return the queries (first, end) of 4 windows of equal size at the end of a completion; [] if it is too short.

    Together they have at most `last` tokens (None means 512), and at most half of the sequence.
    """
    fed = length - 1
    width = min(last or LAST, fed - prompt, fed // 2) // WINDOWS
    return [(fed - i * width, fed - (i - 1) * width) for i in range(WINDOWS, 0, -1)] if width > 0 else []


def attended_levels(scores: Tensor, held: Tensor) -> Tensor:
    """Return the place in SHARES of the smallest set of most attended tokens that has a token: int64 [Hkv, N].

    The set of a share has this share of the held tokens, rounded up; among equal scores the earlier tokens. A token
    that is not held (bool [Hkv, N]) is in no set, and gets len(SHARES).
    """
    order = scores.masked_fill(~held, -1.0).argsort(dim=-1, descending=True, stable=True)
    sizes = (held.sum(-1, keepdim=True) * torch.tensor(SHARES) + 99).div(100, rounding_mode="floor")
    by_rank = torch.searchsorted(sizes, torch.arange(order.shape[-1]).expand_as(order).contiguous(), right=True)
    return torch.empty_like(order).scatter_(-1, order, by_rank)


def overlaps(scores: Sequence[Tensor], held: Sequence[Tensor]) -> Tensor:
    """Return the overlap of one layer, float64 [WINDOWS + 1, shares]: a mean over kv heads (G-KV section 4, figure 1).

    Overlap is the share of the tokens most attended by the last window that are also most attended by another window.
    Rows: each earlier window, in order; the union of the earlier windows; and this union if, of all windows, only the
    tokens before the first window count. Each window's tokens are otherwise all tokens before it, as the paper says
    ("the key status of preceding tokens"). So tokens of a window that is not over yet are in no earlier window's set,
    which lowers the overlap of recent tokens; the last row has no such effect.

    scores, held : for each window, [Hkv, first query of the window]; True for tokens that the first query sees
    """
    levels = [attended_levels(s, h) for s, h in zip(scores, held, strict=True)]
    first = scores[0].shape[-1]
    common = [attended_levels(s[:, :first], held[-1][:, :first]) for s in scores]
    rows = [_shared(levels[-1], [one]) for one in levels[:-1]]
    rows += [_shared(levels[-1], levels[:-1]), _shared(common[-1], common[:-1])]
    return torch.stack(rows)


def _shared(last: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return the share of the last window's tokens that are also in another window's set: float64 [shares]."""
    union = torch.full_like(last, len(SHARES))
    for other in others:
        part = union[:, : other.shape[-1]]
        torch.minimum(part, other, out=part)
    return (_set_sizes(torch.maximum(last, union)) / _set_sizes(last)).nanmean(0)


def _set_sizes(levels: Tensor) -> Tensor:
    """Return the number of tokens in the set of each share, float64 [Hkv, shares]."""
    heads, count = len(levels), len(SHARES) + 1
    places = (levels + torch.arange(heads)[:, None] * count).flatten()
    return torch.bincount(places, minlength=heads * count).view(heads, count)[:, :-1].cumsum(-1).double()


def overlap_numbers(by_layer: Mapping[int, Sequence[Tensor]], widths: Sequence[int]) -> dict[str, Any]:
    """Return the numbers of figure `overlap`, means over sequences: windows [layers][earlier windows][shares], union
    and union_of_common [layers][shares].

    by_layer : index of a layer in the model -> results of `overlaps`, one per sequence
    widths : number of queries of each sequence's windows
    """
    if not widths:
        raise UserError(f"no completion is long enough for {WINDOWS} windows of its tokens in half of a sequence")
    means = torch.stack([torch.stack(list(values)).nanmean(0) for values in by_layer.values()])
    return {
        "sequences": len(widths),
        "layers": list(by_layer),
        "shares": list(SHARES),
        "width": [min(widths), max(widths)],
        "windows": plain(means[:, : WINDOWS - 1]),
        "union": plain(means[:, WINDOWS - 1]),
        "union_of_common": plain(means[:, WINDOWS]),
    }


def draw_overlap(numbers: Mapping[str, Any], out: Path) -> None:
    """Draw lines for the mean over layers, and a map by layer of the union."""
    layers, shares = numbers["layers"], numbers["shares"]
    windows = torch.tensor([_array(layer).tolist() for layer in numbers["windows"]])
    title = _title(numbers, "overlap with the tokens that the last window attends to most")
    title += f"\n{_sequences(numbers['sequences'])}, {WINDOWS} windows of {_range(numbers['width'])} queries at the end"
    figure, (lines, union) = new_grid(title, 2)
    for i, mean in enumerate(windows.nanmean(0).tolist()):
        colour = ("#B8C4D6", "#7F93B2", "#34507F")[i]
        lines.plot(shares, mean, color=colour, label=f"window {i + 1}" + (", just before" if i == 2 else ""))
    for name, label, style in (
        ("union", "all 3 windows", "-"),
        ("union_of_common", "all 3, tokens before window 1", ":"),
    ):
        lines.plot(shares, torch.tensor(_array(numbers[name])).nanmean(0), style, color=RED, label=label)
    figure.legend(frameon=False, fontsize=9, loc="outside lower left", ncols=WINDOWS + 1)
    lines.set(xlabel="most attended tokens of each window (%)", ylabel="overlap (share)", ylim=(0, 1.02))
    lines.set_title("mean over layers", fontsize=10)
    edges = (shares[0] - 2.5, shares[-1] + 2.5, len(layers) - 0.5, -0.5)
    look: dict[str, Any] = {"cmap": "viridis_r", "vmin": 0, "vmax": 1, "aspect": "auto", "interpolation": "nearest"}
    mesh = union.imshow(_array(numbers["union"]), extent=edges, **look)
    union.grid(visible=False)
    layer_ticks(union.yaxis, layers)
    union.set(xlabel="most attended tokens (%)", ylabel="layer")
    union.set_title("all 3 windows, by layer", fontsize=10)
    figure.colorbar(mesh, ax=union, label="overlap (share)")
    save_figure(figure, out)


# ---- sparsity ------------------------------------------------------------------------------------------------------


def counted_tokens(trace: EvictionTrace, layer: int, first: int, last: int | None = None) -> Tensor:
    """Return the tokens whose scores `sparsity` counts, bool [Hkv, first] (G-KV appendix B).

    If the trace evicts nothing: the last `last` tokens (None means 512) before the first query. Otherwise: all tokens
    before the first query whose entries the cache holds when the last query attends.
    """
    if not bool((trace.policy_part().evict_at < len(trace) - 1).any()):
        return (torch.arange(first) >= first - (last or LAST)).expand(trace.kv_heads, -1)
    return trace.evict_at[layer, :, :first] > len(trace) - 2


def sparsity(scores: Tensor, counted: Tensor) -> Tensor:
    """Return the share of counted tokens whose score is below p times the largest score, for each p in LEVELS.

    The largest score is taken over all tokens of the kv head, also over tokens that are not counted (G-KV appendix B:
    "the maximum attention score in a sequence").

    scores, counted : [Hkv, N] of one layer, and bool [Hkv, N]

    Returns the mean over kv heads that have counted tokens, float64 [levels].
    """
    relative = scores.double() / scores.double().amax(-1, keepdim=True)
    below = relative < torch.tensor(LEVELS, dtype=torch.float64)[:, None, None]
    return ((below & counted).sum(-1) / counted.sum(-1).double()).nanmean(-1)


def sparsity_numbers(by_layer: Mapping[int, Sequence[Tensor]], counts: Sequence[float]) -> dict[str, Any]:
    """Return the numbers of one source in figure `sparsity`: shares [layers][levels], means over sequences.

    counts : mean number of counted tokens per kv head and layer, of each sequence
    """
    if not counts:
        raise UserError(f"no sequence has more than {OBSERVED} tokens before its last {OBSERVED}")
    means = torch.stack([torch.stack(list(values)).nanmean(0) for values in by_layer.values()])
    return {
        "sequences": len(counts),
        "layers": list(by_layer),
        "counted": round(sum(counts) / len(counts), 2),
        "shares": plain(means),
    }


def draw_sparsity(numbers: Mapping[str, Any], out: Path) -> None:
    """Draw a panel for each source: a line for each layer, coloured by depth, and the mean over layers."""
    sources, levels = numbers["sources"], [100 * level for level in numbers["levels"]]
    models = {source["model"] for source in sources}
    title = f"tokens that get little attention from the last {OBSERVED} queries"
    figure, panels = new_grid(f"{', '.join(sorted(models))}\n{title}", len(sources))
    scale = ScalarMappable(Normalize(0, max(source["layers"][-1] for source in sources)), DEPTH)
    for axes, source in zip(panels, sources, strict=True):
        shares = _array(source["shares"])
        for layer, line in zip(source["layers"], shares, strict=True):
            axes.plot(levels, line, color=scale.to_rgba(layer), linewidth=1, alpha=0.8)
        axes.plot(levels, torch.tensor(shares).nanmean(0), color=RED, linewidth=2.4, label="mean over layers")
        axes.set(xscale="log", xlabel="p (% of the largest score)", ylim=(0, 1.02))
        axes.xaxis.set_major_formatter("{x:g}")
        words = [source["policy"] if len(models) == 1 else f"{source['model']}, {source['policy']}"]
        words += [f"{_sequences(source['sequences'])}, {source['counted']:.0f} tokens counted", source["note"]]
        axes.set_title("\n".join(textwrap.fill(text, 44) for text in words if text), fontsize=10)
    panels[0].set_ylabel("share of tokens with a score below p")
    panels[0].legend(frameon=False, fontsize=9, loc="lower right")
    figure.colorbar(scale, ax=list(panels), label="layer", ticks=MaxNLocator(integer=True))
    save_figure(figure, out)


# ---- recall --------------------------------------------------------------------------------------------------------


def recall_numbers(recalls: Sequence[Tensor], layers: Sequence[int]) -> dict[str, Any]:
    """Return the numbers of figure `recall`. recalls : of each sequence, [layers, Hkv], NaN without competition"""
    usable = [recall for recall in recalls if not bool(recall.isnan().any())]
    if not usable:
        raise UserError("no sequence is so long that more tokens compete than the cache has places for")
    mean = torch.stack(usable).mean(0)
    return {
        "sequences": len(usable),
        "layers": list(layers),
        "recall": plain(mean),
        "mean": round(float(mean.mean()), 6),
    }


def draw_recall(numbers: Mapping[str, Any], out: Path) -> None:
    """Draw, for each layer, a box with quartiles over kv heads, and a dot for each head."""
    layers, recall = numbers["layers"], numbers["recall"]
    heads = len(recall[0])
    title = _title(numbers, f"recall of the top {numbers['k']} of {numbers['teacher']} with a full cache")
    title += f"\n{heads} kv heads of each layer, mean of {_sequences(numbers['sequences'])}"
    figure, axes = new_figure(title)
    colour = COLOURS.get(numbers["method"], GREY)
    axes.boxplot(recall, positions=range(len(layers)), whis=(0, 100), manage_ticks=False)
    for place, row in enumerate(recall):
        axes.plot([place] * heads, row, ".", color=colour, markersize=4)
    axes.axhline(numbers["mean"], color="black", linestyle="--", linewidth=1, label=f"mean {numbers['mean']:.2f}")
    axes.legend(frameon=False)
    layer_ticks(axes.xaxis, layers)
    axes.grid(visible=False, axis="x")
    lowest = min(min(row) for row in recall)
    axes.set(xlabel="layer", ylabel="recall (share of the top k)", ylim=(max(0.0, lowest - 0.1) // 0.1 * 0.1, 1.02))
    save_figure(figure, out)


# ---- shared --------------------------------------------------------------------------------------------------------


def _range(ends: Sequence[int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _sequences(count: int) -> str:
    return "1 sequence" if count == 1 else f"{count} sequences"


def _title(numbers: Mapping[str, Any], shown: str) -> str:
    note = f"\n{numbers['note']}" if numbers.get("note") else ""
    return f"{numbers['model']}, {numbers['policy']}\n{shown}{note}"


FINEST = 500  # maximum number of cells in a row or column
CHUNK = 512  # queries at a time
PALEST = 0.3  # opacity of a cell of which almost all pairs are read through a summary
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


def map_numbers(
    cells: Tensor, trace: EvictionTrace, layer: int, heads: Sequence[int], kv_head: int, size: int
) -> dict[str, Any]:
    """Return the numbers of figure `attention`.

    cells : float32 [R, R], the largest attention in a cell of `size` queries (rows) and tokens (columns), NaN for cells
        in which no query sees a token
    heads, kv_head : the query heads whose mean the cells show, and their kv head
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
    }
    place, part = trace.global_layers.index(layer), trace.policy_part()
    if "closed_at" not in part.further:
        return numbers | {"note": raw_note(part)}
    if place not in paged_layers(part.sections).tolist():
        return numbers
    pages, closed_at = Pages.read(part.further["paged_with"]), part.further["closed_at"]
    read = read_shares(part.further["opened"][place, kv_head, : len(trace) - 1], closed_at, pages, size)
    counts = {"size": pages.size, "sinks": pages.sinks, "closed": len(closed_at)}
    return numbers | {"note": raw_note(part), "pages": counts | {"read": (100 * read).ceil().int().tolist()}}


def draw_attention(numbers: Mapping[str, Any], out: Path) -> None:
    """Draw the map: tokens from left to right, queries from top to bottom; white where no query sees a token."""
    heads, size, fed, pages = numbers["heads"], numbers["cell"], numbers["tokens"], numbers["pages"]
    cells = torch.tensor([[float("nan") if v is None else v for v in row] for row in numbers["cells"]])
    which = f"query head {heads[0]}" if len(heads) == 1 else f"mean of query heads {heads[0]} to {heads[-1]}"
    title = [f"{numbers['model']}, {numbers['policy']}", f"attention in layer {numbers['layer']}, {which}"]
    title += [f"a cell shows the maximum of {size} × {size} queries × tokens"] if size > 1 else []
    title += [numbers["note"]] if numbers["note"] else []
    figure, axes = new_figure("\n".join(title))
    figure.set_size_inches(7.2, 6.6)
    norm = LogNorm(10.0 ** max(LOWEST, math.floor(math.log10(_common(cells)))), 1, clip=True)
    end = len(cells) * size - 0.5
    drawn = {"norm": norm, "extent": (-0.5, end, end, -0.5), "interpolation": "nearest", "aspect": "auto"}
    if pages is None:
        axes.imshow(cells, cmap="viridis_r", **drawn)
    else:
        shares = torch.tensor(pages["read"]) / 100
        axes.imshow(cells, cmap=GREYS, **drawn)
        axes.imshow(cells, alpha=shares.clamp(min=PALEST) * (shares > 0), cmap="viridis_r", **drawn)
        legend = f"grey: read only through the summary of a page of {pages['size']} tokens; in colour: read directly"
        legend += "\nthe stronger the colour, the more of the cell's pairs are read directly" if size > 1 else ""
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
