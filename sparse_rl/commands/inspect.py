"""`sparse-rl inspect`: describe the contents of a file of eviction traces, or any other file or folder in one line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.origin import ORIGIN, TRACES
from sparse_rl.commands import bench, budgets, eval, perplexity
from sparse_rl.commands.arguments import file_path
from sparse_rl.commands.console import Session
from sparse_rl.commands.machine import show
from sparse_rl.errors import UserError
from sparse_rl.files import MOST_TEXT, read_text
from sparse_rl.metrics import METRICS_FILE, RECIPE_FILE, read_metrics, runs_below
from sparse_rl.models.directory import CONFIG_FILE, POLICY_FILE, model_directory
from sparse_rl.recipe.schema import parse_yaml

ABOUT = "Describe a file of eviction traces; or tell what another file or folder is."
LARGE = 16  # number of layers or heads above which the table is a summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", type=file_path, help="a file of traces, any other file, or a folder")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, session: Session) -> int:
    if (description := what_is(options.trace)) is not None:
        if options.json:
            raise UserError(f"{options.trace} is not a file of traces: {description}", "--json")
        print(f"{options.trace}: {description}")
        return 0
    from rich.console import Console

    from sparse_rl.analysis.traces import HELD, UNPAGED, histogram, kept_table, trace_statistics
    from sparse_rl.trace import load_traces, read_fingerprint

    traces = load_traces(options.trace)
    statistics = trace_statistics(traces, read_fingerprint(options.trace))
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
    paged = "pages" in statistics
    print(f"tokens {'held outside closed pages' if paged else 'held'} at the end, by position in the sequence")
    print("\n".join(histogram(statistics[(UNPAGED if paged else HELD)[2]])))
    return 0


def summary(statistics: Mapping[str, Any]) -> dict[str, str]:
    """Return a summary of a file of traces, from `trace_statistics`: name -> line of text."""
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
        lines[name] = f"{show(section['bytes'])}; in the first trace {shape} of {section['dtype']}"
    return lines


def what_is(path: Path) -> str | None:
    """Return a description of a folder or file; None for a path that does not exist or is named like a trace file."""
    weights = (path.parent / CONFIG_FILE).is_file()
    if not path.exists() or (path.suffix == ".safetensors" and not weights):
        return None
    try:
        return _folder(path) if path.is_dir() else _file(path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "damaged, or not of the type that its name says"


def _folder(path: Path) -> str:
    runs, traces = runs_below(path), sorted(path.glob(TRACES))
    if path.name.startswith("checkpoint-"):
        return f"a checkpoint of step {path.name.removeprefix('checkpoint-')}, from which train --resume can continue"
    if (path / CONFIG_FILE).is_file():
        return f"a model ({_json(path / CONFIG_FILE).get('model_type')}){_carried(path)}"
    model_path = model_directory(str(path))
    if runs == [path] or model_path != str(path):
        model = "no model yet" if model_path == str(path) else f"the model in {model_path}{_carried(Path(model_path))}"
        return f"a run{_kind(path)}, {_steps(path)}, with {model}; sparse-rl plot {path} draws it"
    for results in (path / file for file in (eval.RESULTS, perplexity.RESULTS, budgets.RESULTS, bench.RESULTS)):
        if results.is_file():
            return _file(results)
    if traces:
        files = f"{len(traces)} file{'s' * (len(traces) > 1)} of traces"
        rest = f"; sparse-rl verify {path} replays them" if (path / ORIGIN).is_file() else ""
        return f"{files}; sparse-rl inspect {traces[0]} describes the first{rest}"
    if (path / ORIGIN).is_file():
        return f"rollouts under a full cache; sparse-rl verify {path} replays them"
    if runs:
        return f"a folder of {len(runs)} run{'s' * (len(runs) > 1)}; sparse-rl plot {path} draws them"
    return "a folder without a run, a model or traces"


def _file(path: Path) -> str:
    if path.suffix in (".yaml", ".yml"):
        kind = parse_yaml(path.read_text(), str(path)).get("kind")
        if kind is None:
            return "YAML, but not a recipe: it has no kind"
        command = kind if kind in ("eval", "perplexity", "budgets", "bench") else "train"
        return f"a recipe of kind {kind}; sparse-rl {command} {path} runs it"
    if path.suffix == ".safetensors":
        return f"weights of the model in {path.parent}"
    if path.name == METRICS_FILE:
        return f"the metrics of a run, {_steps(path.parent)}; sparse-rl plot {path.parent} draws them"
    if path.name == POLICY_FILE:
        return f"the cache policy that a model carries, {_json(path).get('policy')}"
    if path.name == ORIGIN:
        origin = _json(path)
        return f"how {origin['model']} sampled the rollouts beside it; sparse-rl verify {path.parent} replays them"
    if path.name == eval.RESULTS:
        return f"the results of an evaluation, {len(_json(path)['rows'])} rows; sparse-rl plot {path} draws them"
    if path.name == budgets.RESULTS:
        content = _json(path)
        heads = " x ".join(map(str, (len(content["shares"]), len(content["shares"][0]))))
        return f"head budgets of {content['model']['name']}, {heads} heads, for the setting prompt_cache.budgets"
    if path.name == perplexity.RESULTS:
        return f"perplexities of a text, {len(_json(path)['rows'])} rows; sparse-rl plot {path} draws them"
    if path.name == bench.RESULTS:
        content = _json(path)
        count = len(content["rows"]) + len(content["contexts"])
        return f"times and memory, {count} rows; sparse-rl plot {path} draws them"
    if path.suffix == ".jsonl":
        lines = read_text(path, MOST_TEXT).splitlines()
        return f"{len(lines)} lines of JSON" + (f", each with {', '.join(json.loads(lines[0]))}" if lines else "")
    return f"a file {path.suffix or 'without a suffix'} that sparse-rl cannot read"


def _json(file: Path) -> dict[str, Any]:
    return json.loads(read_text(file, MOST_TEXT))


def _kind(run: Path) -> str:
    recipe = run / RECIPE_FILE
    return f" of kind {parse_yaml(recipe.read_text(), str(recipe)).get('kind')}" if recipe.is_file() else ""


def _steps(run: Path) -> str:
    steps = [line["step"] for line in read_metrics(run)]
    return f"logged to step {max(steps)}" if steps else "nothing logged yet"


def _carried(model: Path) -> str:
    file = model / POLICY_FILE
    return f", which carries the cache policy {_json(file).get('policy')}" if file.is_file() else ""
