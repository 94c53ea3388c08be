"""`sparse-rl keys`: what a recipe may say, a key at a time; or as a JSON Schema, for editors."""

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

ABOUT = "The keys of a kind of recipe, or what cache policies, scorers and rewards take; or a JSON Schema for editors."
WIDEST = 120  # columns of a line, however wide the terminal is
FAMILIES = {  # what is listed beside the kinds -> what it is
    "policies": "what `cache` takes beside `policy`",
    "scorers": "what `cache.scorer` takes beside `name`",
    "rewards": "what a reward takes beside `name` and `weight`",
}
TOPICS = (*KINDS, *FAMILIES)
Listing = list[tuple[str, str, list[Row]]]  # (name, text, rows) of each part of what is listed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = f"one of {', '.join(TOPICS)}; without it, what each of these is"
    parser.add_argument("topic", metavar="KIND", nargs="?", type=known_topic, choices=TOPICS, help=about)
    about = "only the keys with this in their names (rollout.), or only the policy, scorer or reward of this name"
    parser.add_argument("part", metavar="PART", nargs="?", help=about)
    parser.add_argument(
        "--json-schema", action="store_true", help="the schema of this kind; without KIND of all recipes"
    )


def known_topic(text: str) -> str:
    """One of TOPICS."""
    if text not in TOPICS:
        raise argparse.ArgumentTypeError(f"unknown {text!r}{did_you_mean(text, TOPICS)}; one of {listed(TOPICS, text)}")
    return text


def run(options: argparse.Namespace, session: Session) -> int:
    topic, part = options.topic, options.part
    if options.json_schema:
        if part is not None or topic in FAMILIES:
            raise UserError(f"is of all recipes, or of one kind: {', '.join(KINDS)}", "--json-schema")
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
        print("\nWhat `cache` takes beside `policy`: sparse-rl keys policies")
    return 0


# ---- what there is -------------------------------------------------------------------------------------------------


def kind_listing(kind: str) -> Listing:
    """The keys of a kind, by the dataclass that sets them, and the options that are handed on."""
    listing: Listing = []
    for section in list_sections(KINDS[kind]):
        text = ". ".join(filter(None, [section.prose.rstrip("."), f"Set in {section.file}"]))
        listing.append(("", wrapped(text if listing else f"kind {kind}: {text}"), section.rows))
    if options := PASSED_THROUGH.get(kind):
        rows = [Row(key, describe(hint), "", "") for key, hint in options.items()]
        listing.append(("", "Handed on to TRL and transformers as they are", rows))
    return listing


def family_listing(family: str) -> Listing:
    """What each policy, scorer or reward takes."""
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
    """What has this name, or else the keys with this in their names. Raises UserError where there is neither."""
    rows = [(name, text, [row for row in rows if part in row.key]) for name, text, rows in listing]
    if found := [entry for entry in listing if entry[0] == part] or [entry for entry in rows if entry[2]]:
        return found
    keys = [row.key for *_, rows in listing for row in rows]
    known = dict.fromkeys(filter(None, [*(name for name, *_ in listing), *keys, *(k.rpartition(".")[2] for k in keys)]))
    mend = f"{did_you_mean(part, known)}; all: sparse-rl keys {topic}"
    if topic in KINDS and any(part in row.key for *_, rows in family_listing("policies") for row in rows):
        mend = f"; cache policies have it: sparse-rl keys policies {part}"
    raise UserError(f"nothing in {topic} has this name{mend}", part)


# ---- how it is shown -----------------------------------------------------------------------------------------------


def entry(row: Row) -> str:
    """A key with its type and its default, and behind it what is said of it."""
    default = {"": "", REQUIRED: " (required)"}.get(row.default, f" (default {row.default})")
    lines = [wrapped(f"{row.key}: {row.type}{default}", "    "), wrapped(row.words, "    ", "    ")]
    return "\n".join(lines if row.words else lines[:1])


def wrapped(text: str, indent: str = "", first: str = "") -> str:
    """A text in lines as wide as the terminal; in a pipe one line."""
    if not sys.stdout.isatty():
        return first + text
    width = min(WIDEST, shutil.get_terminal_size().columns)
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
