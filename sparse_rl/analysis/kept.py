"""The tokens that caches hold at the end of sequences: maps by kv head, texts, frequent tokens, and positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from sparse_rl.analysis.drawing import (
    layer_ticks,
    method_colours,
    name_lines,
    new_figure,
    new_grid,
    policy_settings,
    policy_words,
    save_figure,
    subject,
)
from sparse_rl.analysis.tables import cache_labels
from sparse_rl.errors import UserError, one_line
from sparse_rl.trace import NEVER, EvictionTrace

FONT = "DejaVu Sans Mono"  # matplotlib contains it
MARKS = {" ": "␣", "\n": "↵", "\t": "⇥"}


def held(trace: EvictionTrace) -> Tensor:
    """Return True where the last query of a trace sees a token: bool [L, Hkv, S - 1]; the last token is never fed."""
    fed = len(trace) - 1
    return trace.evict_at[..., :fed] >= fed


def last_eviction(evict_at: Tensor) -> int | None:
    """Return the first query that ran without the tokens evicted last; None means that no token was evicted."""
    evicted = evict_at[evict_at < NEVER]
    return int(evicted.max()) if len(evicted) else None


def chosen_head(trace: EvictionTrace, layer: int | None, head: int | None) -> tuple[int, int]:
    """Return the indices of a layer (default: the last without a window) and of a kv head. Refuses absent ones."""
    layers = trace.global_layers
    layer, head = layers[-1] if layer is None else layer, head or 0
    if layer >= trace.layers:
        raise UserError(f"the model has the layers 0 to {trace.layers - 1}", "--layer")
    if layer not in layers:
        others = ", ".join(map(str, layers))
        raise UserError(f"layer {layer} has a sliding window, which no policy changes; use {others}", "--layer")
    if head >= trace.kv_heads:
        raise UserError(f"a layer of the model has the kv heads 0 to {trace.kv_heads - 1}", "--head")
    return layer, head


# ---- texts -----------------------------------------------------------------------------------------------------------


def visible(text: str) -> str:
    """Return a text with marks for spaces and line breaks, and escapes for other characters that print nothing."""
    return "".join(MARKS.get(c) or (c if c.isprintable() else repr(c)[1:-1]) for c in text)


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def protected(fingerprint: Mapping[str, str]) -> tuple[int, int]:
    """Return the numbers of first and of last tokens that the policy of a fingerprint never evicts: sinks, window."""
    settings = policy_settings(fingerprint)
    sinks, window = (size if type(size := settings.get(name)) is int else 0 for name in ("sinks", "window"))
    return sinks, window


def evict_ratios(traces: Sequence[EvictionTrace], fingerprint: Mapping[str, str]) -> dict[str, Any]:
    """Return the eviction ratio of each layer and kv head (KVpop, appendix H, figure 8): a median over the traces.

    The ratio of a trace is the share of its tokens between sinks and window that the last query no longer sees. 0 is a
    full cache, 1 a cache of sinks and window alone. A trace without such tokens does not count. Layers with a sliding
    window are left out.

    Returns ratios [layers][kv heads]; `layers`, their indices in the model; the number of `traces` that count; and
    the model and the policy in words, `subject`.
    """
    sinks, window = protected(fingerprint)
    ratios = []
    for trace in (whole.policy_part() for whole in traces):
        fed = len(trace) - 1
        between = trace.evict_at[..., sinks : max(sinks, fed - window)]
        if between.shape[-1]:
            ratios.append((between < fed).double().mean(-1))
    if not ratios:
        raise UserError(f"no trace has a token between {sinks} sinks and a window of {window}, so none can be evicted")
    medians = torch.stack(ratios).quantile(0.5, dim=0)
    return {
        "subject": subject(fingerprint),
        "traces": len(ratios),
        "layers": traces[0].global_layers,
        "ratios": [[round(ratio, 6) for ratio in row] for row in medians.tolist()],
    }


def draw_evict_ratios(numbers: Mapping[str, Any], out: Path) -> None:
    """Draw a map with one row for each layer, the first layer on top, and one column for each kv head."""
    figure, axes = new_figure(
        f"{numbers['subject']}: share of evictable tokens that were evicted\nmedian of {numbers['traces']} sequences"
    )
    style: Any = {"cmap": "viridis_r", "vmin": 0, "vmax": 1, "aspect": "auto", "interpolation": "nearest"}
    figure.colorbar(axes.imshow(numbers["ratios"], **style), label="share evicted")
    axes.grid(visible=False)
    layer_ticks(axes.yaxis, numbers["layers"])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="kv head", ylabel="layer")
    save_figure(figure, out)


LAST_TOKENS = 112  # tokens, as in the paper
MOST_NAMED = 160  # tokens whose texts fit below the map
TICK_LENGTH = 14  # characters of a token that are shown
WRAPPED = 28  # columns of a map; further tokens are in the next map below


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
    last : maximum number of tokens; None means LAST_TOKENS
    """
    first, end = evictable(trace, fingerprint)
    if end <= first:
        raise UserError(f"no token of line {line} can be evicted: all are sinks or in the window", "--line")
    first = max(first, end - (last or LAST_TOKENS))
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


