"""Finds and reads a recipe: one flat YAML file, with overrides, becomes one typed, validated dataclass.

The file recipes/tasks/NAME.yaml describes the dataset of the task NAME of an evaluation:

    tasks: [aime24, gsm8k]
    tasks: {aime24: {thinking: true}, mine: {path: mine.jsonl}}
    tasks: {livecodebench: {release: v5}}

A block under the name of a task takes all keys that it does not set from the task's file. In that file, `hub` holds
the keys for the dataset on the hub. If the block's `path` is a local file, `file` holds the keys that are used instead.
`releases` holds the `files` of each release, which the key `release` names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from sparse_rl.config import Source, build, coerce, names_a_file, show, unknown_key, yaml_fields
from sparse_rl.data.config import LOCAL_FILES
from sparse_rl.errors import UserError, did_you_mean, listed, nearest, one_line
from sparse_rl.lazy import SOURCES
from sparse_rl.methods.config import EvictingConfig
from sparse_rl.metrics import RECIPE_FILE
from sparse_rl.recipe.distillation import DistillRecipe, KVpopRecipe
from sparse_rl.recipe.evaluation import BenchRecipe, BudgetsRecipe, EvalRecipe, PerplexityRecipe
from sparse_rl.recipe.grpo import GRPORecipe
from sparse_rl.recipe.options import NOT_HERE, PASSED_THROUGH, refusal
from sparse_rl.recipe.run import Recipe
from sparse_rl.recipe.sft import SFTRecipe
from sparse_rl.recipe.yaml_text import MOST_CHARACTERS, apply_overrides, parse_yaml

KINDS: dict[str, type[Recipe]] = {
    "grpo": GRPORecipe,
    "distill": DistillRecipe,
    "kvpop": KVpopRecipe,
    "sft": SFTRecipe,
    "eval": EvalRecipe,
    "perplexity": PerplexityRecipe,
    "bench": BenchRecipe,
    "budgets": BudgetsRecipe,
}
"""The class of each kind of recipe, by the value of the key `kind`."""
MOST_KEYS = 50  # maximum number of wrong keys that one error lists


RECIPES = SOURCES / "recipes"  # by its place: a user's own module `recipes` does not hide it


def _shipped() -> dict[str, Path]:
    """Return every YAML file with a `kind` in the package `recipes`: name -> file."""
    return _recipes_in(RECIPES)


@cache
def _recipes_in(folder: Path) -> dict[str, Path]:
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
        near = nearest(name, map(str, path.parent.glob("*.y*ml"))) or nearest(query, names)
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
    mapping = _tasks_as_blocks(mapping, Source(name))
    overridden: frozenset[str] = frozenset()
    for override in overrides:
        overridden |= apply_overrides(mapping, [override])
        mapping = _tasks_as_blocks(mapping, Source(name, overridden))
    mapping = _filled_tasks(mapping, Source(name, overridden))
    kind = mapping.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        near = nearest(kind, KINDS)
        wrong = "missing" if kind is None else f"unknown kind {show(kind)}"
        near = f" (did you mean {near}?)" if near else ""
        source = Source(name, overridden)
        refused = [source.error(str(key), mend) for key in mapping if (mend := refusal(str(key), "grpo"))]
        raise _as_one([source.error("kind", f"{wrong}; one of {', '.join(KINDS)}{near}"), *refused], source)
    cls = KINDS[kind]
    source = Source(name, overridden, _places(cls))
    own, passed_through = yaml_fields(cls), PASSED_THROUGH.get(kind, {})
    options, wrong_keys = {}, []
    for key in [key for key in mapping if key not in own]:
        if mend := refusal(str(key), kind):
            wrong_keys.append(source.error(str(key), mend))
        elif key in passed_through:
            options[key] = mapping.pop(key)
        elif len(wrong_keys) < MOST_KEYS:
            wrong_keys.append(unknown_key(key, own, str(key), source, passed_through))
    if wrong_keys:
        raise _as_one(wrong_keys, source)
    options = {key: coerce(value, passed_through[key], key, source) for key, value in options.items()}
    try:
        recipe = build(cls, mapping, "", source, trainer_options=options)
        return recipe.on_traces() if isinstance(recipe, SFTRecipe) and recipe.data.traces else recipe
    except UserError as error:
        if error.key == "cache" and any(key.startswith("cache.") for key in overridden):
            mend = f"{error.message} (cache={{policy: ...}} replaces the whole block)"
            raise source.error("cache", mend) from None
        raise


def place_of(name: str) -> str | None:
    """Return the dotted key of some kind of recipe that is most similar to `name`, which may lack its block."""
    places = {key: place for cls in reversed(KINDS.values()) for key, place in _places(cls).items()}
    places |= {place: place for place in places.values()}
    return places.get(name if name in places else nearest(name, places) or "")


def _as_one(errors: Sequence[UserError], source: Source) -> UserError:
    """Return an error that lists all errors, so that a recipe of TRL is mended in one go."""
    lines = [f"{error.key}: {error.message.removeprefix(NOT_HERE)}" for error in errors]
    return errors[0] if len(errors) == 1 else source.error("", f"{len(errors)} keys to mend: {'; '.join(lines)}")


def _places(cls: type[Recipe]) -> dict[str, str]:
    """Return key -> dotted key in a recipe of this class, so that an error can correct a key at the wrong level."""
    places = {key: f"cache.{key}" for key in ("policy", *yaml_fields(EvictingConfig))}
    for key, hint in yaml_fields(cls).items():
        for block in () if get_origin(hint) is dict else (hint, *get_args(hint)):
            if isinstance(block, type) and dataclasses.is_dataclass(block):
                places |= {inner: f"{key}.{inner}" for inner in yaml_fields(block) if inner not in places}
    return places | {key: key for key in yaml_fields(cls)}


# ---- named tasks -------------------------------------------------------------------------------------------------


@cache
def named_tasks() -> dict[str, dict[str, Any]]:
    """Return name -> content of the task's file, for all named tasks."""
    files = sorted((RECIPES / "tasks").glob("*.yaml"))
    return {file.stem: parse_yaml(file.read_text("utf-8"), file.name) for file in files}


