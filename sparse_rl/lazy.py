"""Lazy packages: their public names are imported on first access.

A package's `__init__` runs before any of its modules. If it imported torch, the package's configuration could not be
read without torch. So the `__init__` of a lazy package imports the public names only under `if TYPE_CHECKING:`, and
sets `__getattr__ = public_names(__name__)`.

It also names our other top-level packages that it needs: a file of the user's own with such a name may hide ours.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parents[1]  # the folder that holds our packages


def public_names(package: str, *needs: str) -> Callable[[str], Any]:
    """Return a package's `__getattr__` (PEP 562) for the names that its `__init__` imports for type checkers.

    needs : our other top-level packages that the package imports. Raises ImportError if Python finds another file first
    """
    for name in needs:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin and Path(spec.origin).resolve() != SOURCES / name / "__init__.py":
            mend = "rename it, or move it out of the folder of your script"
            raise ImportError(f"{spec.origin} hides the package {name} of sparse-rl, which {package} needs; {mend}")

    @cache
    def homes() -> dict[str, str | None]:
        file = sys.modules[package].__file__
        assert file is not None
        blocks = (node for node in ast.parse(Path(file).read_text("utf-8")).body if isinstance(node, ast.If))
        imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
        return {alias.name: node.module for node in imports for alias in node.names}

    def load(name: str) -> Any:
        if (home := homes().get(name)) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home), name)

    return load
