"""The command `sparse-rl`: train, rollout, eval, serve, inspect, plot, doctor.

It parses, calls what does the work, and prints; console.py turns what goes wrong into one line and an exit status.
Everything heavy is imported by the command that needs it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sparse_rl.console import Session, configure, guarded, quiet_loading, rank, readable_progress
from sparse_rl.errors import UserError
from sparse_rl.recipe import EvalRecipe, GRPORecipe, Recipe, list_recipes, load_recipe

LARGE = 16  # layers or heads above which `inspect` summarises


class Parser(argparse.ArgumentParser):
    """argparse, whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"sparse-rl: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def parser() -> Parser:
    """All commands and their options."""
    common = Parser(add_help=False)
    common.add_argument("--verbose", action="store_true", help="show what the libraries say, and tracebacks")
    top = Parser(
        prog="sparse-rl",
        description="Post-train language models that reason under a small KV cache.",
        epilog="RECIPE is a YAML file or the name of a shipped recipe; KEY=VALUE overrides a key, dotted for blocks "
        f"(cache.budget=512). Shipped: {', '.join(list_recipes()) or 'none'}.",
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    def command(name: str, work: Callable[[argparse.Namespace, Session], int], about: str) -> Parser:
        made = commands.add_parser(name, help=about, description=about, parents=[common])
        made.set_defaults(work=work)
        return made

    def takes_recipe(made: Parser, optional: bool = False) -> None:
        made.add_argument("recipe", metavar="RECIPE", nargs="?" if optional else None, help="a YAML file or a name")
        made.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[])

    made = command("train", train, "Train as the recipe says; starts its processes itself.")
    takes_recipe(made)
    made.add_argument("--resume", nargs="?", const="newest", metavar="DIR", help="a checkpoint; without DIR the newest")
    made.add_argument("--dry-run", action="store_true", help="check everything that needs no model, then stop")
    made = command("teacher", teacher, "Write down what a distillation's teacher says, once; training then needs none.")
    takes_recipe(made)
    made = command("rollout", rollout, "Sample problems of a recipe and keep their completions and traces.")
    takes_recipe(made)
    made.add_argument("--out", metavar="DIR", type=Path, help="default: OUTPUT_DIR/rollouts")
    made.add_argument("--problems", metavar="N", type=positive, default=8)
    made = command("eval", evaluate, "pass@1 of a model over tasks, cache policies and budgets.")
    takes_recipe(made)
    made.add_argument("--model", metavar="DIR", help="the same as model=DIR")
    made = command("serve", serve, "Serve a model with vLLM (OpenAI API) under the cache policy that it carries.")
    made.epilog = "What stands behind -- goes to vLLM's own server: sparse-rl serve MODEL -- --tensor-parallel-size 2"
    made.add_argument("model", metavar="MODEL", help="a model's directory, with its tokenizer")
    made.add_argument(
        "--cache",
        metavar="KEY=VALUE,...",
        action="append",
        default=[],
        help="another policy (policy=gkv,budget=512), or another value in the model's own (budget=256); "
        "default: its cache_policy.json, else a full cache",
    )
    made.add_argument("--host", metavar="HOST", default="127.0.0.1", help="0.0.0.0: for everyone")
    made.add_argument("--port", metavar="N", type=positive, default=8000)
    made.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the model's, as vLLM does")
    made.add_argument("--max-batch", metavar="N", type=positive, default=64, help="sequences at a time")
    made.add_argument("--max-model-len", metavar="N", type=positive, help="the longest prompt + completion")
    made.add_argument("--kv-cache-gb", metavar="GIB", type=amount, help="default: most of the GPU; 1 on a CPU")
    made = command("inspect", inspect, "What a file of eviction traces holds.")
    made.add_argument("trace", metavar="TRACE", type=Path)
    made.add_argument("--json", action="store_true", help="for machines")
    made = command("plot", plot, "Learning and mismatch curves of runs; the density of a trace.")
    made.add_argument("runs", metavar="RUN_DIR|TRACE", nargs="+", type=Path)
    made.add_argument("--out", metavar="FILE", type=Path, help="default: plots/ in the first run's directory")
    made = command("doctor", doctor, "What this machine has and, with a recipe, whether it will fit.")
    takes_recipe(made, optional=True)
    return top


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {text!r}")
    return int(text)


def amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number > 0, got {text!r}")
    return value


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; overrides may stand anywhere, also after `--resume`. Of `serve`, `further` stands behind `--`."""
    top = parser()
    words, further = list(arguments), []
    if words[:1] == ["serve"] and "--" in words:
        at = words.index("--")
        words, further = words[:at], words[at + 1 :]
    options, rest = top.parse_known_args(words)
    options.further = further
    if options.command is None:
        top.print_help()
        raise SystemExit(2)
    for word in rest:
        if word.startswith("-") or "=" not in word or not hasattr(options, "overrides"):
            top.error(f"unrecognised argument {word!r} of {options.command}")
        options.overrides.append(word)
    if "=" in (getattr(options, "resume", None) or "") and not Path(options.resume).exists():
        options.overrides.append(options.resume)
        options.resume = "newest"
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = parse(words)
    except SystemExit as stop:
        return int(stop.code or 0)
    options.arguments = words
    configure(options.verbose)
    session = Session(options.verbose)
    return guarded(lambda: options.work(options, session), session)


def read_recipe(options: argparse.Namespace, session: Session, *extra: str) -> Recipe:
    """The recipe with its overrides; its warnings are printed. TRL's keys are looked up only where one is used."""
    overrides = [*options.overrides, *extra]
    try:
        recipe = load_recipe(options.recipe, overrides)
    except UserError as error:
        if "unknown key" not in str(error):
            raise
        recipe = load_recipe(options.recipe, overrides, trl_fields())
    for warning in recipe.warnings if rank() == 0 else ():
        print(f"sparse-rl: warning: {warning}", file=sys.stderr)
    return recipe


def trl_fields() -> dict[str, dict[str, Any]]:
    """Kind -> {key: type} of TRL's own options."""
    import dataclasses

    from transformers import TrainingArguments
    from trl import GRPOConfig, SFTConfig

    return {
        kind: {field.name: field.type for field in dataclasses.fields(config)}
        for kind, config in (("grpo", GRPOConfig), ("distill", TrainingArguments), ("sft", SFTConfig))
    }


# ---- commands ------------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace, session: Session) -> int:
    from sparse_rl.checks import NOT_CHECKED, check_training
    from sparse_rl.recipe import TrainRecipe
    from trainer.launch import launch, launched, needs_launch

    recipe = read_recipe(options, session)
    if not options.dry_run:
        session.folder = Path(recipe.output_dir)
    quiet_loading(session.verbose)
    if not launched():  # once, before any process is started or anything is loaded
        found = check_training(recipe, options.resume)
        if options.dry_run:
            for what, finding in found:
                print(f"{what:<11} {finding}")
            print(f"not checked {NOT_CHECKED}")
            return 0
        words = options.arguments
        if options.resume is not None:  # the processes resume what was found here, and say no more about it
            options.resume = dict(found)["resume"]
            words = ["train", options.recipe, *options.overrides, "--resume", options.resume]
            words += ["--verbose"] if options.verbose else []
        if isinstance(recipe, TrainRecipe) and needs_launch(recipe.launch):
            return launch(recipe.launch, words)
    from trainer.train import train as run

    with readable_progress():
        model = run(recipe, options.resume)
    if rank() == 0:
        print(f"model: {model}")
    return 0


def teacher(options: argparse.Namespace, session: Session) -> int:
    from sparse_rl.recipe import TaughtRecipe
    from trainer.train import write_teacher

    recipe = read_recipe(options, session)
    if not isinstance(recipe, TaughtRecipe):
        raise UserError(f"a recipe of kind {recipe.kind} has no teacher; use one of distill or kvpop", "kind")
    quiet_loading(session.verbose)
    folder, rows, found = write_teacher(recipe)
    print(f"{folder}: {rows} sequences" + (f"; {found} shards were there already" if found else ""))
    return 0