def _tasks_as_blocks(mapping: dict[str, Any], source: Source) -> dict[str, Any]:
    """Return a recipe's mapping, in which a list of task names is a mapping: name -> empty block."""
    tasks = mapping.get("tasks")
    if isinstance(tasks, str):
        tasks = [tasks]
    if not isinstance(tasks, list):
        return dict(mapping)
    for name in tasks:
        if not isinstance(name, str) or name not in named_tasks():
            close = did_you_mean(name, named_tasks()) if isinstance(name, str) else ""
            names = ", ".join(named_tasks())
            raise source.error(
                "tasks", f"unknown task {show(name)}{close}; known: {names}; for others give a block with a path"
            )
    return {**mapping, "tasks": {name: {} for name in tasks}}


def _filled_tasks(mapping: dict[str, Any], source: Source) -> dict[str, Any]:
    """Return a recipe's mapping with the block of each named task filled from the task's file."""
    tasks = mapping.get("tasks")
    if not isinstance(tasks, dict):
        return mapping
    blocks = {name: _filled_task(block, named_tasks().get(name)) for name, block in tasks.items()}
    for name, block in blocks.items():
        releases = named_tasks().get(name, {}).get("releases", {})
        release = block.get("release") if isinstance(block, dict) else None
        if release is not None and releases and not _is_file(block):
            if release not in releases:
                message = f"unknown release {show(release)}; the releases are {', '.join(releases)}"
                raise source.error(f"tasks.{name}.release", message)
            blocks[name] = {**block, "files": releases[release]}
    return {**mapping, "tasks": blocks}


def _is_file(block: dict[str, Any]) -> bool:
    path = block.get("path")
    return isinstance(path, str) and path.lower().endswith(LOCAL_FILES)


def _filled_task(block: Any, task: dict[str, Any] | None) -> Any:
    if task is None or not isinstance(block, dict | None) or (block or {}).get("synthetic") is not None:
        return block
    block = block or {}
    place = task.get("file", {}) if _is_file(block) else task.get("hub", {})
    base = {key: value for key, value in task.items() if key not in ("hub", "file", "releases")} | place
    merged = {**base, **block}
    if isinstance(block.get("columns"), dict) and "columns" in base:
        merged["columns"] = {**base["columns"], **block["columns"]}
    return merged
