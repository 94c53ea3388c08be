"""The structure of the code: allowed imports between parts, no circular imports, and small files.

Every import counts, whether it is at the top of a file, inside a function, or for type checkers only.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("sparse_rl", "rollout", "trainer", "rewards")
CORE = ("trace", "policies", "methods", "kernels", "matching", "experts", "attention", "models", "data")
BASE = (  # they import at most one another
    *("beside", "errors", "clock", "config", "files", "lazy", "metrics", "progress", "source", "temporary"),
)

# Part -> the parts that it may import, besides itself and BASE. "configurations" are the modules and packages named
# `config`, which hold a component's settings, the schedule of a cache policy, and the options that a training refuses:
# they import nothing but one another and BASE.
MAY_IMPORT = {
    "configurations": (),
    "trace": ("configurations",),
    "kernels": ("trace",),
    "data": ("configurations",),
    "matching": ("trace",),
    "experts": ("trace", "kernels"),
    "attention": ("configurations", "trace", "kernels", "matching", "experts"),
    "policies": ("configurations", "attention", "kernels", "trace"),
    "methods": ("configurations", "attention", "kernels", "matching", "policies", "trace"),
    "models": ("configurations", "policies", "methods", "attention"),
    "analysis": ("methods", "trace"),
    "recipe": ("configurations",),
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
    "torch": (*CORE, "rollout", "trainer", "commands", "analysis"),
    "transformers": (*CORE, "rollout", "trainer", "commands"),
}
LONGEST = 400


@cache
def sources() -> dict[str, Path]:
    """Return module -> file."""
    results = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            results[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return results


def imported(file: Path) -> Iterator[str]:
    """Return the modules that a file imports: for `from a import b`, a.b if that is a module, else a."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{file}, line {node.lineno}: write an import with its whole name"
            assert not node.level, f"{file}, line {node.lineno}: write an import with its whole name"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in sources() else node.module


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


def test_each_part_imports_only_the_parts_that_it_may_import() -> None:
    forbidden = []
    for module, name in arrows():
        own, theirs = part_of(module), part_of(name)
        if theirs not in ("base", own) and (own == "base" or theirs not in MAY_IMPORT[own]):
            forbidden.append(f"{module} imports {name}: {own} may not import {theirs}")
    assert not forbidden, "\n".join(forbidden)


def test_only_the_listed_parts_import_each_library() -> None:
    forbidden = []
    for module, file in sources().items():
        for name in imported(file):
            library = name.partition(".")[0]
            if part_of(module) not in LIBRARIES.get(library, (part_of(module),)):
                forbidden.append(f"{module} imports {name}")
            if library == "vllm" and not module.startswith("rollout.vllm"):
                forbidden.append(f"{module} imports {name}: only rollout/vllm may")
    assert not forbidden, "\n".join(forbidden)


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of a graph that have more than one node."""
    reach: dict[str, set[str]] = {}
    for node in edges:
        seen, waiting = set(), [node]
        while waiting:
            for following in edges.get(waiting.pop(), ()):
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
        reach[node] = seen
    groups = {frozenset(b for b in reach[a] if a in reach.get(b, ())) for a in edges if a in reach[a]}
    return [sorted(group) for group in groups]


def test_no_imports_are_circular() -> None:
    """No chain of imports leads from a file back to itself. Control: `circles` finds the circle a, b, c."""
    edges: dict[str, set[str]] = {module: set() for module in sources()}
    for module, name in arrows():
        # A package's __init__ only re-exports names; for a module inside the package it is one more file of the circle.
        if sources()[name].name != "__init__.py" or module.startswith(f"{name}."):
            edges[module].add(name)
    assert not circles(edges)
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]  # control


def test_no_file_is_longer_than_400_lines_unless_its_docstring_says_why() -> None:
    for module, file in sources().items():
        text = file.read_text()
        if len(text.splitlines()) > LONGEST:
            assert "This file is long because" in (ast.get_docstring(ast.parse(text)) or ""), module


@pytest.mark.parametrize(
    "module", [name for name in sources() if part_of(name) in ("configurations", "recipe", "base")]
)
@pytest.mark.few(19)
def test_configurations_and_recipes_import_no_heavy_library(module: str) -> None:
    heavy = ("torch", "transformers", "trl", "vllm", "datasets", "numpy")
    code = f"import sys, {module}; sys.exit([name for name in {heavy} if name in sys.modules] or None)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stderr
