"""`sparse-rl inspect`: describe the contents of a file of eviction traces."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from rollout.config import TRACES
from sparse_rl.commands.arguments import file_path
from sparse_rl.commands.console import Session

ABOUT = "Describe a file of eviction traces."
LARGE = 16  # number of layers or heads above which the table is a summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", metavar="TRACE", type=file_path, help="a file of traces, or a folder of rollouts: its first file"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, session: Session) -> int:
    from rich.console import Console

    from sparse_rl.analysis.traces import kept_table, trace_statistics
    from sparse_rl.trace import load_traces, read_fingerprint

    file = min(options.trace.glob(TRACES), default=options.trace)
    statistics = trace_statistics(load_traces(file), read_fingerprint(file))
    if options.json:
        print(json.dumps(statistics))
        return 0
    counted = "; layers with a sliding window are not counted" if "global_layers" in statistics else ""
    print(f"{statistics['traces']} traces, {statistics['layers']} layers × {statistics['kv_heads']} kv heads{counted}")
    lines = summary(statistics)
    width = max(map(len, lines))
    for key, text in {**lines, **statistics["fingerprint"]}.items():
        print(f"{key:<{width}} {text}")
    Console().print(kept_table(statistics, LARGE))
    return 0


def summary(statistics: Mapping[str, Any]) -> dict[str, str]:
    """Return a summary of a file of traces, from `trace_statistics`: name -> line of text."""
    from rich.filesize import decimal

    from sparse_rl.analysis.traces import HELD, UNPAGED, opened_words

    def at_the_end(name: str) -> str:
        spread = statistics[name]
        return f"{spread['mean']:.1%} at the end ({spread['min']:.1%} to {spread['max']:.1%})"

    length, pages = statistics["length"], statistics.get("pages")
    lines = {"tokens": f"{length['mean']:.0f} on average ({length['min']} to {length['max']})"}
    lines[HELD[0]] = at_the_end(HELD[0])
    if pages is not None:
        opened, back, repeated = opened_words(pages)
        lines[UNPAGED[0]] = f"{at_the_end(UNPAGED[0])}: held outside closed pages, and so read token by token"
        lines["pages"] = (
            f"{opened} of {pages['closed']:.2f} closed pages opened per query, {back} tokens back (median); "
            f"{repeated} of queries opened the same pages as the query before"
        )
    if (times := statistics.get("compactions")) is not None:
        lines["refitted"] = f"at {times['mean']:.1f} compactions on average ({times['min']} to {times['max']})"
    for name, section in statistics["sections"].items():
        sizes = section["shape"].items()
        shape = " × ".join(f"{size} {axis.replace('_', ' ')}{'s' * (size != 1)}" for axis, size in sizes)
        lines[name] = f"{decimal(section['bytes'])}; in the first trace {shape} of {section['dtype']}"
    return lines
