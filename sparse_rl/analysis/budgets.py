"""Pictures of head budgets (Attention Matching, figures 2 and 6 to 8): sensitivity curves, and shares of kept entries.

Each function that returns numbers takes the content of a head_budgets.json (rollout/evaluation/budgets.py).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from sparse_rl.analysis.drawing import (
    GREY,
    STYLE,
    TITLE_WIDTH,
    label_ends,
    method_colours,
    new_figure,
    save_figure,
    shade,
)
from sparse_rl.analysis.evaluation import model_label
from sparse_rl.errors import one_line

COLOURED = 2  # number of the most, and of the least sensitive heads that are drawn in colour
MOST_NAMED = 16  # maximum number of heads whose names fit below an axis
MOST_LABELLED = 18  # maximum number of layers whose indices fit below an axis


def sensitivity(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sensitivity curves of all kv heads, relative to the baseline, as means over the contexts.

    Each value is the loss with the head at a ratio, minus the loss with all heads at the ratio `base`, in nats a token.

    Returns the words of `_subject`; ratios, base; layers, the indices of the L layers; `change` and its standard error
    over the contexts, `error`, both [L][Hkv][ratios], the latter None for a single context; `full`, the change with a
    full cache; `spread` [L][Hkv], the difference of the largest and the smallest change of a head; and `coloured`, the
    [layer, kv head] of the heads with the largest spreads and then of those with the smallest.

    Raises ValueError, LookupError or TypeError for invalid content.
    """
    subject, ratios = _subject(content), _ratios(content["ratios"])
    contexts, (layers, heads) = subject["contexts"], _shape(content)
    curves = _numbers(content["losses"], contexts, layers, heads, len(ratios))
    baseline = _numbers(content["baseline_losses"], contexts)
    changes = curves - baseline[:, None, None, None]
    change = changes.mean(0)
    spread = change.amax(-1) - change.amin(-1)
    order = spread.flatten().sort(descending=True, stable=True).indices.tolist()
    few = order if len(order) <= 2 * COLOURED else [*order[:COLOURED], *order[-COLOURED:]]
    indices = _layers(content)
    return {
        **subject,
        "ratios": ratios,
        "base": float(content["base"]),
        "layers": indices,
        "change": change.tolist(),
        "error": (changes.std(0) / math.sqrt(contexts)).tolist() if contexts > 1 else None,
        "full": float((_numbers(content["full_losses"], contexts) - baseline).mean()),
        "spread": spread.tolist(),
        "coloured": [[indices[place // heads], place % heads] for place in few],
    }


def draw_sensitivity(numbers: Mapping[str, Any], out: Path) -> None:
    """Draw the curves on a logarithmic axis of ratios. Ratio 0 stands at half of the smallest ratio above 0."""
    counted, ratios, base = numbers["contexts"], numbers["ratios"], numbers["base"]
    few = [(numbers["layers"].index(layer), head) for layer, head in numbers["coloured"]]
    title = f"{numbers['subject']}: loss if one kv head keeps another ratio"
    figure, axes = new_figure(f"{title}\nall other heads keep {base:g}; {_contexts(numbers, 'mean of ')}")
    lowest = min(ratio for ratio in ratios if ratio > 0)
    places = [ratio or lowest / 2 for ratio in ratios]
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{ratio:g}" if ratio else "one\nentry" for ratio in ratios])
    axes.minorticks_off()
    axes.set_xlim(0.85 * places[0], places[-1])
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.axvline(base, color=GREY, linewidth=0.8, linestyle=":")
    for layer, of_layer in enumerate(numbers["change"]):
        for head, change in enumerate(of_layer):
            if (layer, head) not in few:
                axes.plot(places, change, color=GREY, linewidth=0.6, alpha=0.35)
    ends = []
    for colour, (layer, head) in zip(method_colours([None] * len(few)), few, strict=True):
        change = numbers["change"][layer][head]
        if numbers["error"] is not None:
            error = numbers["error"][layer][head]
            low, high = ([c + sign * e for c, e in zip(change, error, strict=True)] for sign in (-1, 1))
            axes.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(places, change, color=colour, marker="o", markersize=3, clip_on=False)
        ends.append((places[-1], change[-1], f"L{numbers['layers'][layer]}H{head}", colour))
    label_ends(axes, ends, 9)
    heads = sum(map(len, numbers["change"]))
    rule = f"in colour: the {COLOURED} heads with the widest and the {COLOURED} with the narrowest curves, of {heads}"
    axes.set_xlabel("share of its entries that the head keeps" + (f"\n{rule}" if heads > len(few) else ""))
    band = "\nband: ± 1 standard error" if counted > 1 else ""
    axes.set_ylabel(f"change of the loss (nats a token){band}")
    save_figure(figure, out)


def proportions(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the share of all kept entries that each kv head gets: by its head budget, and if the keys with the highest
    attention of all heads are kept (global selection).

    Returns the words of `_subject`; layers, the indices of the L layers; `budgets` [L][Hkv] with the sum 1, and their
    ratio `base`; `global_ratios`, and `global` [ratios][L][Hkv], means over the contexts, each with the sum 1; and
    `ratio`, the one of `global_ratios` that is nearest to `base`, with the smallest and the largest share of a context
    at this ratio, `low` and `high` [L][Hkv].

    Raises ValueError, LookupError or TypeError for invalid content.
    """
    subject, ratios, base = _subject(content), _ratios(content["global_ratios"]), float(content["base"])
    contexts, (layers, heads) = subject["contexts"], _shape(content)
    budgets = _numbers(content["shares"], layers, heads)
    of_contexts = _numbers(content["global_shares"], contexts, len(ratios), layers, heads)
    nearest = min(range(len(ratios)), key=lambda place: abs(math.log(ratios[place] / base)))
    return {
        **subject,
        "layers": _layers(content),
        "base": base,
        "budgets": (budgets / budgets.sum()).tolist(),
        "global_ratios": ratios,
        "global": of_contexts.mean(0).tolist(),
        "ratio": ratios[nearest],
        "low": of_contexts[:, nearest].amin(0).tolist(),
        "high": of_contexts[:, nearest].amax(0).tolist(),
    }


def draw_proportions(numbers: Mapping[str, Any], out: Path) -> None:
    """Draw the shares of all heads, in the order of the layers, in up to three panels: budgets beside global selection,
    the differences between contexts, and the differences between ratios.
    """
    ratio, ratios = numbers["ratio"], numbers["global_ratios"]
    count = sum(map(len, numbers["budgets"]))
    own, other = method_colours([numbers["policy"], "evict"])
    chosen = numbers["global"][ratios.index(ratio)]
    several, swept = numbers["contexts"] > 1, len(ratios) > 1
    panels, wide = 1 + several + swept, count > 4 * MOST_NAMED
    matplotlib.use("Agg")
    with plt.rc_context(STYLE):
        size = (11.0 if wide else 7.2, 0.9 + 2.3 * panels)
        figure, grid = plt.subplots(panels, 1, sharex=True, squeeze=False, layout="constrained", figsize=size)
        title = f"{numbers['subject']}: share of all kept entries that each kv head gets"
        about = f"{_contexts(numbers)}; global selection keeps the keys with the highest attention of all heads"
        about = textwrap.fill(about, TITLE_WIDTH * (1 + wide))
        figure.suptitle(f"{title}\n{about}", x=0.01, ha="left", fontsize=STYLE["axes.titlesize"])
    first, *rest = grid[:, 0]
    _name(first, f"head budgets (ratio {numbers['base']:g}), and global selection (ratio {ratio:g})")
    _stairs(first, numbers["budgets"], own, fill=True, alpha=0.35)
    _ended(first, [("head budgets", numbers["budgets"], own), ("global selection", chosen, other)])
    if several:
        axes = rest[0]
        _name(axes, f"global selection, ratio {ratio:g}: mean over contexts; band: smallest and largest")
        _stairs(axes, numbers["high"], other, baseline=_percent(numbers["low"]), fill=True, alpha=0.35)
        _ended(axes, [("mean", chosen, other)])
    if swept:
        _name(rest[-1], "global selection at each ratio" + (": mean over contexts" if several else ""))
        weights = [0.6 - 1.1 * place / (len(ratios) - 1) for place in range(len(ratios))]
        of_ratios = zip(ratios, numbers["global"], weights, strict=True)
        _ended(rest[-1], [(f"ratio {r:g}", shares, shade(other, weight)) for r, shares, weight in of_ratios])
    for axes in grid[:, 0]:
        axes.axhline(100 / count, color=GREY, linewidth=1, linestyle="--", zorder=1)
        axes.set_ylabel("share (%)")
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, count)
        _mark_layers(axes, numbers["layers"], count // len(numbers["layers"]))
    grid[-1, 0].set_xlabel(f"{_axis(count)}; dashed: equal shares")
    save_figure(figure, out)


def _name(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)


def _axis(count: int) -> str:
    return "kv head" if count <= MOST_NAMED else "layer, with its kv heads side by side"


def _mark_layers(axes: Any, layers: Sequence[int], heads: int) -> None:
    """Draw the borders of the layers, and write their indices, or the names of all heads if they fit."""
    axes.grid(axis="x", visible=False)
    for border in range(1, len(layers)):
        axes.axvline(border * heads, color="#c8c8c8", linewidth=0.6, zorder=0)
    if len(layers) * heads <= MOST_NAMED:
        names = [f"L{layer}H{head}" for layer in layers for head in range(heads)]
        axes.set_xticks([place + 0.5 for place in range(len(names))], names, fontsize=8 if len(names) > 8 else None)
        return
    stride = -(-len(layers) // MOST_LABELLED)
    places = [(place + 0.5) * heads for place in range(0, len(layers), stride)]
    axes.set_xticks(places, [str(layer) for layer in layers[::stride]])


def _ended(axes: Any, lines: Sequence[tuple[str, Sequence[Sequence[float]], str]]) -> None:
    """Draw lines of steps, each (name, shares, colour), with their names at their ends."""
    for _, shares, colour in lines:
        _stairs(axes, shares, colour, linewidth=1.2)
    ends = [_percent(shares) for _, shares, _ in lines]
    label_ends(axes, [(len(end), end[-1], line[0], line[2]) for end, line in zip(ends, lines, strict=True)], 9)


def _stairs(axes: Any, shares: Sequence[Sequence[float]], colour: str, baseline: Any = None, **style: Any) -> None:
    """Draw shares [L][Hkv] as steps of width 1, in percent."""
    values = _percent(shares)
    filled = [0.0] * len(values) if style.get("fill") and baseline is None else baseline
    axes.stairs(values, range(len(values) + 1), baseline=filled, color=colour, **style)


def _percent(shares: Sequence[Sequence[float]]) -> list[float]:
    return [100 * share for of_layer in shares for share in of_layer]


def _contexts(numbers: Mapping[str, Any], before: str = "") -> str:
    count, tasks = numbers["contexts"], ", ".join(numbers["tasks"])
    return one_line(f"{before if count > 1 else ''}{count} context{'s' * (count > 1)} of {tasks}", 60)


def _subject(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy, the number of contexts and their tasks, and model and method in words (`subject`)."""
    cache, contexts = content["settings"]["prompt_cache"], content["contexts"]
    if not contexts:
        raise ValueError("it has no contexts")
    policy = str(cache["policy"])
    return {
        "subject": f"{one_line(model_label(str(content['model']['name'])), 40)}, {policy}, {cache['select']}",
        "policy": policy,
        "contexts": len(contexts),
        "tasks": list(dict.fromkeys(str(context["task"]) for context in contexts)),
    }


def _shape(content: Mapping[str, Any]) -> tuple[int, int]:
    return len(content["shares"]), len(content["shares"][0])


def _layers(content: Mapping[str, Any]) -> list[int]:
    """Return the indices of the layers: all layers, unless the file names those without a sliding window."""
    layers = content.get("layers") or list(range(len(content["shares"])))
    if len(layers) != len(content["shares"]):
        raise ValueError(f"it has budgets of {len(content['shares'])} layers, but names {len(layers)}")
    return [int(layer) for layer in layers]


def _ratios(values: Any) -> list[float]:
    """Return ratios as numbers. Raises ValueError unless they are from 0 to 1 and increase."""
    ratios = _numbers(values, len(values)).tolist()
    if sorted(set(ratios)) != ratios or not 0 <= ratios[0] <= ratios[-1] <= 1 or ratios == [0]:
        raise ValueError("its ratios are not increasing numbers from 0 to 1")
    return ratios


def _numbers(values: Any, *shape: int) -> Tensor:
    """Return values as float64. Raises ValueError if they are not finite numbers of this shape."""
    numbers = torch.tensor(values, dtype=torch.float64)
    if numbers.shape != shape or not bool(numbers.isfinite().all()):
        raise ValueError(f"finite numbers of shape {list(shape)} were expected")
    return numbers
