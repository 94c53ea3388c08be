"""`sparse-rl keys`: list the keys of recipes, or print a JSON Schema for editors."""

from __future__ import annotations

import argparse
import inspect
import json
import shutil
import sys
import textwrap
from collections.abc import Mapping

from sparse_rl.commands.console import Session
from sparse_rl.config import NamedConfiguration, describe
from sparse_rl.errors import UserError, did_you_mean, listed
from sparse_rl.methods.config import CONFIGS as POLICIES
from sparse_rl.methods.kvpop.scorers.config import CONFIGS as SCORERS
from sparse_rl.recipe import KINDS
from sparse_rl.recipe.json_schema import recipe_schema
from sparse_rl.recipe.keys import REQUIRED, Row, list_sections, read_docstring
from sparse_rl.recipe.passed_through import PASSED_THROUGH

ABOUT = (
    "List the keys of a kind of recipe, or of cache policies, scorers and rewards; or print a JSON Schema for editors."
)
WIDEST = 120  # maximum columns of a line, even on a wider terminal
FAMILIES = {  # further topic -> description
    "policies": "keys of `cache` besides `policy`",
    "scorers": "keys of `cache.scorer` besides `name`",
    "rewards": "keys of a reward besides `name` and `weight`",
}
TOPICS = (*KINDS, *FAMILIES)
Listing = list[tuple[str, str, list[Row]]]  # (name, text, rows) of each listed part


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = f"one of {', '.join(TOPICS)}; without KIND, describe each of these"
    parser.add_argument("topic", metavar="KIND", nargs="?", type=known_topic, choices=TOPICS, help=about)
    about = "show only keys whose names contain PART, such as rollout.; or only the policy, scorer or reward named PART"
    parser.add_argument("part", metavar="PART", nargs="?", help=about)
    parser.add_argument(
        "--json-schema", action="store_true", help="print the schema of this kind, or of all recipes without KIND"
    )


def known_topic(text: str) -> str:
    """Parse the name of a topic, one of TOPICS."""
    if text not in TOPICS:
        raise argparse.ArgumentTypeError(f"unknown {text!r}{did_you_mean(text, TOPICS)}; one of {listed(TOPICS, text)}")
    return text


def run(options: argparse.Namespace, session: Session) -> int:
    topic, part = options.topic, options.part
    if options.json_schema:
        if part is not None or topic in FAMILIES:
            raise UserError(f"needs one kind of recipe, or none for all recipes: {', '.join(KINDS)}", "--json-schema")
        print(json.dumps(recipe_schema(topic), indent=2, ensure_ascii=False))
        return 0
    if topic is None:
        kinds = {kind: read_docstring(cls)[0] for kind, cls in KINDS.items()}
        print("\n".join(wrapped(f"{name}: {about}", "    ") for name, about in (kinds | FAMILIES).items()))
        return 0
    listing = kind_listing(topic) if topic in KINDS else family_listing(topic)
    if part is not None:
        listing = only(listing, topic, part)
    print("\n\n".join("\n".join([text, *map(entry, rows)]) for _, text, rows in listing))
    if topic in KINDS and any(row.key.rpartition(".")[2] == "cache" for *_, rows in listing for row in rows):
        print("\nKeys of `cache` besides `policy`: sparse-rl keys policies")
    return 0


# ---- listings ------------------------------------------------------------------------------------------------------


def kind_listing(kind: str) -> Listing:
    """Return the keys of a kind, grouped by the dataclass that defines them, and the options passed on to TRL."""
    listing: Listing = []
    for section in list_sections(KINDS[kind]):
        text = ". ".join(filter(None, [section.prose.rstrip("."), f"Set in {section.file}"]))
        listing.append(("", wrapped(text if listing else f"kind {kind}: {text}"), section.rows))
    if options := PASSED_THROUGH.get(kind):
        rows = [Row(key, describe(hint), "", "") for key, hint in options.items()]
        listing.append(("", "Passed to TRL and transformers unchanged", rows))
    return listing


def family_listing(family: str) -> Listing:
    """Return the keys of each member of a family: policies, scorers or rewards."""
    if family == "rewards":
        from rewards import REWARDS

        return [
            (name, f"reward {name}{inspect.signature(cls)}\n{textwrap.indent(inspect.getdoc(cls) or '', '    ')}", [])
            for name, cls in REWARDS.items()
        ]
    scorers = family == "scorers"
    configs: Mapping[str, type[NamedConfiguration]] = SCORERS if scorers else POLICIES
    title, prefix = ("scorer", "cache.scorer.") if scorers else ("policy", "cache.")
    listing: Listing = []
    for name, config in configs.items():
        (section,) = list_sections(config, prefix)
        about = section.prose or ("" if section.rows else "it has no parameters")
        listing.append((name, wrapped(": ".join(filter(None, [f"{title} {name}", about]))), section.rows))
    return listing


def only(listing: Listing, topic: str, part: str) -> Listing:
    """Return the part named `part`, or else the keys whose names contain `part`. Raises UserError if there are none."""
    rows = [(name, text, [row for row in rows if part in row.key]) for name, text, rows in listing]
    if matches := [entry for entry in listing if entry[0] == part] or [entry for entry in rows if entry[2]]:
        return matches
    keys = [row.key for *_, rows in listing for row in rows]
    suggestions = dict.fromkeys(
        filter(None, [*(name for name, *_ in listing), *keys, *(k.rpartition(".")[2] for k in keys)])
    )
    hint = f"{did_you_mean(part, suggestions)}; sparse-rl keys {topic} lists all names"
    if topic in KINDS and any(part in row.key for *_, rows in family_listing("policies") for row in rows):
        hint = f"; it is a key of cache policies: sparse-rl keys policies {part}"
    raise UserError(f"unknown name{hint}", part)


# ---- formatting ----------------------------------------------------------------------------------------------------


def entry(row: Row) -> str:
    """Format a key with its type, its default and its description."""
    default = {"": "", REQUIRED: " (required)"}.get(row.default, f" (default {row.default})")
    lines = [wrapped(f"{row.key}: {row.type}{default}", "    "), wrapped(row.words, "    ", "    ")]
    return "\n".join(lines if row.words else lines[:1])


def wrapped(text: str, indent: str = "", first: str = "") -> str:
    """Wrap a text to the width of the terminal. In a pipe, the text stays one line."""
    if not sys.stdout.isatty():
        return first + text
    width = min(WIDEST, shutil.get_terminal_size().columns)
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
