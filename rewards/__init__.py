"""Rewards are functions that score completions. This package does not depend on engine, trainer or recipe.

    functions, weights = make_rewards(["math", {"name": "format", "weight": 0.2, "style": "think"}])

A reward is called as TRL calls it, `fn(completions, **columns) -> list[float | None]`:

- `completions` has one entry per completion: a string, or a conversation (a list of messages with "role" and
  "content"). `rewards.text.final_parts` reads both, and leaves out the reasoning.
- `columns` holds the columns of the dataset (`answer`, ...), each with one entry per completion, and TRL's values
  `prompts`, `completion_ids` (token ids), `trainer_state`, `log_metric(name, value)` and `log_extra(name, values)`.
  `prompt_ends` holds the last characters of each prompt as the model reads it, after the chat template.
- None means that a completion cannot be scored. This reward then leaves the completion out, without punishment.

docs/extending.md adds a reward here. Instances must survive pickling. A reward that reads gold answers (or tests) sets
`golds`, the columns that may hold them. It returns None exactly for the rows that it cannot score, whatever the
completion is: it is called with empty completions before a model loads.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from math import isfinite  # not `import math`: in this package that name is the submodule rewards.math
from typing import Any

from rewards import text
from rewards.code import CodeReward
from rewards.math import MathReward
from rewards.own import own_reward, without_exit

__all__ = ["REWARDS", "Reward", "make_rewards"]

Reward = Callable[..., list[float | None]]
"""A reward, called as fn(completions, **columns). Returns a number per completion, or None for "cannot be scored"."""

REWARDS: dict[str, type] = {
    "math": MathReward,
    "boxed": text.BoxedReward,
    "format": text.FormatReward,
    "soft_overlong": text.SoftOverlongReward,
    "repetition": text.RepetitionReward,
    "short_answer": text.ShortAnswerReward,
    "letter": text.LetterReward,
    "code": CodeReward,
    "recorded": text.RecordedReward,
}
"""Built-in rewards: name in recipes -> class."""


def make_rewards(specs: Sequence[str | Mapping[str, Any]]) -> tuple[list[Reward], list[float]]:
    """Build the rewards that a recipe lists, and return the functions and their weights, in the order of `specs`.

    A spec is a name from REWARDS, a dotted path, or a mapping {"name": a name or path, "weight": 1.0, parameters}. If a
    built-in reward is listed twice, the second one gets the name NAME_2, so that the metrics have different names.
    Raises ValueError with a one-line message if a spec is wrong.
    """
    if isinstance(specs, str | Mapping) or not isinstance(specs, Sequence):
        raise ValueError(f"rewards must be a list of names or mappings, not {specs!r}")
    if not specs:
        raise ValueError(f"rewards is empty: name at least one of {', '.join(REWARDS)}, or a dotted path")
    functions: dict[str, Reward] = {}
    weights: list[float] = []
    for spec in specs:
        function, name, weight = _make_reward(spec)
        if name in functions and type(function) in REWARDS.values():
            name = next(f"{name}_{n}" for n in range(2, len(specs) + 2) if f"{name}_{n}" not in functions)
            function.__name__ = name
        if name in functions:
            raise ValueError(f"two rewards are called {name!r}, so their metrics would clash: rename one function")
        functions[name] = function
        weights.append(weight)
    return list(functions.values()), weights


def _make_reward(spec: str | Mapping[str, Any]) -> tuple[Reward, str, float]:
    params = {"name": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {}
    name, weight = params.pop("name", None), params.pop("weight", 1.0)
    if not isinstance(name, str) or not name:
        raise ValueError(f"a reward must be a name or a mapping with a 'name', not {spec!r}")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
        raise ValueError(f"the weight of reward {name!r} must be a finite number, not {weight!r}")
    target: Any = REWARDS.get(name)
    if target is None:
        if "." not in name and ":" not in name:
            meant = "".join(f"did you mean {near!r}? " for near in get_close_matches(name, REWARDS, n=1))
            raise ValueError(f"unknown reward {name!r}: {meant}known are {', '.join(REWARDS)}, and dotted paths")
        with _refused(name, "cannot be imported"):
            target = own_reward(name)
        if not callable(target):
            raise ValueError(f"reward {name!r} is not callable: it is of type {type(target).__name__}")
    _check_params(name, target, params)
    if inspect.isclass(target):
        with _refused(name, "cannot be made"):
            target = target(**params)
    elif params:  # a partial: TRL unwraps it to find out the name, and whether the function is async
        inner, target = target, functools.partial(target, **params)
        functools.update_wrapper(target, inner, updated=())
    return target, getattr(target, "__name__", type(target).__name__), float(weight)


@contextmanager
def _refused(name: str, how: str) -> Iterator[None]:
    """Turn any error of a user's module or class, and sys.exit, into a ValueError."""
    try:
        with without_exit():
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        checked = isinstance(error, ValueError) and how == "cannot be made"  # a parameter that the class checks
        raise ValueError(f"reward {name!r}{'' if checked else f' {how}: {type(error).__name__}'}: {error}") from error


def _check_params(name: str, target: Any, params: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # the callable has no signature: a wrong parameter shows when it is called
        return
    try:  # a function is called with completions and columns, too
        (signature.bind if inspect.isclass(target) else signature.bind_partial)(**params)
    except TypeError as error:
        raise ValueError(f"reward {name!r}: {error}; its parameters are {signature}") from error
