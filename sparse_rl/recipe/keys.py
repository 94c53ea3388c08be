"""All keys of a recipe, read from the configurations' dataclasses, for `sparse-rl keys` and two pages of the site.

Name, type and default come from the dataclass field. The description comes from the dataclass's docstring: an entry
`name : text`, or `a, b : text` for several keys, with continuation lines indented.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from sparse_rl.config import NamedConfiguration, default_of, describe, flat_fields, own_fields
from sparse_rl.methods.config import CONFIGS as POLICIES
from sparse_rl.methods.config import LearnedConfig
from sparse_rl.methods.kvpop.config import SCORER_CONFIGS as SCORERS
from sparse_rl.recipe.load import KINDS
from sparse_rl.recipe.options import PASSED_THROUGH, PREFIXES, REFUSED
from trainer import options as in_training

REQUIRED = "required"
FAMILIES = {  # a topic of `sparse-rl keys` that is no kind -> description
    "policies": "keys of `cache` besides `policy`",
    "scorers": "keys of `cache.scorer` besides `name`",
    "rewards": "keys of a reward besides `name` and `weight`",
}
_ENTRY = re.compile(r"(\w+(?:, \w+)*) : (.*)")


@dataclass(frozen=True)
class KeyRow:
    """One key, as texts to display.

    key : dotted name of the key
    default : default in YAML; REQUIRED if the key has no default; empty for a block, whose keys have their own defaults
    file : for a block, the file that defines its keys; else empty
    """

    key: str
    type: str
    default: str
    words: str
    file: str = ""


@dataclass(frozen=True)
class KeySection:
    """The keys of one dataclass and of its blocks, with the dataclass's description (`prose`) and file.

    name : name of a policy or a scorer, or the call of a reward; empty for a part of a recipe
    """

    prose: str
    file: str
    rows: list[KeyRow]
    name: str = ""


# ---- docstrings --------------------------------------------------------------------------------------------


def read_docstring(cls: type) -> tuple[str, dict[str, str]]:
    """Return the prose of a dataclass's own docstring, and the docstring's entries: name -> description."""
    text = cls.__dict__.get("__doc__") or ""
    if text.startswith(f"{cls.__name__}("):  # the signature that dataclasses insert if there is no docstring
        return "", {}
    prose: list[str] = []
    entries: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(text).splitlines():
        if entry := _ENTRY.fullmatch(line):
            names = entry[1].split(", ")
            entries |= dict.fromkeys(names, entry[2])
        elif names and line.startswith(" "):
            entries |= {name: f"{entries[name]} {line.strip()}" for name in names}
        else:
            names = []
            prose.append(line)
    return " ".join(" ".join(prose).split()), entries


def description(cls: type, key: str) -> str:
    """Return the first description of a key in the docstrings of a class and its base classes."""
    descriptions = (entries[key] for base in cls.__mro__ if key in (entries := read_docstring(base)[1]))
    return next(descriptions, "").replace("None", "null")


def holders(cls: type) -> Iterator[type]:
    """Yield a dataclass and, recursively, the dataclasses of its flat fields."""
    yield cls
    for held in flat_fields(cls).values():
        yield from holders(held)


def defaults(cls: type) -> dict[str, Any]:
    """Return key -> default (MISSING if required) at one level of the YAML, with the keys of flat fields."""
    fields = ((holder, f) for holder in holders(cls) for f in dataclasses.fields(holder))
    return {f.name: default_of(f) for holder, f in fields if f.name in own_fields(holder)}


# ---- rows and sections -------------------------------------------------------------------------------------


def list_sections(cls: type, prefix: str = "") -> list[KeySection]:
    """Return the sections of a dataclass: one for its own keys, and one for each flat field."""
    places: dict[type, str] = {}
    return [
        KeySection(read_docstring(holder)[0], _file(holder), list(_list_rows(holder, prefix, places)))
        for holder in holders(cls)
    ]


def sections_of(topic: str) -> list[KeySection]:
    if topic in KINDS:
        rows = [KeyRow(key, describe(hint), "", "") for key, hint in PASSED_THROUGH.get(topic, {}).items()]
        return list_sections(KINDS[topic]) + ([KeySection("", "", rows)] if rows else [])
    if topic == "rewards":
        from rewards import REWARDS

        return [
            KeySection(inspect.getdoc(cls) or "", "", [], f"{n}{inspect.signature(cls)}") for n, cls in REWARDS.items()
        ]
    configs: Mapping[str, type] = POLICIES if topic == "policies" else SCORERS
    prefix = "cache." if topic == "policies" else "cache.scorer."
    named = ((name, section) for name, config in configs.items() for section in list_sections(config, prefix))
    return [dataclasses.replace(section, name=name) for name, section in named]


def _list_rows(cls: type, prefix: str, places: dict[type, str]) -> Iterator[KeyRow]:
    """Yield a row for each of a dataclass's own keys, and for the keys of its blocks, unless `places` has the block."""
    hints = own_fields(cls)
    for f in (f for f in dataclasses.fields(cls) if f.name in hints):
        hint, value, words = hints[f.name], default_of(f), description(cls, f.name)
        name, kind, block = f"{prefix}{f.name}", describe(hint), _block(hint)
        if block is None:
            yield KeyRow(name, kind, _show(value), words)
            continue
        block_class, by_name = block
        dotted_name, kind = (f"{name}.NAME", describe(block_class)) if by_name else (name, kind)
        if block_class in places:
            words = " ".join(filter(None, [words, f"It has the keys of `{places[block_class]}`."]))
            yield KeyRow(dotted_name, kind, _show(value), words)
            continue
        places[block_class] = dotted_name
        yield KeyRow(dotted_name, kind, _show(value), words or read_docstring(block_class)[0], _file(block_class))
        if not issubclass(block_class, NamedConfiguration):  # the keys of a policy depend on its name
            yield from _list_rows(block_class, f"{dotted_name}.", places)


