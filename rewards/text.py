r"""Reading a completion: its text, and the last ``\boxed{...}`` in it; and the checks of what a reward is given.

Knows nothing about mathematics or scoring. Everything here is linear in the length of the text.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped character is stepped over: \{ opens nothing


def completion_text(completion: Any) -> str:
    """The text of one completion: a string, or the last assistant message of a conversation.

    A message's content may be a string, None (a bare tool call) or a list of blocks, whose text is joined.
    """
    if isinstance(completion, str):
        return completion
    spoken = [message for message in completion if message.get("role", "assistant") == "assistant"]
    content = spoken[-1].get("content") if spoken else None
    if isinstance(content, list):
        return "".join(block.get("text") or "" for block in content)
    return content or ""


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}``, braces balanced; None if there is none or it never closes."""
    start = text.rfind("\\boxed")
    while start >= 0:
        opening = BOX.match(text, start)
        if opening:
            return until_closed(text, opening.end())
        start = text.rfind("\\boxed", 0, start)
    return None


def until_closed(text: str, start: int) -> str | None:
    """What stands from `start` to the brace that closes the one opened before it; None if none does."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start : brace.start()]
    return None


def gold_text(gold: Any) -> str | None:
    r"""A gold answer as bare text: numbers are written out, the content of a ``\boxed{...}`` is taken.

    None where there is no answer to compare with: a missing value, an empty text, a box that never closes.
    """
    if gold is None:
        return None
    text = str(gold)
    answer = last_boxed(text) if BOX.search(text) else text
    return (answer or "").strip() or None


def require_column(
    reward: str, column: str, values: Sequence | None, completions: Sequence, present: Iterable[str]
) -> Sequence:
    """The values of a column, `present` the names of the others; ValueError unless each completion has one entry."""
    if values is None:
        raise ValueError(
            f"the {reward!r} reward needs a column {column!r}, and the data has {sorted(present) or 'no other'}: "
            f"map the column of your dataset that holds it to {column!r} under data.columns"
        )
    if len(values) != len(completions):
        raise ValueError(f"the {reward!r} reward got {len(completions)} completions and {len(values)} {column!r}")
    return values


def require_whole(name: str, value: Any, least: int, most: int | None = None, limit: str = "") -> int:
    """A whole number within bounds, else ValueError. limit : what the upper bound is called"""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f"from {least} up" if most is None else f"from {least} to {limit} ({most})"
        raise ValueError(f"{name} must be a whole number {bounds}, not {value!r}")
    return value
