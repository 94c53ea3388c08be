"""Trace files: the trace sections of several sequences, and a fingerprint, in one sealed file (sealed.py).

For each section NAME, the file contains the tensors NAME and NAME.lengths. NAME holds the values of all sequences,
joined along the section's joined axis (sections.py). NAME.lengths is int64 [number of sequences], the size of that axis
in each sequence. The metadata hold the fingerprint, a JSON mapping that identifies model, policy and so on.
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
"""The version of trace files that this code writes. Files of version 2 can be read too, unless they have pages: in
version 2, evict_at also recorded the closing of pages."""
READ = ("2", "3")
LENGTHS = ".lengths"


def write_sections(
    path: str | Path, rows: Sequence[Mapping[str, Tensor]], fingerprint: Mapping[str, str] | None
) -> None:
    """Write the trace sections of several sequences to one file. All sequences must have the same sections."""
    tensors = {}
    for name in rows[0]:
        axis, values = declared()[name].joined_axis, [row[name] for row in rows]
        tensors[name] = torch.cat(values, dim=axis).contiguous()
        tensors[name + LENGTHS] = torch.tensor([v.shape[axis] for v in values], dtype=torch.int64)
    fingerprint_json = json.dumps(dict(fingerprint or {}))
    write_sealed(path, tensors, format=FORMAT, format_version=str(FORMAT_VERSION), fingerprint=fingerprint_json)


def read_sections(path: str | Path, fingerprint: Mapping[str, str] | None) -> list[dict[str, Tensor]]:
    """Read the sections of each sequence in a file, without checking their values.

    Raises TraceError for a file with a wrong format or wrong sections, and for an unexpected fingerprint entry.
    """
    tensors, metadata = _read(path)
    recorded = _fingerprint(path, metadata)
    for key, value in (fingerprint or {}).items():
        if recorded.get(key) != value:
            raise TraceError(f"{path} was recorded with {key} {shown(recorded.get(key))}, not {shown(value)}")
    names_in_file = {tensor.removesuffix(LENGTHS) for tensor in tensors}
    sections = declared()
    if unknown := sorted(names_in_file - sections.keys()):
        raise TraceError(f"{path} has an unknown section {shown(unknown[0])}; known sections: {', '.join(sections)}")
    names = [name for name in sections if name in names_in_file or name == EVICT_AT.name]
    for name in names:
        if missing := [tensor for tensor in (name, name + LENGTHS) if tensor not in tensors]:
            raise TraceError(f"{path} holds no {missing[0]}")
    split = {name: _split(path, name, tensors[name], tensors[name + LENGTHS]) for name in names}
    count = len(split[EVICT_AT.name])
    if not count:
        raise TraceError(f"{path} holds no trace")
    for name, values in split.items():
        if len(values) != count:
            raise TraceError(f"{path}: {name} has {len(values)} sequences, but {EVICT_AT.name} has {count}")
    return [{name: values[row].clone() for name, values in split.items()} for row in range(count)]


def read_fingerprint(path: str | Path) -> dict[str, str]:
    """Return the fingerprint that `save_traces` stored in a file.

    Raises TraceError if the file is missing, damaged or not a trace file, or has an unsupported format version.
    """
    return _fingerprint(path, _read(path)[1])


def _split(path: str | Path, name: str, values: Tensor, lengths: Tensor) -> Sequence[Tensor]:
    section = declared()[name]
    minimum = 1 if name == EVICT_AT.name else 0  # a sequence has at least one token; other sections may be empty
    if lengths.dtype != torch.int64 or lengths.ndim != 1 or bool((lengths < minimum).any()):
        raise TraceError(f"{path}: {name}{LENGTHS} must be an int64 tensor [n] of numbers >= {minimum}")
    total = sum(lengths.tolist())  # int64 could overflow
    if values.ndim != len(section.axes) or values.shape[section.joined_axis] != total:
        expected = f"{total} {section.joined}s in total"
        raise TraceError(f"{path}: {name} {list(values.shape)} does not hold sequences of {expected}")
    return values.split(lengths.tolist(), dim=section.joined_axis)


def _fingerprint(path: str | Path, metadata: Mapping[str, str]) -> dict[str, str]:
    try:
        fingerprint = json.loads(metadata.get("fingerprint", "{}"))
        json.dumps(fingerprint, ensure_ascii=False).encode()  # fails for half a surrogate pair, which cannot be printed
    except (ValueError, RecursionError):
        fingerprint = None
    if not isinstance(fingerprint, dict) or not all(isinstance(value, str) for value in fingerprint.values()):
        raise TraceError(f"{path}: the fingerprint is not a JSON mapping of strings to strings")
    return fingerprint


def _read(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        tensors, metadata = read_sealed(path, "a trace file", FORMAT, READ, "sample")
    except UserError as error:
        raise TraceError(error.message) from None
    if metadata["format_version"] == "2" and "opened" in tensors:
        raise TraceError(f"{path} has pages in format version 2, which mixed page closing with eviction; sample again")
    return tensors, metadata
