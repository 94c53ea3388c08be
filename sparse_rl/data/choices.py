"""Multiple-choice questions: options below a question, and an order of the options that is drawn for each question."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from sparse_rl.config import show
from sparse_rl.errors import UserError


def with_options(question: str, options: Sequence[str], mark: str = ")") -> str:
    """Return the question, an empty line, and one line for each of at most 26 options, such as "A) 12 m".

    mark : text after each letter
    """
    lines = (f"{letter}{mark} {option}" for letter, option in zip(ascii_uppercase, options, strict=False))
    return "\n".join([question, "", *lines])


def lettered(question: Any, row: Mapping[str, Any], columns: Sequence[str], seed: int) -> tuple[str, str]:
    """Return the question with the stripped options of a row, and the letter of the right option.

    The order of the options depends only on the seed and the question's text.

    columns : columns of `row` that hold the options, the right one first

    Raises UserError if the question or an option is not text, if an option is empty, or if two options are equal.
    """
    if not isinstance(question, str):
        raise UserError(f"a question with options must be text, got {type(question).__name__}")
    options: list[str] = []
    for column in columns:
        option = row[column]
        if not isinstance(option, str) or not option.strip():
            raise UserError(f"expected an option (text) in column {column!r}, got {show(option)}; drop or mend the row")
        if option.strip() in options:
            first = columns[options.index(option.strip())]
            raise UserError(
                f"columns {first!r} and {column!r} hold equal options, {show(option)}; drop or mend the row"
            )
        options.append(option.strip())
    order = list(range(len(options)))
    random.Random(f"choices/{seed}/{question}").shuffle(order)
    return with_options(question, [options[place] for place in order]), ascii_uppercase[order.index(0)]
