"""Statistics, tables and pictures of eviction traces: of the tokens that they keep, and of the pages that clustered
attention opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from sparse_rl.analysis.drawing import GREY, method_colours, new_figure, policy_words, save_figure
from sparse_rl.analysis.tables import table
from sparse_rl.errors import UserError
from sparse_rl.methods.pages.policy import Pages
from sparse_rl.methods.pages.sections import paged_layers
from sparse_rl.trace import EvictionTrace, declared

FINEST_MAP = 250  # maximum number of cells in a row or column of the map, so that each is larger than a pixel


def records_pages(trace: EvictionTrace) -> bool:
    """Return True if pages close in some layers. The tokens of a closed page are held, but read through its summary."""
    return "closed_at" in trace.further


def _tally(opened: Tensor, closed_at: Tensor, pages: Pages, longest: int) -> Tensor:
    """Return counts for one layer of a trace, over all kv heads, and over the queries for which a page was closed.

    The result is int64 [5 + longest], where `longest` is the length of the longest trace. It has the number of these
    queries; of pairs of a query and a page closed for it; of opened pages; of queries that opened pages, without the
    first of the queries; of those among them that opened the same pages as the query before; and a histogram of the
    opened pages over the distance in tokens from the query back to the end of the page.

    opened : pages that each query opened, negative for unused places: int16 [Hkv, S, K], with at most K pages per query
    closed_at : first query for which each page is closed: int32 [P], for P pages
    """
    heads, length, _ = opened.shape
    query, fed = torch.arange(length), length - 1  # the last token is never fed
    counted = (query >= (closed_at[:1] if len(closed_at) else length)) & (query < fed)
    chosen, ordered = opened >= 0, opened.sort(-1).values
    following = counted[:-1] & counted[1:] & chosen[:, 1:].any(-1)
    repeated = following & (ordered[:, 1:] == ordered[:, :-1]).all(-1)
    sums = heads * counted.sum(), heads * (fed - closed_at).sum(), chosen.sum(), following.sum(), repeated.sum()
    ends = pages.sinks + (opened.long() + 1) * pages.size - 1
    back = torch.bincount((query[:, None] - ends)[chosen].clamp(min=0), minlength=longest)
    return torch.cat([torch.stack(sums), back])


def _page_numbers(tally: Tensor) -> dict[str, Any]:
    """Return the statistics of `page_statistics` from the counts of `_tally`; None where there is nothing to count."""
    (queries, closed, opened, following, repeated), back = tally[:5].tolist(), tally[5:]
    middle = (opened + 1) // 2
    return {
        "opened": round(opened / max(queries, 1), 4),
        "closed": round(closed / max(queries, 1), 4),
        "median_back": int((back.cumsum(0) < middle).sum()) if opened else None,
        "repeated": round(repeated / following, 4) if following else None,
    }


def page_statistics(traces: Sequence[EvictionTrace]) -> dict[str, Any] | None:
    """Return statistics of opened pages over all traces, and for each layer. None means that the traces have no pages.
    The traces must have no layers with a sliding window.

    opened, closed : mean number of opened and of closed pages per query, over queries that had a closed page
    median_back : median distance in tokens from a query back to the last token of a page that the query opened
    repeated : among queries that opened pages, the share that opened the same pages as the query before

    A trace counts only in its own paged layers.
    """
    if not records_pages(traces[0]):
        return None
    longest = max(map(len, traces))
    tallies = torch.zeros(traces[0].layers, 5 + longest, dtype=torch.long)
    for trace in traces:
        pages, closed_at = Pages.read(trace.further["paged_with"]), trace.further["closed_at"]
        for layer in paged_layers(trace.sections).tolist():
            tallies[layer] += _tally(trace.further["opened"][layer], closed_at, pages, longest)
    return {**_page_numbers(tallies.sum(0)), "layers": [_page_numbers(layer) for layer in tallies]}


def unpaged(trace: EvictionTrace) -> EvictionTrace:
    """Return a trace in which closing a page evicts the page's tokens. No layer may have a sliding window."""
    pages, closed_at = Pages.read(trace.further["paged_with"]), trace.further["closed_at"]
    evict_at, layers = trace.evict_at.clone(), paged_layers(trace.sections)[:, None]
    tokens = pages.tokens(torch.arange(len(closed_at))).flatten()
    evict_at[layers, :, tokens] = closed_at.repeat_interleave(pages.size)[:, None]
    return EvictionTrace(evict_at)


