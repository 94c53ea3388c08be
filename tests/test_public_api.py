"""The public API is documented: each public name has a docstring that gives fields, shapes and dtypes.

Public names are those in the `__all__` of a package in PACKAGES, and for a class also its methods, properties and
dataclass fields, including those inherited from our own classes. The docstring of an overridden method also covers the
override.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any, get_args

import pytest
import torch

from sparse_rl.config import Configuration, flat_fields, own_fields

PACKAGES = (
    "sparse_rl.trace",
    "sparse_rl.policies",
    "sparse_rl.methods.config",
    "sparse_rl.matching",
    "sparse_rl.kernels",
    "sparse_rl.attention",
    "sparse_rl.recipe",
    "rollout",
    "rollout.context",
    "trainer",
    "rewards",
)
ENTRY = re.compile(r"^(\w+(?:, \w+)*) : ", re.M)
OURS = ("sparse_rl", "rollout", "trainer", "rewards", __name__)  # the last one is for the control


def ours(module: str | None) -> bool:
    """Return True if a module belongs to this project."""
    return (module or "").partition(".")[0] in OURS


def offered() -> Iterator[tuple[str, str, Any]]:
    """Return (package, name, object) of every public name."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            yield package, name, getattr(module, name)


def public_classes() -> dict[str, type]:
    return {f"{package}.{name}": item for package, name, item in offered() if inspect.isclass(item)}


def docstring_of(cls: type, name: str) -> str:
    """Return the docstring of a member, or the nearest docstring among the members that it overrides."""
    return next((doc for base in cls.__mro__ if name in vars(base) and (doc := vars(base)[name].__doc__)), "")


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Return (name, attribute of the nearest class) of our public methods and properties."""
    results = {}
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for base in cls.__mro__:
        for name, member in vars(base).items() if ours(base.__module__) else ():
            # the default of a field may be a function
            if (
                name not in fields
                and not name.startswith("_")
                and isinstance(member, FunctionType | classmethod | staticmethod | property | cached_property)
            ):
                results.setdefault(name, member)
    yield from results.items()


def undocumented_members(cls: type) -> list[str]:
    """Return the methods and properties of a class that have no docstring."""
    return [name for name, _ in members(cls) if not docstring_of(cls, name).strip()]


def own_docstring(cls: type) -> str:
    """Return a class's own docstring, or an empty text if dataclasses generated the signature instead."""
    text = vars(cls).get("__doc__") or ""
    return "" if text.startswith(f"{cls.__name__}(") else inspect.cleandoc(text)


def entries(cls: type) -> set[str]:
    """Return the names that have an entry `name : text` or `a, b : text` in the class's own docstring."""
    return {name for names in ENTRY.findall(own_docstring(cls)) for name in names.split(", ")}


def has_prose(cls: type) -> bool:
    """Return True if a class has a docstring of its own that was not generated."""
    return own_docstring(cls) != "" and not ENTRY.match(own_docstring(cls))


def undocumented_fields(cls: type) -> list[str]:
    """Fields of a dataclass that have no entry in its docstring or in the docstring of a base class.

    Three kinds of fields need no entry: a flattened field is not a key itself, a field that holds a configuration is
    documented by that configuration's docstring, and a field that YAML does not set has a text right below it.
    """
    if not dataclasses.is_dataclass(cls):
        return []
    documented = {name for base in cls.__mro__ for name in entries(base)}
    for base in filter(dataclasses.is_dataclass, cls.__mro__):  # a library documents its own fields
        documented |= set() if ours(base.__module__) else {field.name for field in dataclasses.fields(base)}
    for settings in getattr(cls, "configurations", ()):
        documented |= {field.name for field in dataclasses.fields(settings)} - {*undocumented_fields(settings)}
    if issubclass(cls, Configuration):
        keys = own_fields(cls)
        documented |= flat_fields(cls).keys()
        documented |= {
            name for name, hint in keys.items() if any(map(is_documented_configuration, (hint, *get_args(hint))))
        }
        documented |= {
            name for base in cls.__mro__ if ours(base.__module__) for name in fields_with_text_below(base)
        } - keys.keys()
    return [field.name for field in dataclasses.fields(cls) if field.name not in documented]


def is_documented_configuration(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Configuration) and has_prose(hint)


def without_shapes(function: Callable[..., Any], text: str) -> list[str]:
    """Return the tensor parameters and results of a function without a shape in its docstring, in the form `NAME ...
    [`.
    """
    missing = []
    for name, parameter in inspect.signature(function).parameters.items():
        if "Tensor" in str(parameter.annotation) and not re.search(rf"\b{name}\b.*?\[", text, re.S):
            missing.append(name)
    returned = str(inspect.signature(function).return_annotation)
    if "Tensor" in returned and not re.search(r"\[|scalar", text):
        missing.append("what it returns")
    return missing


