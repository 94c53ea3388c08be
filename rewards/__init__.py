r"""Rewards: what a completion is worth. This package stands alone; it knows neither engine, trainer nor recipe.

    functions, weights = make_rewards(["math", {"name": "format", "weight": 0.2, "style": "think"}])

A reward is called as TRL calls it, `fn(completions, **columns) -> list[float | None]`:

- `completions` holds one entry per completion, a string or a conversation (a list of messages with "role" and
  "content"; `rewards.text.completion_text` reads both);
- the columns are the data's own (`answer`, ...), each with one entry per completion, and TRL's `prompts`,
  `completion_ids` (token ids), `trainer_state`, `log_metric(name, value)` and `log_extra(name, values)`;
- None means "cannot be scored": the completion is left out of this reward, not punished.

Adding a reward here
--------------------
1. One file, named after what it looks at, with one class: keyword-only parameters in `__init__`, checked there
   with a ValueError that names the parameter; `__call__(self, completions, **columns)`, with the columns that it
   needs named as arguments and asked for by `rewards.text.require_column`.
2. A class attribute `__name__`: the name in recipes and in metrics. Instances must survive pickling.
3. One line in REWARDS below, and its laws in `tests/rewards/` (adversarial texts are tested for every entry).

A reward of your own needs no change here: a spec may be a file and what it defines, "mine.py:function" (or a class
like those here), or a dotted path, "my_package.module:function", looked up in the working directory and on the Python
path (own.py). Parameters given with it become keyword arguments.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from math import isfinite  # not `import math`: the submodule of that name takes its place here
from typing import Any

from rewards.boxed import BoxedReward
from rewards.format import FormatReward
from rewards.length import SoftOverlongReward
from rewards.math import MathReward
from rewards.own import own_reward
from rewards.repetition import RepetitionReward
from rewards.short_answer import ShortAnswerReward

__all__ = ["REWARDS", "Reward", "make_rewards"]

Reward = Callable[..., list[float | None]]
"""A reward, called as fn(completions, **columns): one number for each completion, None for "cannot be scored"."""

REWARDS: dict[str, type] = {
    "math": MathReward,
    "boxed": BoxedReward,
    "format": FormatReward,
    "soft_overlong": SoftOverlongReward,
    "repetition": RepetitionReward,
    "short_answer": ShortAnswerReward,
}
"""The class of each reward that is shipped, by the name that recipes give it."""


def make_rewards(specs: Sequence[str | Mapping[str, Any]]) -> tuple[list[Reward], list[float]]:
    """Build the rewards that a recipe asks for.

    A spec is a name of REWARDS, a dotted path, or a mapping {"name": one of these, "weight": 1.0, parameters}.
    Returns the functions and their weights, in order. Raises ValueError, in one line, for whatever is wrong.
    A registered reward that is asked for again is called name_2, so that the metrics stay apart.
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
            raise ValueError(f"two rewards are called {name!r}, and so would their metrics be: rename one function")
        functions.append(function)
        weights.append(weight)
        names.append(name)
    return functions, weights


def _make_reward(spec: str | Mapping[str, Any]) -> tuple[Reward, str, float]:
    params = {"name": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {}
    name, weight = params.pop("name", None), params.pop("weight", 1.0)
    if not isinstance(name, str) or not name:
        raise ValueError(f"a reward is a name or a mapping with a 'name', not {spec!r}")
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
        except BaseException as error:  # of a class of the user's
            raise ValueError(f"reward {name!r} cannot be made: {type(error).__name__}: {error}") from error
    elif params:  # a partial, because TRL looks through it: for the name, and for whether it is async
        inner, target = target, functools.partial(target, **params)
        functools.update_wrapper(target, inner, updated=())
    return target, getattr(target, "__name__", type(target).__name__), float(weight)


def _find(name: str) -> Any:
    if name in REWARDS:
        return REWARDS[name]
    if "." not in name and ":" not in name:
        raise ValueError(
            f"unknown reward {name!r}: {_hint(name, REWARDS)}there are {', '.join(REWARDS)}, and dotted paths"
        )
    try:
        target = own_reward(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's module may raise anything as it is imported, or call sys.exit
        raise ValueError(f"reward {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(target):
        raise ValueError(f"reward {name!r} is not callable but {type(target).__name__}")
    return target


def _check_params(name: str, target: Any, params: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # a callable without one: its own call will tell
        return
    accepted = signature.parameters.values()
    known = [p.name for p in accepted if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for param in params:
        if param not in known and not any(p.kind is p.VAR_KEYWORD for p in accepted):
            takes = f"{_hint(param, known)}it takes {', '.join(known) or 'none'}"
            raise ValueError(f"reward {name!r} has no parameter {param!r}: {takes}")
    if inspect.isclass(target):
        for p in accepted:
            if p.name in known and p.default is p.empty and p.name not in params:
                raise ValueError(f"reward {name!r} needs the parameter {p.name!r}")


def _hint(word: str, valid: Iterable[str]) -> str:
    near = get_close_matches(word, valid, n=1)
    return f"did you mean {near[0]!r}? " if near else ""
