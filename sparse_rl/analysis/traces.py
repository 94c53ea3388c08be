"""Statistics, tables and pictures of eviction traces and of the tokens that they keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.table import Table

from sparse_rl.analysis.drawing import GREY, method_colours, new_figure, policy_words, save_figure
from sparse_rl.analysis.opened import page_statistics, unpaged
from sparse_rl.trace import EvictionTrace, declared

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
    """Return the share of tokens held at the end by relative position, a mean over traces: float [bins].

    A trace without a token in a bin does not count in that bin. None as `layer` means all layers.
    """
    stacked = torch.stack([t.density(bins, layer) for t in traces])
    filled = torch.zeros(len(traces), bins, dtype=torch.bool)
    for row, trace in enumerate(traces):
        fed = max(len(trace) - 1, 1)
        filled[row, torch.arange(fed) * bins // fed] = True
    return (stacked * filled).sum(0) / filled.sum(0).clamp(min=1)


def kept_table(statistics: Mapping[str, Any], large: int) -> Table:
    """Return a table of the tokens held at the end per layer and kv head.

    If pages close, which happens at the same time in all kv heads, the table shows for each layer the opened pages and
    the mean number of tokens outside closed pages.

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
    table = Table(title=title, title_justify="left")
    for name in ("layer", *names):
        table.add_column(name, justify="right")
    stride = -(-len(kept) // large)
    for layer in range(0, len(kept), stride):
        row, mean = kept[layer], sum(kept[layer]) / len(kept[layer])
        if pages is not None:
            cells = [f"{mean:.1f}", *opened_words(pages["layers"][layer])]
        else:
            cells = [f"{v:.1f}" for v in ((min(row), mean, max(row)) if summary else row)]
        table.add_row(str(statistics.get("global_layers", range(len(kept)))[layer]), *cells)
    if stride > 1:
        table.caption = f"every {stride} layers of {len(kept)}; --json prints all layers"
    return table


def opened_words(numbers: Mapping[str, Any]) -> list[str]:
    """Format the three cells of a layer's opened pages, which `page_statistics` explains."""
    back, repeated = numbers["median_back"], numbers["repeated"]
    return [
        f"{numbers['opened']:.2f}",
        "–" if back is None else str(back),
        "–" if repeated is None else f"{repeated:.1%}",
    ]


def histogram(shares: Sequence[float], height: int = 6) -> list[str]:
    """Draw shares in [0, 1] as lines of text, with one column per share, the top line first."""
    blocks = " ▁▂▃▄▅▆▇█"
    lines = []
    for level in reversed(range(height)):
        eighths = [min(max(round((share * height - level) * 8), 0), 8) for share in shares]
        mark = "100 % ┤" if level == height - 1 else "  0 % ┤" if level == 0 else "      │"
        lines.append(mark + "".join(blocks[n] * 2 for n in eighths).rstrip())
    lines.append("      └" + "──" * len(shares))
    lines.append("       first token".ljust(7 + 2 * len(shares) - 4) + "last")
    return lines


def plot_density(
    traces: Sequence[EvictionTrace],
    out: str | Path,
    fingerprint: Mapping[str, str] = MappingProxyType({}),
    bins: int = 50,
) -> Path:
    """Draw the share of tokens held at the end against the relative position, as the mean over traces.

    If layers differ, each layer is drawn in grey. Layers with a sliding window are left out. The fingerprint of the
    file of traces names the policy.
    """
    name, policy = policy_words(fingerprint)
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
