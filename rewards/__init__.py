"""Rewards are functions that score completions. This package does not depend on engine, trainer or recipe.

    functions, weights = make_rewards(["math", {"name": "format", "weight": 0.2, "style": "think"}])

A reward is called as TRL calls it, `fn(completions, **columns) -> list[float | None]`:

- `completions` has one entry per completion: a string, or a conversation (a list of messages with "role" and
  "content"). `rewards.text.completion_text` reads both.
- `columns` holds the columns of the dataset (`answer`, ...), each with one entry per completion, and TRL's values
  `prompts`, `completion_ids` (token ids), `trainer_state`, `log_metric(name, value)` and `log_extra(name, values)`.
- None means that a completion cannot be scored. This reward then leaves the completion out, without punishment.

Adding a reward here
--------------------
1. Write one file with one class, and name the file after the property that the reward scores. `__init__` has
   keyword-only parameters, and raises a ValueError with the name of a wrong parameter. `__call__(self, completions,
   **columns)` has an argument for each needed column, and checks the column with `rewards.text.require_column`.
2. Set the class attribute `__name__`: the name in recipes and in metrics. Instances must survive pickling.
3. Add one line to REWARDS below, and tests to `tests/rewards/`, where every entry is also tested on adversarial texts.

A reward of your own needs no change in this package. A recipe may name a function, or a class like those in this
package, in a file ("mine.py:function") or by a dotted path ("my_package.module:function"). A dotted path is looked up
in the working directory, then on the Python path (own.py). The recipe's parameters are passed as keyword arguments.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from math import isfinite  # not `import math`: in this package that name is the submodule rewards.math
from typing import Any

from rewards.boxed import BoxedReward
from rewards.code import CodeReward
from rewards.format import FormatReward
from rewards.length import SoftOverlongReward
from rewards.letter import LetterReward
from rewards.math import MathReward
from rewards.own import own_reward
from rewards.repetition import RepetitionReward
from rewards.short_answer import ShortAnswerReward

__all__ = ["REWARDS", "Reward", "make_rewards"]

Reward = Callable[..., list[float | None]]
"""A reward, called as fn(completions, **columns). Returns a number per completion, or None for "cannot be scored"."""

REWARDS: dict[str, type] = {
    "math": MathReward,
    "boxed": BoxedReward,
    "format": FormatReward,
    "soft_overlong": SoftOverlongReward,
    "repetition": RepetitionReward,
    "short_answer": ShortAnswerReward,
    "letter": LetterReward,
    "code": CodeReward,
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
    functions: list[Reward] = []
    weights: list[float] = []
    names: list[str] = []
    for spec in specs:
        function, name, weight = _make_reward(spec)
        if name in names and type(function) in REWARDS.values():
            name = next(f"{name}_{n}" for n in range(2, len(specs) + 2) if f"{name}_{n}" not in names)
            function.__name__ = name
        if name in names:
            raise ValueError(f"two rewards are called {name!r}, so their metrics would clash: rename one function")
        functions.append(function)
        weights.append(weight)
        names.append(name)
    return functions, weights


def _make_reward(spec: str | Mapping[str, Any]) -> tuple[Reward, str, float]:
    params = {"name": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {}
    name, weight = params.pop("name", None), params.pop("weight", 1.0)
    if not isinstance(name, str) or not name:
        raise ValueError(f"a reward must be a name or a mapping with a 'name', not {spec!r}")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
        raise ValueError(f"the weight of reward {name!r} must be a finite number, not {weight!r}")
    target = _find(name)
    _check_params(name, target, params)
    if inspect.isclass(target):
        try:
            target = target(**params)
        except ValueError as error:
            raise ValueError(f"reward {name!r}: {error}") from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a user's class may raise anything
            raise ValueError(f"reward {name!r} cannot be made: {type(error).__name__}: {error}") from error
    elif params:  # a partial: TRL unwraps it to find out the name, and whether the function is async
        inner, target = target, functools.partial(target, **params)
        functools.update_wrapper(target, inner, updated=())
    return target, getattr(target, "__name__", type(target).__name__), float(weight)


def _find(name: str) -> Any:
    if name in REWARDS:
        return REWARDS[name]
    if "." not in name and ":" not in name:
        raise ValueError(
            f"unknown reward {name!r}: {_hint(name, REWARDS)}known rewards are {', '.join(REWARDS)}, and dotted paths"
        )
    try:
        target = own_reward(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # importing the user's module may raise anything, or call sys.exit
        raise ValueError(f"reward {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(target):
        raise ValueError(f"reward {name!r} is not callable: it is of type {type(target).__name__}")
    return target


def _check_params(name: str, target: Any, params: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # the callable has no signature: a wrong parameter shows when it is called
        return
    accepted = signature.parameters.values()
    param_names = [p.name for p in accepted if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for param in params:
        if param not in param_names and not any(p.kind is p.VAR_KEYWORD for p in accepted):
            takes = f"{_hint(param, param_names)}it takes {', '.join(param_names) or 'none'}"
            raise ValueError(f"reward {name!r} has no parameter {param!r}: {takes}")
    if inspect.isclass(target):
        for p in accepted:
            if p.name in param_names and p.default is p.empty and p.name not in params:
                raise ValueError(f"reward {name!r} needs the parameter {p.name!r}")


def _hint(word: str, valid: Iterable[str]) -> str:
    near = get_close_matches(word, valid, n=1)
    return f"did you mean {near[0]!r}? " if near else ""
