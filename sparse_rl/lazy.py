"""Lazy packages: their public names are imported on first access.

A package's `__init__` runs before any of its modules. If it imported torch, the package's configuration could not be
read without torch. So the `__init__` of a lazy package imports the public names only under `if TYPE_CHECKING:`, and
sets `__getattr__ = public_names(__name__)`.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


def public_names(package: str) -> Callable[[str], Any]:
    """Return a package's `__getattr__` (PEP 562) for the names that its `__init__` imports for type checkers."""

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
