"""Statistics and a map of the pages that the queries of clustered attention opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sparse_rl.analysis.drawing import new_figure, policy_words, save_figure
from sparse_rl.errors import UserError
from sparse_rl.methods.pages.pages import Pages
from sparse_rl.methods.pages.sections import paged_layers
from sparse_rl.trace import EvictionTrace

FINEST = 250  # maximum number of cells in a row or column of the map, so that each is larger than a pixel


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


def _numbers(tally: Tensor) -> dict[str, Any]:
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
    return {**_numbers(tallies.sum(0)), "layers": [_numbers(layer) for layer in tallies]}


def unpaged(trace: EvictionTrace) -> EvictionTrace:
    """Return a trace in which closing a page evicts the page's tokens. No layer may have a sliding window.

    The tokens held in the returned trace are the tokens that queries of `trace` read without a page's summary.
    """
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


def plot_opened(
    traces: Sequence[EvictionTrace], out: str | Path, fingerprint: Mapping[str, str] = MappingProxyType({})
) -> Path:
    """Draw a map of the pages that each query opened, for the longest trace with an opened page."""
    traces = [trace.policy_part() for trace in traces]
    opening = [t for t in traces if bool((t.further["opened"][paged_layers(t.sections)] >= 0).any())]
    if not opening:
        raise UserError("no query of these traces opened a page, so there is no map to draw")
    trace = max(opening, key=len)
    pages, layers = Pages.read(trace.further["paged_with"]), paged_layers(trace.sections)
    opened = trace.further["opened"][layers]
    wide, high = -(-len(trace) // FINEST), -(-(int(opened.max()) + 1) // FINEST)
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
    """Return the line between closed pages (below) and pages that are not closed yet (above), in cell edges of the map.

    The line is (x, y): the first query of each step, and the number of tokens in the pages closed from that query on,
    with the sinks. Both are shifted by -0.5. `closed_at` is int32 [P], the first query for which each page is closed.
    """
    at, counts = closed_at.unique(return_counts=True)
    ends = [pages.sinks, *(pages.sinks + counts.cumsum(0) * pages.size).tolist()]
    return [x - 0.5 for x in (0, *at.tolist(), length - 1)], [y - 0.5 for y in (*ends, ends[-1])]
