"""Packages whose public names are imported when they are first asked for.

A package's `__init__` runs before any of its modules: were it to import torch, not even the package's configuration
could be read without it. The names that a package offers are listed there with the module that defines each.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def public_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__` (PEP 562). homes : name -> the module that defines it, such as "rollout.engine"."""

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return load
