"""Finds and reads a recipe: one flat YAML file, with overrides, becomes one typed, validated dataclass.

    recipe = load_recipe("quickstart/grpo", ["learning_rate=1e-5", "cache.budget=64"])

Keys that TRL also has are named as in TRL. TRL's other options (passed_through.py) are keys at the top level.
This module imports neither torch nor transformers nor TRL.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from sparse_rl.config import Source, build, coerce, names_a_file, show, yaml_fields
from sparse_rl.errors import UserError, listed, nearest, one_line
from sparse_rl.methods.config import EvictingConfig
from sparse_rl.metrics import RECIPE_FILE
from sparse_rl.recipe import tasks
from sparse_rl.recipe.kinds import KINDS, Recipe
from sparse_rl.recipe.kinds.swept import nested_sweep
from sparse_rl.recipe.passed_through import PASSED_THROUGH
from sparse_rl.recipe.refused import refusal
from sparse_rl.recipe.schema import MOST_CHARACTERS, apply_overrides, parse_yaml


def _shipped() -> dict[str, Path]:
    """Return every YAML file with a `kind` in the package `recipes`: name -> file."""
    try:
        folder = Path(str(importlib.resources.files("recipes")))
    except ModuleNotFoundError:  # sparse_rl is installed without the package `recipes`
        return {}
    files = [file for file in folder.rglob("*.yaml") if re.search(r"^kind:", file.read_text("utf-8"), re.M)]
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def list_recipes() -> list[str]:
    """Return the names of the shipped recipes, such as "quickstart/grpo"."""
    return sorted(_shipped())


def load_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe in a YAML file, or the shipped recipe of this name, after all checks of its keys.

    path_or_name : a file ending in .yaml or .yml, or a name from `list_recipes`
    overrides : strings "key=value", with dots for keys of blocks: "cache.budget=64"; the value is read as YAML

    Raises UserError if there is no such recipe, if its file cannot be read, or if the recipe is invalid.
    """
    name = str(path_or_name)
    path = Path(name)
    if not names_a_file(name):
        raise UserError(f"{show(name)}: no file can have this name")
    if path.suffix not in (".yaml", ".yml") and name in (shipped := _shipped()):
        text = shipped[name].read_text(encoding="utf-8")
    elif path.is_file():
        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(MOST_CHARACTERS + 1)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{name}: cannot be read: {error}") from None
    elif (path / RECIPE_FILE).is_file():
        raise UserError(f"{name}: this is the directory of a run, not a recipe; its recipe is {path / RECIPE_FILE}")
    elif Path(f"{name}.yaml").is_file():
        raise UserError(f"{name}: no shipped recipe has this name; to load the file, write {name}.yaml")
    else:
        names = list_recipes()
        query = name.removesuffix(".yaml").removesuffix(".yml").removeprefix("recipes/")
        near = nearest(query, names)
        mend = f"did you mean {near}?" if near else f"shipped recipes: {listed(names, query) or 'none'}"
        raise UserError(f"{one_line(name, 100)}: neither a file nor a shipped recipe; {mend}")
    return make_recipe(parse_yaml(text, name), overrides, name)


def make_recipe(mapping: Any, overrides: Sequence[str] = (), name: str = "recipe") -> Recipe:
    """Return the recipe that a mapping describes. Options of TRL are stored in the recipe's `trainer_options`.

    mapping : keys and values of the recipe, including `kind`
    overrides : strings "key=value", as in `load_recipe`
    name : name of the recipe in errors

    Raises UserError for an invalid recipe. Warnings about valid but unwise settings are in the recipe's `warnings`.
    """
    if not isinstance(mapping, dict):
        raise UserError(f"{name}: expected a mapping of keys to values, got {show(mapping)}")
    mapping = tasks.as_blocks(mapping, Source(name))
    overridden: frozenset[str] = frozenset()
    for override in overrides:
        overridden |= apply_overrides(mapping, [override])
        mapping = tasks.as_blocks(mapping, Source(name, overridden))
    mapping = nested_sweep(tasks.filled(mapping, Source(name, overridden)), Source(name, overridden))
    kind = mapping.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        near = nearest(kind, KINDS)
        raise Source(name, overridden).error(
            "kind",
            f"{'missing' if kind is None else f'unknown kind {show(kind)}'}; one of {', '.join(KINDS)}"
            + (f" (did you mean {near}?)" if near else ""),
        )
    cls = KINDS[kind]
    source = Source(name, overridden, _places(cls))
    own, passed_through = yaml_fields(cls), PASSED_THROUGH.get(kind, {})
    options = {}
    for key in [key for key in mapping if key not in own]:
        if mend := refusal(str(key), kind):
            raise source.error(str(key), mend)
        if key in passed_through:
            options[key] = coerce(mapping.pop(key), passed_through[key], key, source)
    try:
        return build(cls, mapping, "", source, also=passed_through, trainer_options=options)
    except UserError as error:
        if error.key == "cache" and any(key.startswith("cache.") for key in overridden):
            mend = f"{error.message} (cache={{policy: ...}} replaces the whole block)"
            raise source.error("cache", mend) from None
        raise


def _places(cls: type[Recipe]) -> dict[str, str]:
    """Return key -> dotted key in a recipe of this class, so that an error can correct a key at the wrong level."""
    places = {key: f"cache.{key}" for key in ("policy", *yaml_fields(EvictingConfig))}
    for key, hint in yaml_fields(cls).items():
        for block in () if get_origin(hint) is dict else (hint, *get_args(hint)):
            if isinstance(block, type) and dataclasses.is_dataclass(block):
                places |= {inner: f"{key}.{inner}" for inner in yaml_fields(block) if inner not in places}
    return places | {key: key for key in yaml_fields(cls)}
