"""The analyses of `sparse-rl plot SOURCE --figure NAME`: the papers' figures, drawn from a user's own rollouts.

An analysis first computes its numbers, which are written as JSON beside the picture. The picture is drawn from these
numbers alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_rl.commands.arguments import positive
from sparse_rl.commands.sources import Source
from sparse_rl.errors import UserError
from sparse_rl.files import replace_text

Numbers = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """Options of `sparse-rl plot` that choose what an analysis looks at; None means the analysis' default.

    layer, head : index of a layer, and of a kv head in it
    line : line of completions.jsonl, from 1
    last : number of tokens at the end of the sequence
    """

    layer: int | None = None
    head: int | None = None
    line: int | None = None
    last: int | None = None


@dataclass(frozen=True)
class Figure:
    """An analysis.

    about : what the picture shows, and the figure of a paper, for the help
    compute : function (sources, choice) -> the numbers, plain values for JSON
    draw : function (numbers, file of the picture) -> None
    uses : the options of `Choice` that it reads
    several : True if it compares several sources in one picture
    automatic : True if a report makes it for each folder of rollouts, because it is quick and needs no model
    """

    about: str
    compute: Callable[[Sequence[Source], Choice], Numbers]
    draw: Callable[[Numbers, Path], None]
    uses: tuple[str, ...] = ()
    several: bool = False
    automatic: bool = False


def _evict_ratio(sources: Sequence[Source], choice: Choice) -> Numbers:
    from sparse_rl.analysis.heads import evict_ratios

    (source,) = sources
    return evict_ratios(source.traces, source.fingerprint)


def _draw_evict_ratio(numbers: Numbers, out: Path) -> None:
    from sparse_rl.analysis.heads import draw_evict_ratios

    draw_evict_ratios(numbers, out)


FIGURES: dict[str, Figure] = {
    "evict_ratio": Figure(
        "share of the tokens that could be evicted and were, for each layer and kv head (KVpop figure 8)",
        _evict_ratio,
        _draw_evict_ratio,
        automatic=True,
    ),
}


def add_figure_arguments(parser: argparse.ArgumentParser) -> None:
    names = "; ".join(f"{name}: {figure.about}" for name, figure in FIGURES.items())
    group = parser.add_argument_group("analyses of rollouts")
    group.add_argument(
        "--figure",
        metavar="NAME",
        choices=tuple(FIGURES),
        help=f"analysis of folders that sparse-rl rollout wrote, with its numbers as JSON beside the picture. {names}",
    )
    group.add_argument("--model", metavar="MODEL", help="model to load; default: the model that sampled the rollouts")
    group.add_argument("--layer", metavar="N", type=_index, help="layer to show, from 0")
    group.add_argument("--head", metavar="N", type=_index, help="kv head to show, from 0")
    group.add_argument("--line", metavar="N", type=positive, help="line of completions.jsonl to show, from 1")
    group.add_argument("--last", metavar="N", type=positive, help="number of tokens to show, at the end")


def _index(text: str) -> int:
    return 0 if text == "0" else positive(text)


def refuse_unused(options: argparse.Namespace) -> None:
    """Raise UserError if an option is given that the chosen figure does not read, or that needs a figure."""
    figure = None if options.figure is None else FIGURES[options.figure]
    for name in ("layer", "head", "line", "last", "model"):
        if getattr(options, name) is None:
            continue
        if figure is None:
            raise UserError(f"--{name} needs --figure", f"--{name}")
        if name != "model" and name not in figure.uses:
            raise UserError(f"the figure {options.figure} does not use it; remove it", f"--{name}")


def draw_figure(options: argparse.Namespace) -> int:
    """Compute and draw the chosen figure, and print the paths of its picture and of its numbers."""
    figure = FIGURES[options.figure]
    for name in ("metric", "axis"):
        if getattr(options, name) is not None:
            raise UserError(f"the figure {options.figure} does not use it; remove it", f"--{name}")
    sources = [Source(path, options.model) for path in options.runs]
    if len(sources) > 1 and not figure.several:
        raise UserError(
            f"the figure {options.figure} shows a single folder of rollouts; name one", str(sources[1].path)
        )
    numbers = figure.compute(sources, Choice(options.layer, options.head, options.line, options.last))
    first = sources[0].path
    out: Path = options.out or (first if first.is_dir() else first.parent) / f"{options.figure}.png"
    write_figure(options.figure, numbers, out)
    print(f"{out}\n{out.with_suffix('.json')}")
    return 0


def write_figure(name: str, numbers: Mapping[str, Any], out: Path) -> None:
    """Draw a figure from its numbers into `out`, and write the numbers beside it as JSON."""
    FIGURES[name].draw(dict(numbers), out)
    try:
        replace_text(out.with_suffix(".json"), json.dumps({"figure": name, **numbers}) + "\n")
    except OSError as error:
        raise UserError(f"{out.with_suffix('.json')} cannot be written: {error}", "--out") from error
