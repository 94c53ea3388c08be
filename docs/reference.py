"""Two pages of the site that are made of the code: the keys of a recipe, and TRL's options. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from sparse_rl.config import default_of, own_fields
from sparse_rl.methods.config import CONFIGS, LearnedConfig
from sparse_rl.recipe.keys import REQUIRED, KeyRow, KeySection, holders, sections_of, shown
from sparse_rl.recipe.load import KINDS
from sparse_rl.recipe.options import PASSED_THROUGH, PREFIXES, REFUSED
from trainer import options as in_training

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
    *scored, last = (f"`{name}`" for name, config in CONFIGS.items() if issubclass(config, LearnedConfig))
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


def defaults(cls: type) -> dict[str, Any]:
    """Return key -> default (MISSING if required) at one level of the YAML, with the keys of flat fields."""
    fields = ((holder, f) for holder in holders(cls) for f in dataclasses.fields(holder))
    return {f.name: default_of(f) for holder, f in fields if f.name in own_fields(holder)}


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
        parts.append(f"default `{shown(ours[name])}` (TRL: `{shown(THEIRS[name])}`)")
    if name in OURS:
        words, link = OURS[name]
        parts.append(f"[{words}]({link})")
    return "ours: " + "; ".join(parts) if parts else "same"
