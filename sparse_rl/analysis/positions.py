"""Positions of the tokens that the cache holds at the end, compared between policies (G-KV, figures 7 and 17)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from sparse_rl.analysis.drawing import (
    label_ends,
    method_colours,
    new_figure,
    policy_settings,
    policy_words,
    save_figure,
)
from sparse_rl.analysis.held import held
from sparse_rl.errors import UserError, one_line
from sparse_rl.trace import EvictionTrace

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
    """Return `positions` of each source, with its `label` and the name of its `policy`.

    sources : (name of the folder, fingerprint with the model's name, traces) of each source
    """
    names = source_labels([(name, fingerprint) for name, fingerprint, _ in sources])
    curves = [
        {"label": label, "policy": policy_words(fingerprint)[0], **positions(traces)}
        for label, (_, fingerprint, traces) in zip(names, sources, strict=True)
    ]
    models = list(dict.fromkeys(fingerprint.get("model", "") for _, fingerprint, _ in sources))
    return {"models": models, "sources": curves}


def source_labels(sources: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Return a label of each source: policy and budget, and the settings in which sources of one policy differ.

    If there are several models, a label starts with the model. If labels are still equal, they get the folder's name.

    sources : (name of the folder, fingerprint) of each source
    """
    several = len({fingerprint.get("model") for _, fingerprint in sources}) > 1
    blocks = [policy_settings(fingerprint) for _, fingerprint in sources]
    labels = []
    for (_, fingerprint), block in zip(sources, blocks, strict=True):
        alike = [other for other in blocks if other.get("policy") == block.get("policy")]
        differ = [
            f"{key} {value}"
            for key, value in block.items()
            if key != "budget" and any(other.get(key) != value for other in alike)
        ]
        model = [fingerprint.get("model", "")] if several else []
        labels.append(one_line(", ".join([*model, policy_words(fingerprint)[1], *differ]), 100))
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
    ends = []
    for colour, curve in zip(method_colours([curve["policy"] for curve in curves]), curves, strict=True):
        density = curve["density"]
        bins = len(density)
        axes.plot([(i + 0.5) / bins for i in range(bins)], density, color=colour)
        axes.axvline(curve["mean"], color=colour, linewidth=1.5, linestyle="--")
        ends.append((1 - 0.5 / bins, density[-1], f"{curve['label']}; mean\u00a0{curve['mean']:.2f}", colour))
    axes.set(xlim=(0, 1), xlabel="position in the sequence (0: first token, 1: last); dashed: mean")
    axes.set(ylabel="density (its integral is 1)")
    axes.set_ylim(bottom=0)
    label_ends(axes, ends, 9)
    save_figure(figure, out)
