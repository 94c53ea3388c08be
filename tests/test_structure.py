"""The structure of the code: allowed imports between parts, no circular imports, and the sizes of files.

Every import counts, whether it is at the top of a file, inside a function, or for type checkers only.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("sparse_rl", "rollout", "trainer", "rewards")
CORE = ("trace", "policies", "methods", "matching", "kernels", "experts", "states", "attention", "models", "data")
BASE = (  # they import at most one another
    *("errors", "clock", "config", "files", "lazy", "metrics", "progress", "source", "temporary"),
)

# Part -> the parts that it may import, besides itself and BASE. "configurations" are the modules and packages named
# `config`, which hold a component's settings, the schedule of a cache policy, and the options that a training refuses:
# they import nothing but one another and BASE.
MAY_IMPORT = {
    "configurations": (),
    "trace": ("configurations",),
    "kernels": ("trace",),
    "data": ("configurations", "models"),  # converters count tokens with a model's tokenizer
    "matching": ("methods",),
    "experts": ("trace", "kernels"),
    "states": ("trace", "kernels"),
    "attention": ("configurations", "trace", "kernels", "experts", "states"),
    "policies": ("configurations", "attention", "kernels", "trace"),
    "methods": ("configurations", "attention", "kernels", "policies", "trace"),
    "models": ("configurations", "policies", "methods", "attention"),
    "analysis": ("configurations", "methods", "trace"),
    "recipe": ("configurations", *CORE, "rollout", "trainer", "rewards"),
    "rollout": ("configurations", *CORE),
    "trainer": ("configurations", *CORE, "rollout"),
    "rewards": (),
    "commands": ("configurations", *CORE, "analysis", "recipe", "rollout", "trainer", "rewards"),
    "cli": ("commands",),
}
# Library -> the only parts that may import it.
LIBRARIES = {
    "vllm": ("rollout",),
    "trl": ("trainer", "rewards"),
    "deepspeed": ("trainer",),
    "torch": (*CORE, "rollout", "trainer", "recipe", "commands", "analysis"),
    "transformers": (*CORE, "rollout", "trainer", "commands"),
}
SHORTEST, LONGEST = 60, 900
# File of fewer or more lines, but for an __init__ -> the reason.
SIZES = {
    "rollout.vllm.compat.processes": "vLLM's processes import it, and nothing large with it",
    "sparse_rl.attention.config": "read without torch",
    "sparse_rl.cli": "answers before any other module is imported",
    "sparse_rl.commands.teacher": "a command",
    "sparse_rl.lazy": "every lazy package imports it first",
    "sparse_rl.matching": "a public name of Attention Matching's folder",
    "sparse_rl.methods.press.config": "the settings of a method, read without torch",
    "sparse_rl.methods.triattention.config": "the settings of a method, read without torch",
    "sparse_rl.commands.calibrate": "a command",
    "sparse_rl.source": "what a release changes",
    "sparse_rl.states.convolution": "a kind of mixer",
    "sparse_rl.temporary": "commands and launched processes share it, and nothing else",
}
# Modules of the recipe that build what a run needs, and are imported only when it is built.
BUILDERS = ("sparse_rl.recipe.sampling",)


@cache
def sources() -> dict[str, Path]:
    """Return module -> file."""
    results = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            results[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return results


@cache
def imported(file: Path) -> list[str]:
    """Return the modules that a file imports: for `from a import b`, a.b if that is a module, else a."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{file}, line {node.lineno}: write an import with its whole name"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [name if name in sources() else node.module for name in inner]
    return names


def part_of(module: str) -> str:
    """Return the part of the code that a module belongs to."""
    package, *rest = module.split(".")
    if package == "sparse_rl" and rest and rest[0] in BASE:
        return "base"
    if rest and (rest[-1] in ("schedule", "options") or "config" in rest):
        return "configurations"
    if package != "sparse_rl":
        return package
    return rest[0] if rest else "base"


def arrows() -> Iterator[tuple[str, str]]:
    """Return (module, imported module) for all imports between our own modules."""
    for module, file in sources().items():
        for name in imported(file):
            if name in sources() and name != module:
                yield module, name


def test_each_part_imports_only_the_parts_that_it_may_import():
    forbidden = []
    for module, name in arrows():
        own, theirs = part_of(module), part_of(name)
        if theirs not in ("base", own) and (own == "base" or theirs not in MAY_IMPORT[own]):
            forbidden.append(f"{module} imports {name}: {own} may not import {theirs}")
    assert not forbidden, "\n".join(forbidden)


def test_only_the_listed_parts_import_each_library():
    forbidden = []
    for module, file in sources().items():
        for name in imported(file):
            library = name.partition(".")[0]
            if part_of(module) not in LIBRARIES.get(library, (part_of(module),)):
                forbidden.append(f"{module} imports {name}")
            if library == "vllm" and not module.startswith("rollout.vllm"):
                forbidden.append(f"{module} imports {name}: only rollout/vllm may")
    assert not forbidden, "\n".join(forbidden)


def test_no_imports_are_circular():
    edges: dict[str, set[str]] = {module: set() for module in sources()}
    for module, name in arrows():
        # A package's __init__ only re-exports names; for a module inside the package it is one more file of the circle.
        if sources()[name].name != "__init__.py" or module.startswith(f"{name}."):
            edges[module].add(name)
    TopologicalSorter(edges).prepare()
    with pytest.raises(CycleError):  # control
        TopologicalSorter({**edges, "a": {"b"}, "b": {"c"}, "c": {"a"}}).prepare()


def test_files_beyond_the_usual_sizes_are_those_with_a_reason():
    lines = {module: len(file.read_text().splitlines()) for module, file in sources().items()}
    beyond = {module for module, count in lines.items() if not SHORTEST <= count <= LONGEST}
    assert {module for module in beyond if sources()[module].name != "__init__.py"} == SIZES.keys()


def test_configurations_and_recipes_import_no_heavy_library():
    light = [m for m in sources() if part_of(m) in ("configurations", "recipe", "base") and m not in BUILDERS]
    heavy = {"torch", "transformers", "trl", "vllm", "datasets", "numpy"}
    code = f"import importlib, sys\nfor name in {light}:\n    importlib.import_module(name)\n"
    code += f"    assert not {heavy} & {{*sys.modules}}, name"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stderr
