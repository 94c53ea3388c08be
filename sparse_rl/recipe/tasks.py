"""The named tasks of evaluations. The file recipes/tasks/NAME.yaml describes the dataset of the task NAME.

    tasks: [aime24, gsm8k]
    tasks: {aime24: {thinking: true}, mine: {path: mine.jsonl}}

A block under the name of a task takes all keys that it does not set from the task's file. In that file, `hub` holds
the keys for the dataset on the hub. If the block's `path` is a local file, `file` holds the keys that are used instead.
"""

from __future__ import annotations

import importlib.resources
from functools import cache
from pathlib import Path
from typing import Any

from sparse_rl.config import Source, show
from sparse_rl.data.config import LOCAL_FILES
from sparse_rl.errors import did_you_mean
from sparse_rl.recipe.schema import parse_yaml


@cache
def named_tasks() -> dict[str, dict[str, Any]]:
    """Return name -> content of the task's file, for all named tasks."""
    try:
        folder = Path(str(importlib.resources.files("recipes"))) / "tasks"
    except ModuleNotFoundError:  # sparse_rl is installed without the package `recipes`
        return {}
    return {file.stem: parse_yaml(file.read_text("utf-8"), file.name) for file in sorted(folder.glob("*.yaml"))}


def as_blocks(mapping: dict[str, Any], source: Source) -> dict[str, Any]:
    """Return a copy of a recipe's mapping, in which a list of task names becomes a mapping: name -> empty block.

    Raises UserError for an unknown name.
    """
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


def filled(mapping: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's mapping with the block of each named task filled from the task's file."""
    tasks = mapping.get("tasks")
    if not isinstance(tasks, dict):
        return mapping
    return {**mapping, "tasks": {name: _filled(block, named_tasks().get(name)) for name, block in tasks.items()}}


def _filled(block: Any, task: dict[str, Any] | None) -> Any:
    if task is None or not isinstance(block, dict | None) or (block or {}).get("synthetic") is not None:
        return block
    block = block or {}
    path = block.get("path")
    is_file = isinstance(path, str) and path.lower().endswith(LOCAL_FILES)
    place = task.get("file", {}) if is_file else task.get("hub", {})
    base = {key: value for key, value in task.items() if key not in ("hub", "file")} | place
    merged = {**base, **block}
    if isinstance(block.get("columns"), dict) and "columns" in base:
        merged["columns"] = {**base["columns"], **block["columns"]}
    return merged
