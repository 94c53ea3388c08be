"""`sparse-rl inspect`: what a file of eviction traces holds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sparse_rl.commands.console import Session

ABOUT = "What a file of eviction traces holds."
LARGE = 16  # layers or heads above which the table is a summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", type=Path)
    parser.add_argument("--json", action="store_true", help="for machines")


def run(options: argparse.Namespace, session: Session) -> int:
    from rich.console import Console

    from sparse_rl.analysis.traces import histogram, kept_table, trace_statistics
    from sparse_rl.trace import load_traces, read_fingerprint

    traces = load_traces(options.trace)
    statistics = trace_statistics(traces, read_fingerprint(options.trace))
    if options.json:
        print(json.dumps(statistics))
        return 0
    length, kept = statistics["length"], statistics["retention"]
    print(f"{statistics['traces']} traces, {statistics['layers']} layers × {statistics['kv_heads']} kv heads")
    print(f"tokens    {length['mean']:.0f} on average ({length['min']} to {length['max']})")
    print(f"retention {kept['mean']:.1%} at the end ({kept['min']:.1%} to {kept['max']:.1%})")
    for key, value in statistics["fingerprint"].items():
        print(f"{key:<9} {value}")
    Console().print(kept_table(statistics["kept_per_head"], LARGE))
    print("tokens held at the end, by position in the sequence")
    print("\n".join(histogram(statistics["density"])))
    return 0
