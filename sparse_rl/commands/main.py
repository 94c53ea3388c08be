"""The command line: parse the arguments, run the command that they name, and return its exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sparse_rl import __version__
from sparse_rl.commands import (
    bench,
    budgets,
    calibrate,
    doctor,
    eval,
    inspect,
    keys,
    mismatch,
    perplexity,
    plot,
    quickstart,
    report,
    rollout,
    serve,
    teacher,
    train,
    verify,
)
from sparse_rl.commands.arguments import CommandParser, add_completion
from sparse_rl.commands.console import Session, check_launch, configure, guarded
from sparse_rl.errors import UserError, nearest
from sparse_rl.recipe import list_recipes
from sparse_rl.recipe.load import place_of

_MODULES = (
    *(train, teacher, rollout, eval, perplexity, budgets, calibrate, mismatch, bench, serve),
    *(inspect, verify, plot, report, doctor, keys, quickstart),
)
COMMANDS = {module.__name__.rpartition(".")[2]: module for module in _MODULES}


def make_parser() -> CommandParser:
    common = CommandParser(add_help=False)
    common.add_argument("--verbose", action="store_true", help="show the log output of the libraries, and tracebacks")
    top = CommandParser(
        prog="sparse-rl",
        description="Post-train language models that reason under a small KV cache.",
        epilog="RECIPE is a YAML file or the name of a shipped recipe. KEY=VALUE overrides a key; use dots for blocks "
        f"(cache.budget=512). Shipped: {', '.join(list_recipes()) or 'none'}.",
    )
    top.add_argument("--version", action="version", version=f"sparse-rl {__version__}")
    add_completion(top)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=CommandParser)
    for name, module in COMMANDS.items():
        parser = commands.add_parser(name, help=module.ABOUT, description=module.ABOUT, parents=[common])
        parser.set_defaults(run=module.run, parser=parser)
        module.add_arguments(parser)
    return top


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed options. Overrides may be anywhere; for `serve`, `further` holds the arguments after `--`."""
    top = make_parser()
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
            options.parser.error(f"unrecognised argument {word!r} of {options.command}{_instead(word, options)}")
        options.overrides.append(word)
    if options.command == "train":
        train.separate_override_from_resume(options)
    return options


def _instead(word: str, options: argparse.Namespace) -> str:
    """Return what a user may have meant by an argument: an option of the command, or a key of the recipe."""
    name, _, value = word.partition("=")
    near = nearest(name, [option for action in options.parser._actions for option in action.option_strings])
    if near is None and hasattr(options, "overrides") and (key := place_of(name.lstrip("-").replace("-", "_"))):
        near = f"{key}={value or 'VALUE'}"
    return f"; did you mean {near}?" if near else ""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = parse(words)
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        check_launch()
    except UserError as error:  # printed here, because the usual reporting needs a valid rank
        print(f"sparse-rl: error: {error}", file=sys.stderr)
        return 2
    options.arguments = words
    configure(options.verbose)
    session = Session(options.verbose)
    return guarded(lambda: options.run(options, session), session)
