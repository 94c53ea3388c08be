"""Map of the kv heads that hold each of the last tokens that can be evicted (KVpop, figures 6 and 9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
from matplotlib.ticker import MaxNLocator

from sparse_rl.analysis.drawing import MOST_TICKS, layer_ticks, new_figure, policy_settings, save_figure, subject
from sparse_rl.analysis.heads import protected
from sparse_rl.analysis.held import FONT, cut, held, last_eviction, visible
from sparse_rl.errors import UserError
from sparse_rl.trace import EvictionTrace

LAST = 112  # tokens, as in the paper
MOST_COLUMNS = 160  # with more tokens, a column of the map covers several
LONGEST = 14  # characters of a token that are shown
CELL = 0.115  # width of a column in inches
FEW = 36  # columns, which have space for larger texts


def evictable(trace: EvictionTrace, fingerprint: Mapping[str, str]) -> tuple[int, int]:
    """Return the first token that the policy could have evicted by the end of a trace, and the token after the last.

    They lie between the sinks and the window. If the policy compacts with a period, the window is that of the last
    compaction in any layer, because younger tokens have not been through one.
    """
    sinks, window = protected(fingerprint)
    end, period = len(trace) - 1, policy_settings(fingerprint).get("period")
    if type(period) is int and period > 1:
        end = last_eviction(trace.evict_at[trace.global_layers]) or end
    return sinks, max(sinks, end - window)


def kept_heads(
    trace: EvictionTrace,
    ids: Sequence[int],
    fingerprint: Mapping[str, str],
    strings: Callable[[Sequence[int]], list[str]],
    line: int,
    last: int | None = None,
) -> dict[str, Any]:
    """Return, for each layer, the number of kv heads that hold each of the last evictable tokens at the end.

    ids : token ids of prompt and completion, one for each token of the trace
    strings : function from token ids to the text of each token
    line : line of the sequence in completions.jsonl
    last : maximum number of tokens; None means LAST

    Returns counts [layers][tokens]; `layers`, their indices in the model; `first`, the position of the first token, and
    the texts of the `tokens`. Layers with a sliding window are left out. Raises UserError if no token can be evicted.
    """
    first, end = evictable(trace, fingerprint)
    if end <= first:
        raise UserError(f"no token of line {line} can be evicted: all are sinks or in the window", "--line")
    first = max(first, end - (last or LAST))
    counts = held(trace)[trace.global_layers, :, first:end].sum(1)
    return {
        "subject": subject(fingerprint),
        "line": line,
        "layers": trace.global_layers,
        "kv_heads": trace.kv_heads,
        "first": first,
        "tokens": strings(ids[first:end]),
        "counts": counts.tolist(),
    }


def binned(counts: Sequence[Sequence[float]], most: int) -> tuple[Any, int]:
    """Return the means over groups of consecutive tokens: float [layers, groups], and the number of tokens in a group.

    There are at most `most` groups. The last group may have fewer tokens.
    """
    values = numpy.asarray(counts, dtype=float)
    group = -(-values.shape[1] // most)
    starts = numpy.arange(0, values.shape[1], group)
    sizes = numpy.diff([*starts, values.shape[1]])
    return numpy.add.reduceat(values, starts, axis=1) / sizes, group


def draw_kept_heads(numbers: Mapping[str, Any], out: Path) -> None:
    """Draw the map: a row for each layer, the first on top, and a column for each token, or for several of them."""
    layers, tokens, heads = numbers["layers"], numbers["tokens"], numbers["kv_heads"]
    first, end = numbers["first"], numbers["first"] + len(tokens)
    values, group = binned(numbers["counts"], MOST_COLUMNS)
    texts = [cut(visible(token), LONGEST) for token in tokens] if group == 1 else []
    title = f"{numbers['subject']}: kv heads that hold a token at the end"
    title += f"\nline {numbers['line']}: {len(tokens):,} evictable tokens, positions {first:,} to {end - 1:,}"
    title += f"; a column is the mean over {group} tokens" if group > 1 else ""
    figure, axes = new_figure(title)
    rows = min(max(0.15 * len(layers), 1.2), 9.0)
    points = 9.0 if len(texts) <= FEW else 6.5
    labels = points / 115 * max(map(len, texts), default=2) + 0.1  # inches
    figure.set_size_inches(max(7.2, 1.9 + CELL * values.shape[1]), 1.4 + rows + labels)
    edges = (first - 0.5, first + group * values.shape[1] - 0.5, len(layers) - 0.5, -0.5)
    style: Any = {"cmap": "viridis_r", "vmin": 0, "vmax": heads, "aspect": "auto", "interpolation": "nearest"}
    mesh = axes.imshow(values, extent=edges, **style)
    figure.colorbar(mesh, label=f"kv heads, of {heads}", ticks=MaxNLocator(8, integer=True), pad=0.01, aspect=15)
    axes.grid(visible=False)
    layer_ticks(axes.yaxis, layers, 2 * MOST_TICKS)
    axes.tick_params(axis="y", labelsize=8)
    if texts:
        style = {"rotation": 90, "fontsize": points, "family": FONT, "parse_math": False}
        axes.set_xticks(range(first, end), texts, **style)
        axes.tick_params(axis="x", length=1.5, pad=1)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(first - 0.5, end - 0.5)
    axes.set(xlabel="token" if texts else "position in the sequence (tokens)", ylabel="layer")
    save_figure(figure, out)
