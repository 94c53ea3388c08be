"""Trace files: named sections of several sequences in one sealed file (sealed.py), and what made them.

    NAME            the values of all sequences, joined along the section's joined axis (see sections.py)
    NAME.lengths    int64 [n], the size of that axis in each sequence
    metadata        fingerprint (JSON: what made the traces, by name)

Nothing here knows a section by name but `evict_at`, which every file has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sparse_rl.errors import UserError
from sparse_rl.trace.sealed import read_sealed, shown, write_sealed
from sparse_rl.trace.sections import EVICT_AT, TraceError, declared

FORMAT = "sparse_rl.trace"
FORMAT_VERSION = 3
"""The version of trace files that is written. Version 2 is read, but for pages, whose closing was in evict_at there."""
READ = ("2", "3")
LENGTHS = ".lengths"


def write_sections(
    path: str | Path, rows: Sequence[Mapping[str, Tensor]], fingerprint: Mapping[str, str] | None
) -> None:
    """Write the sections of each sequence; all rows have the same ones."""
    tensors = {}
    for name in rows[0]:
        axis, values = declared()[name].joined_axis, [row[name] for row in rows]
        tensors[name] = torch.cat(values, dim=axis).contiguous()
        tensors[name + LENGTHS] = torch.tensor([v.shape[axis] for v in values], dtype=torch.int64)
    made_by = json.dumps(dict(fingerprint or {}))
    write_sealed(path, tensors, format=FORMAT, format_version=str(FORMAT_VERSION), fingerprint=made_by)


def read_sections(path: str | Path, fingerprint: Mapping[str, str] | None) -> list[dict[str, Tensor]]:
    """The sections of each sequence of a file; their values are not checked yet.

    Raises TraceError: not a trace file, truncated or changed, another format version, no trace, an unknown or missing
    section, wrong shapes, or a fingerprint entry that differs from the expected one.
    """
    tensors, metadata = _read(path)
    recorded = _fingerprint(path, metadata)
    for key, value in (fingerprint or {}).items():
        if recorded.get(key) != value:
            raise TraceError(f"{path} was recorded with {key} {shown(recorded.get(key))}, not {shown(value)}")
    held = {tensor.removesuffix(LENGTHS) for tensor in tensors}
    known = declared()
    if unknown := sorted(held - known.keys()):
        raise TraceError(f"{path} holds an unknown section {shown(unknown[0])}; this reads {', '.join(known)}")
    names = [name for name in known if name in held or name == EVICT_AT.name]
    for name in names:
        if missing := [tensor for tensor in (name, name + LENGTHS) if tensor not in tensors]:
            raise TraceError(f"{path} holds no {missing[0]}")
    split = {name: _split(path, name, tensors[name], tensors[name + LENGTHS]) for name in names}
    count = len(split[EVICT_AT.name])
    if not count:
        raise TraceError(f"{path} holds no trace")
    for name, values in split.items():
        if len(values) != count:
            raise TraceError(f"{path}: {name} is of {len(values)} sequences, {EVICT_AT.name} of {count}")
    return [{name: values[row].clone() for name, values in split.items()} for row in range(count)]


def read_fingerprint(path: str | Path) -> dict[str, str]:
    """What made the traces of a file, as `save_traces` was told.

    Raises TraceError: no such file, not a trace file, truncated or changed, or another format version.
    """
    return _fingerprint(path, _read(path)[1])


def _split(path: str | Path, name: str, values: Tensor, lengths: Tensor) -> Sequence[Tensor]:
    """The values of each sequence."""
    section = declared()[name]
    least = 1 if name == EVICT_AT.name else 0  # a sequence has a token; of another section it may have nothing
    if lengths.dtype != torch.int64 or lengths.ndim != 1 or bool((lengths < least).any()):
        raise TraceError(f"{path}: {name}{LENGTHS} must be int64 [n] of numbers >= {least}")
    total = sum(lengths.tolist())  # int64 could overflow
    if values.ndim != len(section.axes) or values.shape[section.joined_axis] != total:
        held = f"{total} {section.joined}s in all"
        raise TraceError(f"{path}: {name} {list(values.shape)} does not hold sequences of {held}")
    return values.split(lengths.tolist(), dim=section.joined_axis)


def _fingerprint(path: str | Path, metadata: Mapping[str, str]) -> dict[str, str]:
    try:
        fingerprint = json.loads(metadata.get("fingerprint", "{}"))
        json.dumps(fingerprint, ensure_ascii=False).encode()  # half a surrogate pair could not be shown
    except (ValueError, RecursionError):
        fingerprint = None
    if not isinstance(fingerprint, dict) or not all(isinstance(value, str) for value in fingerprint.values()):
        raise TraceError(f"{path}: its fingerprint is not a JSON mapping of texts")
    return fingerprint


def _read(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a trace file of a version that is read, as they were written."""
    try:
        tensors, metadata = read_sealed(path, "a trace file", FORMAT, READ, "sample")
    except UserError as error:
        raise TraceError(error.message) from None
    if metadata["format_version"] == "2" and "opened" in tensors:
        raise TraceError(f"{path} has pages in format version 2, which mixed their closing with evictions; sample anew")
    return tensors, metadata