def rollout(options: argparse.Namespace, session: Session) -> int:
    from sparse_rl.samples import sample

    recipe = read_recipe(options, session)
    if not isinstance(recipe, GRPORecipe | EvalRecipe):
        raise UserError(f"a recipe of kind {recipe.kind} has no cache to sample under; use one of grpo or eval", "kind")
    folder = options.out or Path(recipe.output_dir) / "rollouts"
    session.folder = folder
    quiet_loading(session.verbose)
    found = sample(recipe, folder, options.problems)
    lengths, kept = [one["tokens"] for one in found], [one["retention"] for one in found]
    cut = sum(one["finish_reason"] == "length" for one in found)
    print(
        f"{len(found)} completions, {sum(lengths) / len(lengths):.0f} tokens on average ({min(lengths)} to "
        f"{max(lengths)}), {cut} cut off; kept at the end {sum(kept) / len(kept):.1%} of the cache"
    )
    print("\n".join(str(file) for file in (folder / "completions.jsonl", *sorted(folder.glob("traces-*.safetensors")))))
    return 0


def evaluate(options: argparse.Namespace, session: Session) -> int:
    from rich.console import Console

    from sparse_rl.evaluate import evaluate as run
    from sparse_rl.evaluate import table

    recipe = read_recipe(options, session, *([f"model={json.dumps(options.model)}"] if options.model else []))
    if not isinstance(recipe, EvalRecipe):
        raise UserError(f"a recipe of kind {recipe.kind} is not evaluated; it needs kind: eval", "kind")
    session.folder = Path(recipe.output_dir)
    quiet_loading(session.verbose)
    rows = run(recipe, progress=recipe.rollout.progress)
    wide = None if sys.stdout.isatty() else 200
    Console(width=wide).print(table(rows))
    print(Path(recipe.output_dir) / "eval.json")
    return 0


def serve(options: argparse.Namespace, session: Session) -> NoReturn:
    from rollout.vllm.serve import serve as run

    quiet_loading(session.verbose)
    run(
        options.model,
        options.cache,
        host=options.host,
        port=options.port,
        dtype=options.dtype,
        max_batch=options.max_batch,
        max_model_len=options.max_model_len,
        kv_cache_gb=options.kv_cache_gb,
        further=options.further,
        verbose=session.verbose,
    )


def inspect(options: argparse.Namespace, session: Session) -> int:
    from rich.console import Console

    from sparse_rl.plots import histogram, kept_table, trace_statistics
    from sparse_rl.trace import load_traces, read_fingerprint

    traces = load_traces(options.trace)
    found = trace_statistics(traces, read_fingerprint(options.trace))
    if options.json:
        print(json.dumps(found))
        return 0
    length, kept = found["length"], found["retention"]
    print(f"{found['traces']} traces, {found['layers']} layers × {found['kv_heads']} kv heads")
    print(f"tokens    {length['mean']:.0f} on average ({length['min']} to {length['max']})")
    print(f"retention {kept['mean']:.1%} at the end ({kept['min']:.1%} to {kept['max']:.1%})")
    for key, value in found["fingerprint"].items():
        print(f"{key:<9} {value}")
    Console().print(kept_table(found["kept_per_head"], LARGE))
    print("tokens held at the end, by position in the sequence")
    print("\n".join(histogram(found["density"])))
    return 0


def plot(options: argparse.Namespace, session: Session) -> int:
    from sparse_rl.plots import density_plot, draws_gap, gap_curves, learning_curves, run_labels
    from sparse_rl.trace import load_traces

    traces = [path for path in options.runs if path.is_file()]
    folders = [path for path in options.runs if path not in traces]
    out = options.out
    if traces and (folders or len(traces) > 1):
        raise UserError("draw one trace file at a time, or run directories", str(traces[0]))
    if traces:
        print(density_plot(load_traces(traces[0]), out or traces[0].with_suffix(".png")))
        return 0
    runs = run_labels(folders)
    out = out or folders[0] / "plots" / "learning.png"
    print(learning_curves(runs, out))
    if draws_gap(runs):
        name = "gap.png" if options.out is None else f"{out.stem}_gap{out.suffix}"
        print(gap_curves(runs, out.with_name(name)))
    return 0


def doctor(options: argparse.Namespace, session: Session) -> int:
    from rich.console import Console

    from sparse_rl.doctor import environment, fit

    recipe = read_recipe(options, session) if options.recipe else None
    for what, finding in environment():
        print(f"{what:<13} {finding}")
    if recipe is None:
        return 0
    from sparse_rl.models import load_config

    table, lines = fit(recipe, load_config(recipe.model))
    print()
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
