"""The key `where` of a dataset selects rows by the values of columns.

where: {ability: code, difficulty: [easy, medium], contest_date: {from: 2024-08-01, until: 2025-02-01}}
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any

from sparse_rl.config import show
from sparse_rl.data.config import BOUNDS
from sparse_rl.errors import UserError, listed

SHOWN = 5  # values of a column in an error


def matching_rows(source: Any, where: Mapping[str, Any]) -> list[int]:
    """Return the indices of the rows of a dataset that meet all conditions.

    Raises UserError for an unknown column, for a bound that cannot be compared, and if no row is left.
    """
    rows = list(range(len(source)))
    for column, condition in where.items():
        if column not in source.column_names:
            raise UserError(f"no such column; the source has {listed(source.column_names, column)}", f"where.{column}")
        values = source[column][:]
        try:
            kept = [row for row in rows if meets(values[row], condition)]
        except TypeError:
            value = next(values[row] for row in rows if values[row] is not None)
            raise UserError(f"{show(condition)} cannot be compared with {show(value)}", f"where.{column}") from None
        if not kept:
            present = list(dict.fromkeys(show(values[row]) for row in rows))
            more = ", ..." if len(present) > SHOWN else ""
            raise UserError(f"no row is left; the values are {', '.join(present[:SHOWN])}{more}", f"where.{column}")
        rows = kept
    return rows


def meets(value: Any, condition: Any) -> bool:
    """Return True if a row's value meets a condition. A missing value meets no condition.

    A bound that is text is compared with the beginning of the value, so until: 2025-05-01 includes the whole day.
    """
    if value is None:
        return False
    if isinstance(value, date):  # also a datetime
        value = value.isoformat()
    if not isinstance(condition, Mapping):
        return value in (condition if isinstance(condition, list) else [condition])
    lowest, highest = (condition.get(bound) for bound in BOUNDS)
    return (lowest is None or _head(value, lowest) >= lowest) and (highest is None or _head(value, highest) <= highest)


def _head(value: Any, bound: Any) -> Any:
    return value[: len(bound)] if isinstance(value, str) and isinstance(bound, str) else value
