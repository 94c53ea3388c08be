"""The reference of recipe keys, docs/recipes.md, made of the configurations' dataclasses alone (keys.py).

python -m sparse_rl.recipe.reference > docs/recipes.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sparse_rl.methods.config import CONFIGS as POLICIES
from sparse_rl.methods.config import LearnedConfig
from sparse_rl.methods.kvpop.scorers.config import CONFIGS as SCORERS
from sparse_rl.recipe.keys import REQUIRED, Row, Section, list_sections
from sparse_rl.recipe.kinds import KINDS, Recipe
from sparse_rl.recipe.passed_through import PASSED_THROUGH

OPENING = """\
<!-- Made by `python -m sparse_rl.recipe.reference > docs/recipes.md` of the dataclasses that hold the keys: change
these and their docstrings, not this page. -->

# The keys of a recipe

All keys of each kind of recipe, with their types and defaults. The file in brackets, above a table or in the row of a
block, is where keys and defaults are set (or, where its class extends another, in the file of that one).

`data.path` is the key `path` of the block `data`; NAME stands for a name of your choice. A key without words has TRL's
name and means what it means there, or says itself what it is. The parameters of a reward are those of its class in
`rewards/`.

In a terminal, `sparse-rl keys grpo` lists the same keys, and `sparse-rl keys grpo rollout.` those of one block.

An editor that runs yaml-language-server (VS Code's YAML extension, among others) completes and checks a recipe by its
JSON Schema. Write that once, `sparse-rl keys --json-schema > sparse-rl.schema.json`, and begin the recipe with the line
`# yaml-language-server: $schema=sparse-rl.schema.json`, the file's path from the recipe's folder. The schema refuses
unknown keys, wrong types and missing keys. Bounds of numbers, and what must hold between keys, only the commands check.
"""


def reference(kinds: Mapping[str, type[Recipe]] = KINDS) -> str:
    """The page in Markdown."""
    lines = [OPENING]
    for kind, recipe in kinds.items():
        lines.append(f"## kind: {kind}\n")
        for section in list_sections(recipe):
            lines += _table(section, section.prose)
        if options := PASSED_THROUGH.get(kind):
            names = ", ".join(f"`{name}`" for name in options)
            lines.append(f"Handed on to TRL and transformers as they are: {names}.\n")
    lines.append("## Cache policies\n\nWhat a `cache` block takes beside `policy`.\n")
    for title, key, configs in (("policy", "cache", POLICIES), ("scorer", "cache.scorer", SCORERS)):
        if configs is SCORERS:
            lines.append(f"## Scorers\n\nWhat `cache.scorer` of {_takers()} takes beside `name`.\n")
        for name, config in configs.items():
            (section,) = list_sections(config, f"{key}.")
            prose = section.prose or ("" if section.rows else "It has no parameters.")
            lines += [f"### {title}: {name}\n", *_table(section, prose)]
    return "\n".join(lines)


def _takers() -> str:
    """The policies that go by a scorer, in words."""
    names = [f"`{name}`" for name, config in POLICIES.items() if issubclass(config, LearnedConfig)]
    return f"the policies {', '.join(names[:-1])} and {names[-1]}"


def _table(section: Section, prose: str) -> Iterator[str]:
    yield f"{prose} (`{section.file}`)\n" if prose else f"(`{section.file}`)\n"
    if section.rows:
        yield "| key | type | default | what it is |\n|---|---|---|---|"
        for row in section.rows:
            yield f"| {' | '.join(_cells(row))} |"
        yield ""


def _cells(row: Row) -> tuple[str, str, str, str]:
    default = row.default if row.default in ("", REQUIRED) else f"`{row.default}`"
    words = f"{row.words} (`{row.file}`)" if row.file else row.words
    return f"`{row.key}`", _cell(row.type), default, _cell(words)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


if __name__ == "__main__":
    print(reference(), end="")
