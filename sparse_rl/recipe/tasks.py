"""The named tasks of evaluations. The file recipes/tasks/NAME.yaml describes the dataset of the task NAME.

    tasks: [aime24, gsm8k]
    tasks: {aime24: {thinking: true}, mine: {path: mine.jsonl}}
    tasks: {livecodebench: {release: v5}}

A block under the name of a task takes all keys that it does not set from the task's file. In that file, `hub` holds
the keys for the dataset on the hub. If the block's `path` is a local file, `file` holds the keys that are used instead.
`releases` holds the `files` of each release, which the key `release` names.
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


def filled(mapping: dict[str, Any], source: Source) -> dict[str, Any]:
    """Return a recipe's mapping with the block of each named task filled from the task's file.

    Raises UserError for an unknown release.
    """
    tasks = mapping.get("tasks")
    if not isinstance(tasks, dict):
        return mapping
    blocks = {name: _filled(block, named_tasks().get(name)) for name, block in tasks.items()}
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


def _filled(block: Any, task: dict[str, Any] | None) -> Any:
    if task is None or not isinstance(block, dict | None) or (block or {}).get("synthetic") is not None:
        return block
    block = block or {}
    place = task.get("file", {}) if _is_file(block) else task.get("hub", {})
    base = {key: value for key, value in task.items() if key not in ("hub", "file", "releases")} | place
    merged = {**base, **block}
    if isinstance(block.get("columns"), dict) and "columns" in base:
        merged["columns"] = {**base["columns"], **block["columns"]}
    return merged
