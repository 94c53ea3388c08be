"""Pictures of head budgets (Attention Matching, figures 2 and 6 to 8): sensitivity curves, and shares of kept entries.

Each function that returns numbers takes the content of a head_budgets.json (rollout/measure/head_budgets.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparse_rl.analysis.drawing import (
    GREY,
    MOST_TICKS,
    method_colours,
    name_lines,
    new_figure,
    new_grid,
    save_figure,
    shade,
)
from sparse_rl.analysis.tables import model_label
from sparse_rl.errors import one_line

COLOURED = 2  # number of the most, and of the least sensitive heads that are drawn in colour


def sensitivity(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sensitivity curves of all kv heads: the loss with a head at a ratio, minus that with all at `base`.

    Returns ratios, base; layers, the indices of the L layers; `change` and its standard error over the contexts,
    `error`, both [L][Hkv][ratios], the latter None for a single context; `full`, the change with a full cache; `spread`
    [L][Hkv], largest minus smallest change; and `coloured`, the [layer, kv head] of the largest, then smallest spreads.
    """
    subject, ratios = _subject(content), [float(ratio) for ratio in content["ratios"]]
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
    for colour, (layer, head) in zip(method_colours([None] * len(few)), few, strict=True):
        change = numbers["change"][layer][head]
        if numbers["error"] is not None:
            error = numbers["error"][layer][head]
            low, high = ([c + sign * e for c, e in zip(change, error, strict=True)] for sign in (-1, 1))
            axes.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)
        label = f"L{numbers['layers'][layer]}H{head}"
        axes.plot(places, change, color=colour, marker="o", markersize=3, clip_on=False, label=label)
    name_lines(axes)
    heads = sum(map(len, numbers["change"]))
    rule = f"in colour: the {COLOURED} heads with the widest and the {COLOURED} with the narrowest curves, of {heads}"
    axes.set_xlabel("share of its entries that the head keeps" + (f"\n{rule}" if heads > len(few) else ""))
    band = "\nband: ± 1 standard error" if counted > 1 else ""
    axes.set_ylabel(f"change of the loss (nats a token){band}")
    save_figure(figure, out)


def proportions(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the share of all kept entries that each kv head gets: by its head budget, and if the keys with the highest
    attention of all heads are kept (global selection).

    Returns layers; `budgets` [L][Hkv] and their ratio `base`; `global_ratios`, and `global` [ratios][L][Hkv], means
    over the contexts; and `ratio`, the one of `global_ratios` that is nearest to `base`.
    """
    subject, ratios, base = _subject(content), [float(r) for r in content["global_ratios"]], float(content["base"])
    layers, heads = _shape(content)
    budgets = _numbers(content["shares"], layers, heads)
    of_contexts = _numbers(content["global_shares"], subject["contexts"], len(ratios), layers, heads)
    return {
        **subject,
        "layers": _layers(content),
        "base": base,
        "budgets": (budgets / budgets.sum()).tolist(),
        "global_ratios": ratios,
        "global": of_contexts.mean(0).tolist(),
        "ratio": min(ratios, key=lambda ratio: abs(math.log(ratio / base))),
    }


def draw_proportions(numbers: Mapping[str, Any], out: Path) -> None:
    ratio, ratios = numbers["ratio"], numbers["global_ratios"]
    count = sum(map(len, numbers["budgets"]))
    own, other = method_colours([numbers["policy"], "evict"])
    chosen = numbers["global"][ratios.index(ratio)]
    title = f"{numbers['subject']}: share of all kept entries that each kv head gets\n{_contexts(numbers)}; global "
    title += "selection keeps the keys with the highest attention of all heads"
    figure, panels = new_grid(title, 1, rows=2 if len(ratios) > 1 else 1)
    weights = [0.6 - 1.1 * place / max(len(ratios) - 1, 1) for place in range(len(ratios))]
    of_ratios = [
        (f"ratio {r:g}", shares, shade(other, weight))
        for r, shares, weight in zip(ratios, numbers["global"], weights, strict=True)
    ]
    compared = [("head budgets", numbers["budgets"], own), ("global selection", chosen, other)]
    names = [f"head budgets (ratio {numbers['base']:g}), and global selection (ratio {ratio:g})"]
    names.append("global selection at each ratio")
    for axes, name, lines in zip(panels, names, (compared, of_ratios), strict=False):
        for label, shares, colour in lines:
            axes.stairs([100 * share for of_layer in shares for share in of_layer], color=colour, label=label)
        axes.legend(frameon=False, fontsize=8)
        axes.set_title(name, loc="left", fontsize=10)
        axes.axhline(100 / count, color=GREY, linewidth=1, linestyle="--", zorder=1)
        axes.set(ylabel="share (%)", xlim=(0, count), ylim=(0, None))
        axes.grid(axis="x", visible=False)
    layers, heads = numbers["layers"], count // len(numbers["layers"])
    stride = -(-len(layers) // MOST_TICKS)
    panels[-1].set_xticks(range(0, count, stride * heads), [f"L{layer}" for layer in layers[::stride]])
    panels[-1].set_xlabel("layer, with its kv heads side by side; dashed: equal shares")
    save_figure(figure, out)


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
    return [int(layer) for layer in content.get("layers") or range(len(content["shares"]))]


def _numbers(values: Any, *shape: int) -> Tensor:
    """Return values as float64. Raises ValueError if they are not finite numbers of this shape."""
    numbers = torch.tensor(values, dtype=torch.float64)
    if numbers.shape != shape or not bool(numbers.isfinite().all()):
        raise ValueError(f"finite numbers of shape {list(shape)} were expected")
    return numbers
