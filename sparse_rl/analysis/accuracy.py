"""Picture of the accuracy of each method under the small cache and with a full cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from types import MappingProxyType

from matplotlib.patches import Patch

from sparse_rl.analysis.drawing import method_colours, new_figure, save_figure, shade

PALE = 0.65  # share of white in the bars of the full cache
Accuracies = tuple[Sequence[float], Sequence[float]]


def plot_accuracy(
    methods: Mapping[str, Accuracies],
    out: str | Path,
    title: str = "Accuracy",
    method_of: Mapping[str, str | None] = MappingProxyType({}),
) -> Path:
    """Draw two bars per method: its mean accuracy under the small cache and, in a paler colour, with a full cache.

    methods : name -> (accuracies under the small cache, with a full cache), one value in [0, 1] per seed, drawn as dots
    method_of : name -> name of the method in drawing.COLOURS
    """
    figure, axes = new_figure(title)
    height = 0.38
    colours = method_colours([method_of.get(name) for name in methods])
    for place, (colour, accuracies) in enumerate(zip(colours, methods.values(), strict=True)):
        for values, white, shift in ((accuracies[0], 0.0, -height / 2), (accuracies[1], PALE, height / 2)):
            y = place + shift
            axes.barh(y, mean(values), height * 0.92, color=shade(colour, white))
            if len(values) > 1:
                axes.plot(values, [y] * len(values), "o", color="black", markeredgecolor="white", markersize=5)
            axes.annotate(f"{mean(values):.2f}", (max(values), y), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(methods)), list(methods))
    axes.invert_yaxis()  # the first method on top
    axes.grid(axis="y", visible=False)
    several = any(len(values) > 1 for accuracies in methods.values() for values in accuracies)
    axes.set(xlim=(0, 1.08), xlabel="share of problems solved" + ("; dots: one seed each" if several else ""))
    handles = [Patch(color=shade("#444444", white)) for white in (0.0, PALE)]
    names = ["under the small cache", "with a full cache"]
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    return save_figure(figure, out)
