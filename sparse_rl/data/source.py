"""Read the rows of a dataset as its files write them, and select those that meet the conditions of the key `where`.

Python reads JSON, JSON Lines and CSV, because Arrow guesses types: it turns texts into dates and long integers into
floats, and it gives each object the keys of all others, with null. Parquet and other datasets on the hub have types; of
their objects, the keys with null are left out, because they may be absent in the source.
"""

from __future__ import annotations

import csv
import gzip
import json
import logging
import re
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import datasets
import pyarrow as pa
from datasets.features.features import register_feature

from sparse_rl.config import show
from sparse_rl.data.config import BOUNDS, LOCAL_FILES, DataConfig, file_kind
from sparse_rl.errors import UserError, listed, reason, unread

logger = logging.getLogger(__name__)
Row = dict[str, Any]
T = TypeVar("T")
MOST_LEVELS = 64  # limit for nesting in JSON
HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # the escape of one half; two halves are one character
SHOWN = 5  # values of a column in an error
GZIP = b"\x1f\x8b"  # the first bytes of a compressed file


class Number(float):
    """A number with a fraction or an exponent. Its text is the one in the file, such as 0.10 or 1e5."""

    def __new__(cls, text: str) -> Number:
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass
class Written:
    """A column of a dataset that holds each value as JSON, for values that Arrow's types would change."""

    pa_type: ClassVar[Any] = pa.large_string()
    dtype: ClassVar[str] = "large_string"
    _type: str = field(default="Written", init=False, repr=False)

    def __call__(self) -> Any:
        return self.pa_type

    def encode_example(self, value: Any) -> str:
        return str(value) if type(value) is Number else json.dumps(value, ensure_ascii=False, default=str)

    def decode_example(self, value: str | None, token_per_repo_id: Any = None) -> Any:
        return None if value is None else json.loads(value, parse_float=Number)


with warnings.catch_warnings(action="ignore"):  # the function is marked as experimental
    register_feature(Written, "Written")


def table(columns: Mapping[str, Sequence[Any]]) -> datasets.Dataset:
    """Return columns of equal length as a dataset that gives back their values exactly."""
    arrays, features = {}, {}
    for name, values in columns.items():
        array = _arrow_array(values)
        if array is None:
            written = Written()
            arrays[name] = pa.array([None if v is None else written.encode_example(v) for v in values], written.pa_type)
            features[name] = written
        else:
            arrays[name], features[name] = array, datasets.features.features.generate_from_arrow_type(array.type)
    return datasets.Dataset(pa.table(arrays, schema=datasets.Features(features).arrow_schema))


def _arrow_array(values: Sequence[Any]) -> Any:
    """Return the values in Arrow's types. None means that Arrow would change a value."""
    if all(value is None or isinstance(value, str) for value in values):
        return pa.array(values, pa.large_string())
    try:
        array = pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):  # mixed types, or an integer of more than 64 bits
        return None
    return None if any(map(_differ, array.to_pylist(), values)) else array


def _differ(value: Any, other: Any) -> bool:
    """Return True if values differ, also if only a type, the digits, a key's presence or the order of keys differs."""
    if type(other) is Number:
        return repr(value) != str(other)
    return value is not other and json.dumps(value) != json.dumps(other)


def read(config: DataConfig) -> tuple[datasets.Dataset, set[str]]:
    """Return (rows of the split that `config.path` names, columns whose values need `without_nulls`)."""
    rows, typed = _read(config)
    return rows, {name for name, feature in rows.features.items() if typed and _has_keys(feature)}


def _read(config: DataConfig) -> tuple[datasets.Dataset, bool]:
    """Return (rows, True if their source has types)."""
    assert config.path is not None
    if not config.local:
        return _hub(config, config.path)
    path = Path(config.path).expanduser()
    if not path.is_file():
        problem = "not a regular file" if path.exists() else "no such file"
        raise UserError(f"{problem}: {config.path}", "path")
    if config.subset is not None:
        logger.warning("the subset %s has no effect, because %s is a local file", config.subset, config.path)
    if file_kind(config.path) != "parquet":
        return _split({"train": [config.path]}, config), False
    try:
        return datasets.load_dataset("parquet", data_files=str(path), split=config.split), True
    except Exception as error:
        raise UserError(f"{config.path} cannot be read: {reason(error.__cause__ or error)}", "path") from error


def _hub(config: DataConfig, path: str) -> tuple[datasets.Dataset, bool]:
    if Path(path).is_file():
        raise UserError(f"{path} has none of the supported formats: {', '.join(LOCAL_FILES)}", "path")
    files: Any = None
    try:
        if config.files is None:
            loaded = datasets.load_dataset(path, config.subset, split=config.split)
        else:
            files = {config.split.partition("[")[0]: [f"hf://datasets/{path}/{file}" for file in config.files]}
            loaded = datasets.load_dataset(file_kind(config.files[0]), data_files=files, split=config.split)
        if loaded.info.builder_name not in ("json", "csv"):
            return loaded, True
        files = files or datasets.load_dataset_builder(path, config.subset).config.data_files
        if not files:
            logger.warning("%s is read offline from a cache, where dates and long numbers may have changed", path)
            return loaded, True
        return _split(datasets.DownloadManager().download(dict(files)), config), False
    except UserError:
        raise
    except Exception as error:  # not found, no network, no such subset or split
        raise UserError(f"cannot load {path!r} (split {config.split!r}): {error}", "path") from error