def draw_kept_heads(numbers: Mapping[str, Any], out: Path) -> None:
    """Draw maps below each other, as a text runs on: a row for each layer, and a column for each token."""
    layers, tokens, heads = numbers["layers"], numbers["tokens"], numbers["kv_heads"]
    first, named = numbers["first"], len(tokens) <= MOST_NAMED
    across = min(WRAPPED if named else len(tokens), len(tokens))
    starts = range(0, len(tokens), across)
    title = f"{numbers['subject']}: kv heads that hold a token at the end"
    title += f"\nline {numbers['line']}: {len(tokens):,} evictable tokens, positions {first:,} to "
    title += f"{first + len(tokens) - 1:,}"
    longest = max(len(cut(visible(token), TICK_LENGTH)) for token in tokens)
    turned, high = 90 if longest > 1 else 0, min(max(0.16 * len(layers), 0.6), 2.6) + 0.085 * longest
    figure, panels = new_grid(title, 1, rows=len(starts), cell=(4.8, high + 0.25))
    figure.set_figheight(figure.get_figheight() + 1.4)  # the title and the colours
    style: Any = {"cmap": colormaps["Blues"].resampled(heads + 1), "vmin": -0.5, "vmax": heads + 0.5}
    for axes, start in zip(panels, starts, strict=True):
        texts = [cut(visible(token), TICK_LENGTH) for token in tokens[start : start + across]]
        edges = (first + start - 0.5, first + start + len(texts) - 0.5, len(layers) - 0.5, -0.5)
        counts = [row[start : start + across] for row in numbers["counts"]]
        mesh = axes.imshow(counts, extent=edges, aspect="auto", interpolation="nearest", **style)
        axes.grid(visible=False)
        axes.set_xlim(edges[0], edges[0] + across)  # the last map has the columns of the others
        layer_ticks(axes.yaxis, layers, 8)
        axes.tick_params(axis="y", labelsize=8)
        axes.set_ylabel("layer", fontsize=8)
        if named:
            places = range(first + start, first + start + len(texts))
            axes.set_xticks(places, texts, rotation=turned, fontsize=8, family=FONT, parse_math=False)
            axes.tick_params(axis="x", length=1.5, pad=1)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.set_xlabel("position in the sequence (tokens)")
    label = f"kv heads of the layer that hold the token, of {heads}"
    bar: Any = {"location": "bottom", "ticks": MaxNLocator(8, integer=True), "aspect": 40, "pad": 0.02}
    figure.colorbar(mesh, ax=list(panels), label=label, **bar)
    save_figure(figure, out)


COLUMNS = 100  # characters in a row of the picture
MOST_ROWS = 200
POINTS = 7.973  # font size at which a character is 10 pixels wide, so that no rounding adds up
WIDTH, HEIGHT = 10 / 150, 0.145  # size of a character's cell, in inches
STATES = {"evicted": "#FFFFFF", "held": "#F9B84B", "newer": "#9ED99B"}  # state of a token -> colour behind it
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

    `newer_from`: tokens from this position on came after the head's last eviction. The arguments are those of
    `kept_heads`; layer, head : indices, as in `chosen_head`
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
    """Return the state of each token, a key of STATES."""
    kept, newer_from = numbers["kept"], numbers["newer_from"]
    return [("newer" if i >= newer_from else "held") if flag else "evicted" for i, flag in enumerate(kept)]


