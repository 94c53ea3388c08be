"""Loads a reward that the user has written, from a file or from an installed module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any


def own_reward(name: str) -> Any:
    """Load the object that a path names.

    `mine.py:reward` is loaded from the file mine.py. `mine:reward` or `package.mine:reward` is loaded from the working
    directory if that contains the module, else from an installed module. `mine.reward` means `mine:reward`. Errors of
    the user's module are raised unchanged. A missing file or object raises FileNotFoundError, AttributeError or
    ImportError.
    """
    module, _, attribute = name.rpartition(":") if ":" in name else name.rpartition(".")
    if module.endswith(".py"):
        file = Path(module).expanduser()
        if not file.is_file():
            raise FileNotFoundError(f"there is no file {module}")
        return attrgetter(attribute)(_load(file, file.parent, file.stem))
    place = Path(*module.split("."))
    for file in (place / "__init__.py", Path(f"{place}.py")):
        if file.is_file():
            return attrgetter(attribute)(_load(file, Path(), module))
    return attrgetter(attribute)(importlib.import_module(module))


def _load(file: Path, folder: Path, module: str) -> ModuleType:
    """Load a file as a module under a unique name, so that it neither hides an installed module nor is hidden by one.

    The module's own imports are looked up in `folder` too, after all other places.
    """
    file, place = file.resolve(), str(folder.resolve())
    package = ModuleType(f"from {place}".replace(".", "_"))  # allows relative imports of neighbouring files
    package.__path__ = [place]
    sys.modules.setdefault(package.__name__, package)
    name = f"{package.__name__}.{module}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(file):
        return loaded
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = loaded = importlib.util.module_from_spec(spec)
    added = place not in sys.path
    if added:
        sys.path.append(place)
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        if added:
            sys.path.remove(place)
    return loaded
