"""Helpers of the commands that convert a dataset's original files: read these files, and write rows to stdout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

from sparse_rl.config import show
from sparse_rl.errors import UserError, one_line, reason, unread
from sparse_rl.files import MOST_TEXT, read_text

T = TypeVar("T")
Row = dict[str, Any]
KINDS: dict[type, str] = {str: "text", list: "list", dict: "mapping"}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def count_of(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 1,000,000, got {show(text)}")
    return int(text)


def write_rows(
    parser: Parser, arguments: Sequence[str] | None, rows_of: Callable[[argparse.Namespace], Iterable[Row]]
) -> int:
    """Write the rows that the arguments request to stdout. Return the exit status, 2 for a UserError."""
    try:
        rows = list(rows_of(parser.parse_args(arguments)))
    except UserError as error:
        print(f"{parser.prog.rpartition('.')[2]}: error: {one_line(error)}", file=sys.stderr)
        return 2
    for row in rows:
        print(json.dumps(row))
    return 0


def read_objects(path: str, lines: bool = False) -> list[Row]:
    """Read the objects of a JSON file: one object, or a list. With `lines` or the suffix .jsonl, it is JSON Lines."""
    try:
        text = read_text(path, MOST_TEXT)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {unread(error)}") from error
    rows: list[Any] = []
    for number, line in enumerate(text.split("\n") if lines or path.lower().endswith(".jsonl") else [text], start=1):
        try:
            value = json.loads(line) if line.strip() else []
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not JSON: {reason(error)}") from error
        rows += value if isinstance(value, list) else [value]
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} has {'rows that are not JSON objects' if rows else 'no rows'}")
    return rows


def held(row: Any, name: str, kind: type[T], where: str) -> T:
    """Return `row[name]`. Raises UserError if it is missing or not of type `kind` (str, list or dict)."""
    value = row.get(name) if isinstance(row, dict) else None
    if not isinstance(value, kind):
        contents = f"it has {', '.join(row) or 'nothing'}" if isinstance(row, dict) else f"it is {show(row)}"
        raise UserError(f"{where} has no {KINDS[kind]} {name!r}; {contents}")
    return value