def rows_of_text(tokens: Sequence[str], token_states: Sequence[str], columns: int) -> list[list[Cell]]:
    """Return the characters of a text in rows of at most `columns`, which end at line breaks."""
    rows: list[list[Cell]] = [[]]
    for token, state in zip(tokens, token_states, strict=True):
        for character in visible(token):
            if len(rows[-1]) == columns or (rows[-1] and rows[-1][-1][0] == MARKS["\n"]):
                rows.append([])
            rows[-1].append((" " if character == MARKS[" "] else character, state))
    return rows


def draw_kept_text(numbers: Mapping[str, Any], out: Path) -> None:
    """Draw the last MOST_ROWS rows of the text, with a colour behind each token that is held."""
    token_states = states(numbers)
    rows = rows_of_text(numbers["tokens"], token_states, COLUMNS)
    left_out, rows = len(rows[:-MOST_ROWS]), rows[-MOST_ROWS:]
    title = f"{numbers['subject']}: tokens held at the end"
    title += f"\nlayer {numbers['layer']}, kv head {numbers['head']}; line {numbers['line']}, with its prompt"
    title += f" (the first {left_out:,} rows are left out)" if left_out else ""
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
                axes.broken_barh([(start, length)], (place, 1), color=STATES[state], linewidth=0)
            start += length
        text = "".join(character for character, _ in row)
        style: Any = {"family": FONT, "fontsize": POINTS, "va": "center_baseline", "parse_math": False}
        axes.text(0, place + 0.5, text, **style)
    names = {"evicted": "evicted", "held": "held", "newer": "held, after the last eviction"}
    handles = [
        Patch(facecolor=colour, edgecolor="#999999", label=f"{names[state]}: {count:,} token{'s' * (count != 1)}")
        for state, colour in STATES.items()
        for count in [token_states.count(state)]
    ]
    figure.legend(handles=handles, loc="lower left", ncols=3, frameon=False, fontsize=8.5)
    save_figure(figure, out)


MOST_WORDS = 40
INCOMPLETE = "\ufffd"  # text of the bytes of an incomplete character
WORD_LENGTH = 24  # characters of a token that are shown


