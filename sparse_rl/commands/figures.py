"""The analyses of `sparse-rl plot SOURCE --figure NAME`: the papers' figures, drawn from a user's own rollouts.

An analysis first computes its numbers, which are written as JSON beside the picture. The picture is drawn from these
numbers alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from sparse_rl.commands.arguments import positive
from sparse_rl.commands.sources import Source
from sparse_rl.errors import UserError
from sparse_rl.files import read_text, replace_text

Numbers = dict[str, Any]
BEGINS = '{"figure":'  # of every file of numbers


@dataclass(frozen=True)
class Choice:
    """Options of `sparse-rl plot` that choose what an analysis looks at; None means the analysis' default.

    layer, head : index of a layer, and of a kv head in it (of a query head, for the figure `attention`)
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
    computed_in : module of sparse_rl.commands that has a function of the figure's name, (sources, choice) -> the
        numbers, plain values for JSON
    drawn_by : "module:function" of sparse_rl.analysis, (numbers, file of the picture) -> None
    uses : the options of `Choice` that it reads
    several : True if it compares several sources in one picture
    automatic : True if a report makes it for each folder of rollouts, because it is quick and needs no model
    """

    about: str
    computed_in: str
    drawn_by: str
    uses: tuple[str, ...] = ()
    several: bool = False
    automatic: bool = False

    def draw(self, numbers: Numbers, out: Path) -> None:
        """Draw the picture. The modules of an analysis are imported only now, because they need torch."""
        module, function = self.drawn_by.split(":")
        getattr(import_module(f"sparse_rl.analysis.{module}"), function)(numbers, out)


FIGURES: dict[str, Figure] = {
    "evict_ratio": Figure(
        "share of the tokens that could be evicted and were, for each layer and kv head (KVpop figure 8)",
        "trace_figures",
        "heads:draw_evict_ratios",
        automatic=True,
    ),
    "positions": Figure(
        "density of the positions of the tokens held at the end, and their mean, for each source (G-KV figures 7, 17)",
        "trace_figures",
        "positions:draw_positions",
        several=True,
        automatic=True,
    ),
    "kept_heads": Figure(
        "number of kv heads of each layer that hold each of the last evictable tokens of a sequence (KVpop figures 6, "
        "9); by default of the longest sequence, and 112 tokens",
        "trace_figures",
        "kept_heads:draw_kept_heads",
        uses=("line", "last"),
        automatic=True,
    ),
    "cloud": Figure(
        "word cloud of the tokens that one kv head holds at the end, by default head 0 of the last layer (G-KV figure "
        "20)",
        "trace_figures",
        "cloud:draw_cloud",
        uses=("layer", "head"),
    ),
    "kept_text": Figure(
        "text of a sequence in which the tokens that one kv head holds at the end are marked, by default line 1, and "
        "head 0 of the last layer (G-KV figures 21 to 24)",
        "trace_figures",
        "kept_text:draw_kept_text",
        uses=("line", "layer", "head"),
    ),
    "overlap": Figure(
        "overlap of the tokens that the last of 4 windows attends to most with those of the earlier windows, against "
        "the share of the tokens (G-KV figures 1, 16); the windows have the last 512 tokens together, or half of a "
        "shorter sequence",
        "attention_figures",
        "attention:draw_overlap",
        uses=("line", "last"),
    ),
    "sparsity": Figure(
        "share of the tokens whose attention from the last 16 queries is below p x the largest, by layer and source "
        "(G-KV figure 9); of a full cache the last 512 tokens count, of others the entries held at the end",
        "attention_figures",
        "attention:draw_sparsity",
        uses=("line", "last"),
        several=True,
    ),
    "recall": Figure(
        "share of the full-attention teacher's top k tokens that the cache held, by layer and kv head (KVpop figure 7)",
        "attention_figures",
        "attention:draw_recall",
        uses=("line",),
    ),
    "attention": Figure(
        "map of the attention of one sequence, with evicted tokens and pages (LuKA figure 1), by default of line 1, "
        "the layer in the middle, and the mean of the query heads of kv head 0; --head is a query head",
        "attention_figures",
        "attention_map:draw_attention",
        uses=("layer", "head", "line"),
    ),
}


def compute(name: str, sources: Sequence[Source], choice: Choice) -> Numbers:
    """Return the numbers of the figure with this name."""
    module = import_module(f"sparse_rl.commands.{FIGURES[name].computed_in}")
    numbers: Numbers = getattr(module, name)(sources, choice)
    return numbers


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
    numbers = compute(options.figure, sources, Choice(options.layer, options.head, options.line, options.last))
    first = sources[0].path
    out: Path = options.out or (first if first.is_dir() else first.parent) / f"{options.figure}.png"
    write_figure(options.figure, figure.draw, numbers, out)
    return 0


def write_figure(name: str, draw: Callable[[Numbers, Path], None], numbers: Mapping[str, Any], out: Path) -> None:
    """Draw a figure from its numbers into `out`, write the numbers beside it as JSON, and print both paths.

    Raises UserError if the file of the numbers exists and is something else, such as a file of results.
    """
    beside = out.with_suffix(".json")
    if beside.exists() and not read_text(beside).startswith(BEGINS):
        raise UserError(f"{beside}, the file of the numbers, exists and holds something else; name another --out")
    draw(dict(numbers), out)
    try:
        replace_text(beside, json.dumps({"figure": name, **numbers}) + "\n")
    except OSError as error:
        raise UserError(f"{beside} cannot be written: {error}", "--out") from error
    print(f"{out}\n{beside}")