def _block(hint: Any) -> tuple[type, bool] | None:
    """Return (the dataclass in a key's type, True if the key maps names to instances of it); None for a plain value."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint, False
    for member in get_args(hint):
        if (block := _block(member)) is not None:
            return block[0], block[1] or get_origin(hint) is dict
    return None


def _show(value: Any) -> str:
    if value is dataclasses.MISSING:
        return REQUIRED
    if isinstance(value, NamedConfiguration):
        value = value.name
    if dataclasses.is_dataclass(value):
        return ""
    return value if isinstance(value, str) and value else json.dumps(value)


def _file(cls: type) -> str:
    return f"{cls.__module__.replace('.', '/')}.py"


# ---- the site's page of keys -----------------------------------------------------------------------------------------

KEYS_OPENING = """\
# The keys of a recipe

All keys of each kind of recipe, with their types and defaults. The file in brackets, above a table or in the row of a
block, defines the keys and their defaults. If the class in that file extends another class, some of the keys are
defined in the file of the other class.

`data.path` is the key `path` of the block `data`; NAME stands for a name of your choice. The parameters of a
reward are listed in its class in `rewards/`.

In a terminal, `sparse-rl keys grpo` lists the same keys, and `sparse-rl keys grpo rollout.` lists one block.

An editor that runs yaml-language-server (such as VS Code with its YAML extension) can complete and check a recipe with
its JSON Schema. Write the schema once with `sparse-rl keys --json-schema > sparse-rl.schema.json`, and start the recipe
with the line `# yaml-language-server: $schema=sparse-rl.schema.json`, where the path is relative to the recipe's
folder. The schema rejects unknown keys, wrong types and missing keys. Only the commands check the bounds of numbers and
the conditions between keys.
"""


def keys_page(kinds: Iterable[str] = KINDS) -> str:
    """Return the site's page of all recipe keys in Markdown."""
    lines = [KEYS_OPENING]
    for kind in kinds:
        lines.append(f"## kind: {kind}\n")
        for section in sections_of(kind):
            if section.file:
                lines += _table(section)
            else:
                names = ", ".join(f"`{row.key}`" for row in section.rows)
                lines.append(f"Options passed unchanged to TRL and transformers: {names}.\n")
    lines.append("## Cache policies\n\nParameters of a `cache` block, besides `policy`.\n")
    for section in sections_of("policies"):
        lines += [f"### policy: {section.name}\n", *_table(section)]
    *scored, last = (f"`{name}`" for name, config in POLICIES.items() if issubclass(config, LearnedConfig))
    under = f"under the policies {', '.join(scored)} and {last}"
    lines.append(f"## Scorers\n\nParameters of `cache.scorer`, besides `name`, {under}.\n")
    for section in sections_of("scorers"):
        lines += [f"### scorer: {section.name}\n", *_table(section)]
    return "\n".join(lines)


def _table(section: KeySection) -> Iterator[str]:
    prose = section.prose or ("It has no parameters." if section.name and not section.rows else "")
    yield f"{prose} (`{section.file}`)\n".lstrip()
    if section.rows:
        yield "| key | type | default | description |\n|---|---|---|---|"
        for row in section.rows:
            yield f"| {' | '.join(_cells(row))} |"
        yield ""