def _split(files: Mapping[Any, Sequence[str]], config: DataConfig) -> datasets.Dataset:
    """Return the rows of `config.split`. files : name of a split -> its JSON and CSV files"""
    named = {part.partition("[")[0].strip() for part in config.split.split("+")}
    rows = {str(k): [row for file in files[k] for row in rows_of_file(file)] for k in files if str(k) in named}
    chosen = slice_rows(rows, config)
    names = dict.fromkeys(name for row in chosen for name in row)
    if not names:
        raise UserError(f"{config.path} has no rows of split {config.split!r}", "path")
    return table({name: [row.get(name) for row in chosen] for name in names})


def slice_rows(rows: Mapping[str, list[T]], config: DataConfig) -> list[T]:
    """Return the items of `config.split`, a split or a slice of it. rows : name of a split -> its items"""
    try:
        parts = datasets.ReadInstruction.from_spec(config.split).to_absolute({name: len(rows[name]) for name in rows})
    except Exception as error:  # the slice is invalid, or the split does not exist
        named = config.path or ", ".join(config.traces or ())
        raise UserError(f"{named} has no rows of split {config.split!r}: {error}", "path") from error
    return [row for part in parts for row in rows[part.splitname][part.from_ : part.to]]


def rows_of_file(path: str) -> Iterator[Row]:
    """Yield the rows of a JSON, JSON Lines or CSV file, which may be compressed by gzip."""
    kind = csv_rows if file_kind(path) == "csv" else json_rows
    try:
        with Path(path).expanduser().open("rb") as file:
            yield from kind(gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == GZIP else file)
    except (OSError, EOFError, zlib.error, UserError) as error:
        why = unread(error) if isinstance(error, OSError) else error
        raise UserError(f"{path} cannot be read: {why}", "path") from error


def _lines(file: Iterable[bytes]) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise UserError(f"line {number} is not UTF-8; re-encode the file") from None


def csv_rows(file: Iterable[bytes]) -> Iterator[Row]:
    """Yield the rows of a CSV file with a header. A field is text; an empty field is None."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(_lines(file), strict=True)
    try:
        header = list(reader.fieldnames or [])
        if repeated := [name for name in header if header.count(name) > 1]:
            raise UserError(f"two columns are called {repeated[0]!r}; rename one")
        for row in reader:
            if None in row:
                raise UserError(f"line {reader.line_num} has more fields than the {len(header)} columns")
            yield {name: text or None for name, text in row.items()}
    except csv.Error as error:
        raise UserError(f"line {reader.reader.line_num} is not CSV: {error}") from error


def json_rows(file: Iterable[bytes]) -> Iterator[Row]:
    """Yield the rows of JSON Lines, or of JSON text that is one object or a list of objects."""
    lines, count = _lines(file), 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if not count:  # the first value may have several lines
            try:
                json.loads(line)
            except (ValueError, RecursionError):
                line += "".join(lines)
        value = _value(line.rstrip(), number)
        for row in value if isinstance(value, list) else [value]:
            count += 1
            if not isinstance(row, dict):
                raise UserError(f"row {count} is not a JSON object")
            yield row


def _value(text: str, line: int) -> Any:
    """Return the JSON value of a text that begins on this line of a file."""
    try:
        value = json.loads(text, parse_float=Number)
        if text.count("[") + text.count("{") > MOST_LEVELS and _levels(value) > MOST_LEVELS:
            raise RecursionError
        if HALF_PAIR.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except RecursionError:
        message = f": lists and objects are nested more than {MOST_LEVELS} deep"
    except UnicodeEncodeError:
        message = " has one half of a surrogate pair, such as \\ud83d, which is no character"
    except json.JSONDecodeError as error:
        message, line = f" is not JSON: {error.msg} at column {error.colno}", line + error.lineno - 1
    except ValueError as error:  # of Python's limit for integers
        message = f": {error}"
    raise UserError(f"line {line}{message}")


def _levels(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(_levels, value.values() if isinstance(value, dict) else value), default=0)


def _has_keys(feature: Any) -> bool:
    """Return True if a feature of Arrow holds objects, of which each has the keys of all others."""
    return isinstance(feature, dict) or (hasattr(feature, "feature") and _has_keys(feature.feature))


def without_nulls(value: Any) -> Any:
    """Return a value without the keys that are null, at every depth: Arrow cannot tell them from absent keys."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return list(map(without_nulls, value)) if isinstance(value, list) else value


# ---- the key `where` -------------------------------------------------------------------------------------------------


def matching_rows(source: Any, where: Mapping[str, Any]) -> list[int]:
    """Return the indices of the rows of a dataset that meet all conditions, or raise UserError if there are none."""
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
    """Return True if a row's value, which is not missing, meets a condition. A bound that is text is compared with the
    beginning of the value, so until: 2025-05-01 includes the whole day."""
    if value is None:
        return False
    if isinstance(value, date):  # also a datetime
        value = value.isoformat()
    if not isinstance(condition, Mapping):
        return any(_like(value, item) == item for item in (condition if isinstance(condition, list) else [condition]))
    lowest, highest = (condition.get(bound) for bound in BOUNDS)
    return (lowest is None or _head(value, lowest) >= lowest) and (highest is None or _head(value, highest) <= highest)


def _head(value: Any, bound: Any) -> Any:
    return value[: len(bound)] if isinstance(value, str) and isinstance(bound, str) else _like(value, bound)


def _like(value: Any, condition: Any) -> Any:
    """Return the number or the boolean that a text stands for, if the condition is one: a CSV file has only texts."""
    if not isinstance(value, str) or isinstance(condition, str):
        return value
    if isinstance(condition, bool):
        return {"true": True, "false": False}.get(value.lower(), value)
    try:
        return float(value)
    except ValueError:
        return value