def public_functions() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Yield (name, function, documentation of its parameters)."""
    for package, name, item in offered():
        if inspect.isfunction(item):
            yield f"{package}.{name}", item, item.__doc__ or ""
    for place, cls in public_classes().items():
        about = "\n".join(base.__doc__ or "" for base in cls.__mro__ if ours(base.__module__))
        for name, member in members(cls):
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if isinstance(function, FunctionType):
                yield f"{place}.{name}", function, f"{docstring_of(cls, name)}\n{about}"


def test_every_public_name_is_documented():
    """Classes, functions and constants, methods and properties, fields, and the shape of every tensor."""
    missing = []
    for package, name, item in offered():
        if inspect.isclass(item):
            documented = has_prose(item)
            missing += [
                f"{package}.{name}.{inner}" for inner in (*undocumented_members(item), *undocumented_fields(item))
            ]
        elif inspect.isfunction(item):
            documented = bool((item.__doc__ or "").strip())
        else:
            documented = any(name in with_text_below(tree(module).body) for module in homes(package, name))
        missing += [] if documented else [f"{package}.{name}"]
    for place, function, text in public_functions():
        missing += [f"{place}: {name}" for name in without_shapes(function, text)]
    assert not missing, "\n".join(missing)


@cache
def tree(module: str) -> ast.Module:
    file = sys.modules[module].__file__
    return ast.parse(Path(file).read_text())


def with_text_below(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names that a module or a class assigns with a docstring right below."""
    names = set()
    for node, below in pairwise(body):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def fields_with_text_below(cls: type) -> set[str]:
    """Return the fields that a class documents by a docstring right below them."""
    classes = [node for node in tree(cls.__module__).body if isinstance(node, ast.ClassDef)]
    return {name for node in classes if node.name == cls.__name__ for name in with_text_below(node.body)}


def homes(package: str, name: str) -> Iterator[str]:
    """Return the package of a name, and the module from which the package imports it."""
    yield package
    for node in ast.walk(tree(package)):
        if isinstance(node, ast.ImportFrom) and node.module and name in [alias.name for alias in node.names]:
            yield node.module


def offers(package: str) -> set[str]:
    """Return the names that a package defines, and those that it imports from its own modules."""
    doors = {
        "sparse_rl.methods.config": ("sparse_rl.methods.", "sparse_rl.policies."),
        "sparse_rl.matching": ("sparse_rl.methods.am.",),
        "sparse_rl.attention": ("sparse_rl.attention.", "sparse_rl.kernels."),
    }
    result, own = set(), doors.get(package, (f"{package}.",))
    for node in ast.walk(tree(package)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(own):
            result |= {alias.asname or alias.name for alias in node.names}
    for node in tree(package).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            result.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            result |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in result if not name.startswith("_")}


# Names that the package imports from its own modules and does not offer.
INNER = {
    "rewards": {
        *("BoxedReward", "CodeReward", "FormatReward", "LetterReward", "MathReward", "RepetitionReward"),
        *("ShortAnswerReward", "SoftOverlongReward", "own_reward", "without_exit"),
    }
}


def sorting(name: str) -> tuple[int, str]:
    """Sort key: constants first, then classes, then functions, as ruff sorts `__all__`."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def lazy(package: str) -> set[str] | None:
    """Return the names that a package imports on first access; None means that it imports all names at once."""
    load = vars(importlib.import_module(package)).get("__getattr__")
    return None if load is None else set(inspect.getclosurevars(load).nonlocals["homes"]())


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_sorted_and_lists_the_public_names(package):
    module = importlib.import_module(package)
    assert module.__all__ == sorted(module.__all__, key=sorting)
    assert offers(package) - INNER.get(package, set()) == set(module.__all__)
    assert lazy(package) in (None, set(module.__all__))
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError):
        _ = module.no_such_name


@dataclasses.dataclass
class Mute:
    """Of a layer.

    said : a number
    """

    said: int
    unsaid: int

    def score(self, keys: torch.Tensor) -> torch.Tensor:
        return keys

    @property
    def name(self) -> str:
        """Its name."""
        return ""


def test_control_missing_docstrings_are_found():
    assert undocumented_members(Mute) == ["score"]
    assert undocumented_fields(Mute) == ["unsaid"]
    assert without_shapes(Mute.score, "The keys, and what they are worth.") == ["keys", "what it returns"]
    assert without_shapes(Mute.score, "keys : [B, Hkv, N, D]") == []