def _cells(row: KeyRow) -> tuple[str, str, str, str]:
    default = row.default if row.default in ("", REQUIRED) else f"`{row.default}`"
    words = f"{row.words} (`{row.file}`)" if row.file else row.words
    return f"`{row.key}`", _cell(row.type), default, _cell(words)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


# ---- the site's page of TRL's options --------------------------------------------------------------------------------

# KEYS: our keys that have TRL's names. THEIRS: TRL's defaults of these keys, where they differ from ours.
KEYS = (
    *("adam_beta1", "adam_beta2", "beta", "epsilon", "epsilon_high", "gradient_accumulation_steps"),
    *("gradient_checkpointing", "learning_rate", "logging_steps", "loss_type", "lr_scheduler_type"),
    *("max_completion_length", "max_grad_norm", "max_steps", "num_generations", "num_iterations", "num_train_epochs"),
    *("output_dir", "per_device_train_batch_size", "report_to", "run_name", "save_steps", "save_total_limit"),
    *("scale_rewards", "seed", "steps_per_generation", "temperature", "top_k", "top_p", "warmup_steps"),
    *("min_p", "weight_decay"),
)
THEIRS: dict[str, object] = {
    "logging_steps": 10,
    "loss_type": "dapo",
    "lr_scheduler_type": "linear",
    "max_completion_length": 512,
    "min_p": None,
    "num_train_epochs": 3.0,
    "output_dir": None,
    "report_to": "none",
    "save_steps": 500,
    "save_total_limit": None,
    "top_k": 0,
}

# Accepted options that behave differently than in TRL: option -> (the difference, the page with details).
OURS: dict[str, tuple[str, str]] = {
    "beta": ("the reference model replays the evictions too", "grpo.md#the-recipe"),
    "gradient_checkpointing": ("never reentrant, because reentrant checkpointing cannot be replayed", "internals.md"),
    "gradient_checkpointing_kwargs": ("`use_reentrant: true` is rejected", "internals.md"),
    "max_completion_length": ("a truncated output has advantage 0", "grpo.md#the-recipe"),
    "output_dir": ("also holds the run's record, metrics and final model", "resume.md"),
    "save_steps": ("0 means no checkpoints", "resume.md"),
    "seed": ("also seeds the sampling", "resume.md"),
    "router_aux_loss_coef": ("counts the experts that the sampler took", "families.md#mixture-of-experts"),
    "log_completions": ("shows the advantages that are used in training", "grpo.md#the-recipe"),
    "shuffle_dataset": ("the order differs from the second epoch on", "grpo.md#the-recipe"),
    "sync_ref_model": ("the mixed reference is kept in checkpoints", "grpo.md#the-recipe"),
    **dict.fromkeys(("top_p", "top_k", "min_p"), ("the truncated policy is trained", "grpo.md#truncated-sampling")),
}

TRL_OPENING = """\
# TRL's options

This page lists all options of TRL's `GRPOConfig`, and says whether a recipe of kind `grpo` accepts them. It also lists
options of TRL's scripts and of older versions of TRL, which are refused.

- *same*: the option works as in TRL. For the options of loss, advantages and reference model, a test compares losses,
  gradients and metrics under a full cache with those of TRL's own trainer on the same completions
  (`tests/trainer/test_grpo_against_trl.py`).
- *ours*: the option is accepted, with the differences given in the table.
- *refused*: the option is rejected with the error message given in the table.

| option | treatment in sparse-rl |
|---|---|"""


def trl_page() -> str:
    """Return the site's page of how a recipe of kind grpo treats each option of TRL's GRPOConfig, in Markdown."""
    rows = {name: _treatment(name) for name in [*KEYS, *PASSED_THROUGH["grpo"]]}
    refused = {**REFUSED, **in_training.REFUSED["grpo"]}
    rows |= {name: f"refused: {hint}" for name, hint in refused.items()}
    rows |= {f"{prefix}…": f"refused: {hint}" for prefix, hint in {**PREFIXES, **in_training.PREFIXES}.items()}
    return "\n".join([TRL_OPENING, *(f"| `{name}` | {rows[name]} |" for name in sorted(rows)), ""])


def _treatment(name: str) -> str:
    ours = defaults(KINDS["grpo"])
    parts = []
    if name in THEIRS:
        parts.append(f"default `{_show(ours[name])}` (TRL: `{_show(THEIRS[name])}`)")
    if name in OURS:
        words, link = OURS[name]
        parts.append(f"[{words}]({link})")
    return "ours: " + "; ".join(parts) if parts else "same"
