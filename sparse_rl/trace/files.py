"""Trace files: named sections of several sequences in one safetensors file, and what made them.

    NAME            the values of all sequences, joined along the section's joined axis (see sections.py)
    NAME.lengths    int64 [n], the size of that axis in each sequence
    metadata        format, format_version, fingerprint (JSON: what made the traces, by name), sha256 of all the rest

A file is read whole or refused: a changed bit is another hash. The hash finds damage; it is no signature.

Nothing here knows a section by name but `evict_at`, which every file has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sparse_rl.files import usual_permissions
from sparse_rl.trace.sections import EVICT_AT, SECTIONS, TraceError

FORMAT = "sparse_rl.trace"
FORMAT_VERSION = 3
"""The version of trace files that is written. Version 2 is read, but for pages, whose closing was in evict_at there."""
READ = ("2", "3")
LENGTHS = ".lengths"
HASH = "sha256"


def write_sections(
    path: str | Path, rows: Sequence[Mapping[str, torch.Tensor]], fingerprint: Mapping[str, str] | None
) -> None:
    """Write the sections of each sequence; all rows have the same ones."""
    tensors = {}
    for name in rows[0]:
        axis, values = SECTIONS[name].joined_axis, [row[name] for row in rows]
        tensors[name] = torch.cat(values, dim=axis).contiguous()
        tensors[name + LENGTHS] = torch.tensor([v.shape[axis] for v in values], dtype=torch.int64)
    metadata = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "fingerprint": json.dumps(dict(fingerprint or {})),
    }
    save_file(tensors, str(path), metadata={**metadata, HASH: content_hash(tensors, metadata)})
    usual_permissions(path)


def content_hash(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """sha256 of what a file holds: of each tensor its name, dtype, shape and bytes, and all metadata but the hash."""
    names = sorted(tensors)
    said = {key: metadata[key] for key in sorted(metadata) if key != HASH}
    kinds = [(name, str(tensors[name].dtype), list(tensors[name].shape)) for name in names]
    digest = hashlib.sha256(json.dumps([said, kinds]).encode())
    for name in names:
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_sections(path: str | Path, fingerprint: Mapping[str, str] | None) -> list[dict[str, torch.Tensor]]:
    """The sections of each sequence of a file; their values are not checked yet.

    Raises TraceError: not a trace file, truncated or changed, another format version, no trace, an unknown or missing
    section, wrong shapes, or a fingerprint entry that differs from the expected one.
    """
    tensors, metadata = _read(path)
    recorded = _fingerprint(path, metadata)
    for key, value in (fingerprint or {}).items():
        if recorded.get(key) != value:
            raise TraceError(f"{path} was recorded with {key} {_shown(recorded.get(key))}, not {_shown(value)}")
    held = {tensor.removesuffix(LENGTHS) for tensor in tensors}
    if unknown := sorted(held - SECTIONS.keys()):
        raise TraceError(f"{path} holds an unknown section {_shown(unknown[0])}; this reads {', '.join(SECTIONS)}")
    names = [name for name in SECTIONS if name in held or name == EVICT_AT.name]
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


def _split(path: str | Path, name: str, values: torch.Tensor, lengths: torch.Tensor) -> Sequence[torch.Tensor]:
    """The values of each sequence."""
    section = SECTIONS[name]
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


def _read(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors, metadata) of a trace file of this version, as they were written."""
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        found = content_hash(tensors, metadata)
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist") from None
    except Exception as error:  # damage can make safetensors and torch raise anything
        raise TraceError(f"{path} cannot be read (truncated, or not a safetensors file): {_shown(error)}") from None
    if metadata.get("format") != FORMAT:
        raise TraceError(f"{path} is not a trace file (format {_shown(metadata.get('format'))}, expected {FORMAT!r})")
    if (version := metadata.get("format_version")) not in READ:
        raise TraceError(f"{path} has format version {_shown(version)}, this reads {' and '.join(READ)}")
    if version == "2" and "opened" in tensors:
        raise TraceError(f"{path} has pages in format version 2, which mixed their closing with evictions; sample anew")
    if HASH not in metadata:
        raise TraceError(f"{path} has no {HASH}: an earlier version wrote it, and damage would not show; sample anew")
    if metadata[HASH] != found:
        raise TraceError(f"{path} is damaged: its content has another {HASH} than was written; copy or sample anew")
    return tensors, metadata


def _shown(value: Any) -> str:
    """What a file says, in an error: as Python writes it, and no more than a line of it."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
