"""`sparse-rl keys`: list the keys of recipes, or print a JSON Schema for editors."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from dataclasses import replace

from sparse_rl.commands.console import Session
from sparse_rl.errors import UserError, did_you_mean, listed
from sparse_rl.recipe import KINDS
from sparse_rl.recipe.keys import FAMILIES, REQUIRED, KeyRow, KeySection, read_docstring, sections_of
from sparse_rl.recipe.schema import recipe_schema

ABOUT = (
    "List the keys of a kind of recipe, or of cache policies, scorers and rewards; or print a JSON Schema for editors."
)
WIDEST = 120  # maximum columns of a line, even on a wider terminal
TOPICS = (*KINDS, *FAMILIES)
SINGULAR = {"policies": "policy", "scorers": "scorer"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = f"one of {', '.join(TOPICS)}; without KIND, describe each of these"
    parser.add_argument("topic", metavar="KIND", nargs="?", type=known_topic, choices=TOPICS, help=about)
    about = "show only keys whose names contain PART, such as rollout.; or only the policy, scorer or reward named PART"
    parser.add_argument("part", metavar="PART", nargs="?", help=about)
    parser.add_argument(
        "--json-schema", action="store_true", help="print the schema of this kind, or of all recipes without KIND"
    )


def known_topic(text: str) -> str:
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
    headed = [(heading(topic, place, section), section) for place, section in enumerate(sections_of(topic))]
    if part is not None:
        headed = only(headed, topic, part)
    print("\n\n".join("\n".join([text, *map(entry, section.rows)]) for text, section in headed))
    if topic in KINDS and any(row.key.rpartition(".")[2] == "cache" for _, section in headed for row in section.rows):
        print("\nKeys of `cache` besides `policy`: sparse-rl keys policies")
    return 0


def only(headed: list[tuple[str, KeySection]], topic: str, part: str) -> list[tuple[str, KeySection]]:
    """Return the section named `part`, or else the keys whose names contain `part`, from a dot on if it has one. Raises
    UserError without any."""
    if named := [(text, section) for text, section in headed if section.name.partition("(")[0] == part]:
        return named
    fewer = [(text, replace(s, rows=[row for row in s.rows if _contains(row.key, part)])) for text, s in headed]
    if matches := [(text, section) for text, section in fewer if section.rows]:
        return matches
    names = [section.name.partition("(")[0] for _, section in headed]
    of_policies = [row.key for section in sections_of("policies") for row in section.rows] if topic in KINDS else []
    keys = [*(row.key for _, section in headed for row in section.rows), *of_policies]
    suggestions = dict.fromkeys(filter(None, [*names, *keys, *(key.rpartition(".")[2] for key in keys)]))
    hint = f"{did_you_mean(part, suggestions)}; sparse-rl keys {topic} lists all names"
    if any(part in key for key in of_policies):
        hint = f"; it is a key of cache policies: sparse-rl keys policies {part}"
    raise UserError(f"unknown name{hint}", part)


def _contains(key: str, part: str) -> bool:
    return f".{part}" in f".{key}" if "." in part else part in key


# ---- formatting ----------------------------------------------------------------------------------------------------


def heading(topic: str, place: int, section: KeySection) -> str:
    """Return the lines above the keys of a topic's section at `place`."""
    if topic == "rewards":
        return f"reward {section.name}\n{textwrap.indent(section.prose, '    ')}"
    if topic in FAMILIES:
        about = section.prose or ("" if section.rows else "it has no parameters")
        return wrapped(": ".join(filter(None, [f"{SINGULAR[topic]} {section.name}", about])))
    if not section.file:
        return "Passed to TRL and transformers unchanged"
    text = ". ".join(filter(None, [section.prose.rstrip("."), f"Set in {section.file}"]))
    return wrapped(text if place else f"kind {topic}: {text}")


def entry(row: KeyRow) -> str:
    default = {"": "", REQUIRED: " (required)"}.get(row.default, f" (default {row.default})")
    lines = [wrapped(f"{row.key}: {row.type}{default}", "    "), wrapped(row.words, "    ", "    ")]
    return "\n".join(lines if row.words else lines[:1])


def wrapped(text: str, indent: str = "", first: str = "") -> str:
    """Wrap a text to the width of the terminal. In a pipe, the text stays one line."""
    if not sys.stdout.isatty():
        return first + text
    width = min(WIDEST, shutil.get_terminal_size().columns)
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