def cloud(
    sequences: Iterable[tuple[Sequence[int], EvictionTrace]],
    strings: Callable[[Sequence[int]], list[str]],
    fingerprint: Mapping[str, str],
    layer: int | None = None,
    head: int | None = None,
) -> dict[str, Any]:
    """Count how often each token occurs in the sequences, and how often one kv head holds it at the end.

    Texts of tokens are counted without the spaces around them, so that "Wait" and " Wait" are one. Tokens of spaces
    alone are counted under `blank`, and bytes of incomplete characters under `incomplete`, both [kept, total].

    sequences : (token ids of prompt and completion, trace) of each sequence
    strings : function from token ids to the text of each token
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


def draw_cloud(numbers: Mapping[str, Any], out: Path) -> None:
    """Draw a bar for each of the tokens with the largest counts, coloured by the share that is held."""
    words = [word for word in numbers["tokens"] if word["kept"]]
    sequences, left_out = numbers["sequences"], numbers["blank"][0] + numbers["incomplete"][0]
    title = f"{numbers['subject']}: tokens held at the end"
    title += f"\nlayer {numbers['layer']}, kv head {numbers['head']}; {sequences:,} sequence{'s' * (sequences > 1)}"
    remarks = [f"{MOST_WORDS} most frequent of {len(words):,} kinds"] if len(words) > MOST_WORDS else []
    remarks += [f"{left_out:,} without text left out"] if left_out else []
    title += f"\n{'; '.join(remarks)}" if remarks else ""
    words = words[:MOST_WORDS]
    figure, axes = new_figure(title)
    figure.set_figheight(1.6 + 0.2 * len(words))
    shares = [word["kept"] / word["total"] for word in words]
    scale = ScalarMappable(Normalize(0, max(shares)), "viridis_r")
    axes.barh(range(len(words)), [word["kept"] for word in words], color=scale.to_rgba(numpy.asarray(shares)))
    names = [cut(visible(word["token"]), WORD_LENGTH) for word in words]
    axes.set_yticks(range(len(words)), names, family=FONT, fontsize=8, parse_math=False)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="number of times that the token is held")
    figure.colorbar(scale, ax=axes, label="share of the token's occurrences that is held")
    save_figure(figure, out)


BINS = 50


def positions(traces: Iterable[EvictionTrace], bins: int = BINS) -> dict[str, Any]:
    """Return the distribution of the positions of the tokens that caches hold at the end.

    All layers without a sliding window, kv heads and sequences are pooled: each held (layer, kv head, token) of each
    sequence counts once. Token t of F fed tokens has the position t / (F - 1). In the density it counts evenly from
    t / F to (t + 1) / F, so that a full cache has the density 1 at any F.

    Returns `density`, one value for each of `bins` equal parts of [0, 1], with the integral 1; `mean` position; numbers
    of `sequences` and of `held` (layer, kv head, token). Raises UserError if no token is held.
    """
    sequences = count = 0
    total, shares = 0.0, numpy.zeros(bins)
    edges = numpy.linspace(0, 1, bins + 1)
    for sequences, trace in enumerate(traces, start=1):  # noqa: B007 (the number of sequences is returned)
        heads = held(trace)[trace.global_layers].sum(dim=(0, 1)).numpy()  # heads that hold each token
        fed = len(heads)
        count += int(heads.sum())
        total += float(heads @ numpy.arange(fed)) / max(fed - 1, 1)
        before = numpy.concatenate([[0], heads.cumsum()])
        shares += numpy.diff(numpy.interp(edges * fed, numpy.arange(fed + 1), before))
    if not count:
        raise UserError("no token is held at the end of any sequence, so there are no positions to draw")
    return {
        "sequences": sequences,
        "held": count,
        "mean": round(total / count, 6),
        "density": [round(share, 6) for share in (shares * bins / count).tolist()],
    }


def compared_positions(sources: Sequence[tuple[str, Mapping[str, str], Iterable[EvictionTrace]]]) -> dict[str, Any]:
    """Return `positions` of each source (name of the folder, fingerprint, traces), with its `label` and `policy`."""
    names = source_labels([(name, fingerprint) for name, fingerprint, _ in sources])
    curves = [
        {"label": label, "policy": policy_words(fingerprint)[0], **positions(traces)}
        for label, (_, fingerprint, traces) in zip(names, sources, strict=True)
    ]
    models = list(dict.fromkeys(fingerprint.get("model", "") for _, fingerprint, _ in sources))
    return {"models": models, "sources": curves}


def source_labels(sources: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Return a label of each source (name of the folder, fingerprint): its cache, the settings in which sources of one
    cache differ, the model if there are several, and the folder's name if labels are still equal.
    """
    models = [fingerprint.get("model", "") for _, fingerprint in sources]
    caches = []
    for _, fingerprint in sources:
        settings = policy_settings(fingerprint)
        caches.append(SimpleNamespace(policy=settings.pop("policy", "unnamed policy"), parameters=settings))
    labels = [one_line(label, 100) for label in cache_labels(caches)]
    if len({*models}) > 1:
        labels = [f"{model}, {label}" for model, label in zip(models, labels, strict=True)]
    return [
        f"{label} ({one_line(name, 40)})" if labels.count(label) > 1 else label
        for label, (name, _) in zip(labels, sources, strict=True)
    ]


def draw_positions(numbers: Mapping[str, Any], out: Path) -> None:
    curves, models = numbers["sources"], numbers["models"]
    title = f"{one_line(models[0], 50)}: " if len(models) == 1 and models[0] else ""
    title += f"{'positions' if title else 'Positions'} of the tokens held at the end"
    lengths = sorted({curve["sequences"] for curve in curves})
    counts = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    title += f"\npooled over layers, kv heads and {counts} sequence{'s' * (lengths[-1] > 1)}"
    figure, axes = new_figure(title + (" each" if len(curves) > 1 else ""))
    for colour, curve in zip(method_colours([curve["policy"] for curve in curves]), curves, strict=True):
        density = curve["density"]
        bins = len(density)
        label = f"{curve['label']}; mean {curve['mean']:.2f}"
        axes.plot([(i + 0.5) / bins for i in range(bins)], density, color=colour, label=label)
        axes.axvline(curve["mean"], color=colour, linewidth=1.5, linestyle="--")
    axes.set(xlim=(0, 1), xlabel="position in the sequence (0: first token, 1: last)\ndashed: mean")
    axes.set(ylabel="density (its integral is 1)")
    axes.set_ylim(bottom=0)
    name_lines(axes)
    save_figure(figure, out)
