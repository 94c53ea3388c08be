r"""Reads the text of a completion and the last ``\boxed{...}`` in it, and checks the inputs of a reward.

Every function takes time linear in the text's length.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped character is skipped: \{ is not a brace


def completion_text(completion: Any) -> str:
    """Return the text of one completion, which is a string or a conversation.

    The text of a conversation is its last assistant message. The content of a message may be a string, None (a tool
    call without text) or a list of blocks, whose texts are joined.
    """
    if isinstance(completion, str):
        return completion
    assistant_messages = [message for message in completion if message.get("role", "assistant") == "assistant"]
    content = assistant_messages[-1].get("content") if assistant_messages else None
    if isinstance(content, list):
        return "".join(block.get("text") or "" for block in content)
    return content or ""


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}``. None means that there is no box, or that it never closes."""
    start = text.rfind("\\boxed")
    while start >= 0:
        opening = BOX.match(text, start)
        if opening:
            return until_closed(text, opening.end())
        start = text.rfind("\\boxed", 0, start)
    return None


def until_closed(text: str, start: int) -> str | None:
    """Return the text from `start` up to the brace that closes the brace before `start`. None: no brace does."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start : brace.start()]
    return None


def gold_text(gold: Any) -> str | None:
    r"""Return a gold answer as bare text: a number becomes a string, and a ``\boxed{...}`` is replaced by its content.

    None means that there is no answer: a missing value, an empty text, or a box that is never closed.
    """
    if gold is None:
        return None
    text = str(gold)
    answer = last_boxed(text) if BOX.search(text) else text
    return (answer or "").strip() or None


def require_column(
    reward: str, column: str, values: Sequence | None, completions: Sequence, present: Iterable[str]
) -> Sequence:
    """Return the values of a column, or raise ValueError if the column is missing or not as long as `completions`.

    present : names of the other columns of the data, for the error
    """
    if values is None:
        raise ValueError(
            f"the {reward!r} reward needs a column {column!r}, but the data has {sorted(present) or 'no other'}: "
            f"set data.columns.{column} to the name of the column of your dataset that holds it"
        )
    if len(values) != len(completions):
        raise ValueError(f"the {reward!r} reward got {len(completions)} completions but {len(values)} {column!r}")
    return values


def require_whole(name: str, value: Any, least: int, most: int | None = None, limit: str = "") -> int:
    """Return `value`, or raise ValueError if it is no whole number from `least` to `most`. limit : name of `most`"""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f">= {least}" if most is None else f"from {least} to {limit} ({most})"
        raise ValueError(f"{name} must be a whole number {bounds}, not {value!r}")
    return value