def opened_shares(opened: Tensor, wide: int, high: int) -> Tensor:
    """Return a map of the shares of (layer, kv head) pairs in which a query opened a page: float [rows, columns].

    A cell covers `high` pages and `wide` queries, and has their largest share. The last row has the last opened page.

    opened : as in `_tally`, for L layers: int16 [L, Hkv, S, K]
    """
    count, cells = int(opened.max()) + 1, []
    # in parts, because queries x pages of a whole sequence may not fit into memory
    for part in opened.split(wide, dim=2):
        query = torch.arange(part.shape[2])[:, None].expand_as(part)
        places = (query * count + part)[part >= 0]
        times = torch.bincount(places, minlength=part.shape[2] * count).view(-1, count).amax(0)
        cells.append(torch.stack([group.max() for group in times.split(high)]))
    return torch.stack(cells, dim=1) / (opened.shape[0] * opened.shape[1])


def plot_opened(traces: Sequence[EvictionTrace], out: str | Path, fingerprint: Mapping[str, str]) -> Path:
    """Draw a map of the pages that each query opened, for the longest trace with an opened page."""
    traces = [trace.policy_part() for trace in traces]
    opening = [t for t in traces if bool((t.further["opened"][paged_layers(t.sections)] >= 0).any())]
    if not opening:
        raise UserError("no query of these traces opened a page, so there is no map to draw")
    trace = max(opening, key=len)
    pages, layers = Pages.read(trace.further["paged_with"]), paged_layers(trace.sections)
    opened = trace.further["opened"][layers]
    wide, high = -(-len(trace) // FINEST_MAP), -(-(int(opened.max()) + 1) // FINEST_MAP)
    shares = opened_shares(opened, wide, high)
    across = [column * wide - 0.5 for column in range(shares.shape[1] + 1)]
    up = [pages.sinks + row * high * pages.size - 0.5 for row in range(shares.shape[0] + 1)]
    title = f"{policy_words(fingerprint)[1]}: pages that queries opened, of {pages.size} tokens each"
    title += f"\npaged layers: {len(layers)}" + (
        f"; a cell shows the maximum over {wide} × {high} queries × pages" if wide * high > 1 else ""
    )
    figure, axes = new_figure(title)
    cells = shares.where(shares > 0, torch.nan).numpy()
    mesh = axes.pcolormesh(across, up, cells, cmap="viridis_r", vmin=0, vmax=1, rasterized=True)
    figure.colorbar(mesh, label="share of layers and kv heads")
    edges = closing_line(trace.further["closed_at"], pages, len(trace))
    axes.step(*edges, where="post", color="black", linewidth=1, label="pages below are closed")
    axes.grid(visible=False)
    axes.set_xlim(-0.5, len(trace) - 1.5)  # the last token is never fed
    axes.set_ylim(bottom=0)
    axes.set(xlabel="query (position in the sequence)", ylabel="tokens of the pages it opened")
    figure.legend(loc="outside lower center", frameon=False, fontsize=10)
    return save_figure(figure, out)


def closing_line(closed_at: Tensor, pages: Pages, length: int) -> tuple[list[float], list[float]]:
    """Return the line (x, y) between closed pages (below) and pages that are not closed yet, in cell edges of the map.

    `closed_at` is int32 [P], the first query for which each page is closed.
    """
    at, counts = closed_at.unique(return_counts=True)
    ends = [pages.sinks, *(pages.sinks + counts.cumsum(0) * pages.size).tolist()]
    return [x - 0.5 for x in (0, *at.tolist(), length - 1)], [y - 0.5 for y in (*ends, ends[-1])]


HELD = ("retention", "kept_per_head", "density")  # keys of the statistics of tokens held at the end
UNPAGED = ("unpaged", "unpaged_per_head", "unpaged_density")  # keys for tokens outside closed pages only


def trace_statistics(traces: Sequence[EvictionTrace], fingerprint: Mapping[str, str]) -> dict[str, Any]:
    """Return the statistics of a file of traces that `sparse-rl inspect` prints; values per head are lists [L][Hkv].

    If no pages close, the statistics contain the keys of HELD. If pages close, they contain HELD[0] and the keys of
    UNPAGED, because the tokens of a closed page are held, but read through the page's summary. Layers with a sliding
    window are left out. Further keys:

    global_layers : indices in the model of the other layers, if some layers have a sliding window
    pages : statistics of opened pages (opened.py), if pages close
    sections : bytes, dtype and shape of each section other than evict_at
    compactions : number of compactions per trace, if entries are refitted
    """
    whole, traces = traces, [t.policy_part() for t in traces]
    pages = page_statistics(traces)
    read = traces if pages is None else [unpaged(t) for t in traces]
    kept = torch.stack([t.kept_counts().float() for t in read]).mean(0)
    lengths = [len(t) for t in traces]

    def spread(values: Sequence[float]) -> dict[str, float]:
        return {"min": min(values), "mean": sum(values) / len(values), "max": max(values)}

    share, per_head, density = HELD if pages is None else UNPAGED
    statistics = {
        "traces": len(traces),
        "layers": traces[0].layers,
        "kv_heads": traces[0].kv_heads,
        "length": spread(lengths),
        HELD[0]: spread([t.retention() for t in traces]),
        share: spread([t.retention() for t in read]),
        per_head: [[round(v, 2) for v in row] for row in kept.tolist()],
        density: [round(v, 4) for v in mean_density(read, 20).tolist()],
        "fingerprint": dict(fingerprint),
        "sections": _further(whole),
    }
    if whole[0].windows:
        statistics["global_layers"] = whole[0].global_layers
    if pages is not None:
        statistics["pages"] = pages
    if "refit_at" in traces[0].further:
        statistics["compactions"] = spread([len(t.further["refit_at"]) for t in traces])
    return statistics


def _further(traces: Sequence[EvictionTrace]) -> dict[str, Any]:
    """Return the bytes (in all traces), dtype and shape (in the first trace) of each section other than evict_at."""
    return {
        name: {
            "bytes": sum(t.further[name].nbytes for t in traces),
            "dtype": str(first.dtype).removeprefix("torch."),
            "shape": dict(zip(declared()[name].axes, first.shape, strict=True)),
        }
        for name, first in traces[0].further.items()
    }


def mean_density(traces: Sequence[EvictionTrace], bins: int, layer: int | None = None) -> Any:
    """Return the share of tokens held at the end by relative position, a mean over traces: float [bins]."""
    stacked = torch.stack([t.density(bins, layer) for t in traces])
    filled = torch.zeros(len(traces), bins, dtype=torch.bool)
    for row, trace in enumerate(traces):
        fed = max(len(trace) - 1, 1)
        filled[row, torch.arange(fed) * bins // fed] = True
    return (stacked * filled).sum(0) / filled.sum(0).clamp(min=1)


def kept_table(statistics: Mapping[str, Any], large: int) -> Table:
    """Return a table of the tokens held at the end per layer and kv head; if pages close, of the opened pages.

    large : if there are more layers, only some are shown; if there are more kv heads, only minimum, mean and maximum
    """
    pages = statistics.get("pages")
    kept = statistics[HELD[1] if pages is None else UNPAGED[1]]
    summary = pages is None and len(kept[0]) > large
    if pages is not None:
        title, names = "pages opened per query", ["unpaged", "opened", "tokens back", "as before"]
    else:
        title = "entries held at the end"
        names = ["min", "mean", "max"] if summary else [f"head {h}" for h in range(len(kept[0]))]
    stride, rows = -(-len(kept) // large), []
    for layer in range(0, len(kept), stride):
        row, mean = kept[layer], sum(kept[layer]) / len(kept[layer])
        if pages is not None:
            cells = [f"{mean:.1f}", *opened_words(pages["layers"][layer])]
        else:
            cells = [f"{v:.1f}" for v in ((min(row), mean, max(row)) if summary else row)]
        rows.append([str(statistics.get("global_layers", range(len(kept)))[layer]), *cells])
    caption = f"every {stride} layers of {len(kept)}; --json prints all layers" if stride > 1 else None
    return table(title, ("layer", *names), rows, (), caption=caption)


def opened_words(numbers: Mapping[str, Any]) -> list[str]:
    """Format the three cells of a layer's opened pages, which `page_statistics` explains."""
    back, repeated = numbers["median_back"], numbers["repeated"]
    return [
        f"{numbers['opened']:.2f}",
        "–" if back is None else str(back),
        "–" if repeated is None else f"{repeated:.1%}",
    ]


def plot_density(traces: Sequence[EvictionTrace], out: str | Path, fingerprint: Mapping[str, str]) -> Path:
    """Draw the share of tokens held at the end against the relative position, a mean over traces."""
    (name, policy), bins = policy_words(fingerprint), 50
    figure, axes = new_figure(f"{policy}: tokens held at the end of {len(traces)} trace{'s' * (len(traces) > 1)}")
    centres = [(i + 0.5) / bins for i in range(bins)]
    mean = mean_density(traces, bins)
    layers = [mean_density(traces, bins, layer) for layer in traces[0].global_layers]
    differ = not all(torch.allclose(layer, mean) for layer in layers)
    for number, layer in enumerate(layers if differ else ()):
        axes.plot(centres, layer, color=GREY, alpha=0.5, linewidth=1, label="_" if number else "each layer")
    label = "mean over layers" if differ else "all layers alike" if len(layers) > 1 else "its one layer"
    axes.plot(centres, mean, color=method_colours([name])[0], label=label)
    axes.set(xlim=(0, 1), xlabel="position in the sequence (0: first token, 1: last)")
    axes.set(ylim=(0, 1.02), ylabel="share of tokens held at the end")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    return save_figure(figure, out)
