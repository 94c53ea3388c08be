"""Sealed files, and trace files, which are sealed.

A sealed file is tensors and texts in one safetensors file, with a hash of the whole content in the metadata. A changed
file is rejected as a whole, because any changed bit changes the hash. The hash is not a signature.

A trace file has the trace sections of several sequences. For each section NAME, it contains the tensors NAME and
NAME.lengths. NAME holds the values of all sequences, joined along the section's joined axis (sections.py). NAME.lengths
is int64 [number of sequences], the size of that axis in each sequence. The metadata hold the fingerprint, a JSON
mapping that identifies model, policy and so on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparse_rl.errors import UserError
from sparse_rl.files import open_tensors, usual_permissions
from sparse_rl.trace.sections import EVICT_AT, TraceError, declared

HASH = "sha256"
FORMAT = "sparse_rl.trace"
FORMAT_VERSION = 3
"""The version of trace files that this code writes. Files of version 2 can be read too, unless they have pages."""
LENGTHS = ".lengths"

# ---- sealed files ---------------------------------------------------------------------------------------------------


def content_hash(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return the sha256 of all tensors (name, dtype, shape and bytes), and of all metadata except the hash."""
    names = sorted(tensors)
    texts = {key: metadata[key] for key in sorted(metadata) if key != HASH}
    kinds = [(name, str(tensors[name].dtype), list(tensors[name].shape)) for name in names]
    digest = hashlib.sha256(json.dumps([texts, kinds]).encode())
    for name in names:
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_sealed(path: str | Path, tensors: Mapping[str, Tensor], **metadata: str) -> None:
    """Write contiguous CPU tensors that share no memory, and metadata with at least format and format_version."""
    save_file(dict(tensors), str(path), metadata={**metadata, HASH: content_hash(tensors, metadata)})
    usual_permissions(path)


def read_sealed(
    path: str | Path, what: str, format: str, versions: Sequence[str], mend: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and the metadata of a file. Raises UserError if it is missing, damaged, or of another version.

    what, mend : for error messages: name of the format ("a trace file"), and the verb for making a file ("sample")
    """
    try:
        with open_tensors(path) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        actual_hash = content_hash(tensors, metadata)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except Exception as error:  # damage can make safetensors and torch raise anything
        reason = _shown(error)
        raise UserError(f"{path} cannot be read (truncated, or not a safetensors file): {reason}") from error
    if (actual_format := metadata.get("format")) != format:
        raise UserError(f"{path} is not {what} (format {_shown(actual_format)}, expected {format!r})")
    if (version := metadata.get("format_version")) not in versions:
        wrong = f"has format version {_shown(version)}; the supported versions: {' and '.join(versions)}"
    elif HASH not in metadata:
        wrong = f"has no {HASH}: an earlier version wrote it, and damage would not show"
    elif metadata[HASH] != actual_hash:
        wrong = f"is damaged: its content does not match the stored {HASH}; copy the file"
    else:
        return tensors, metadata
    raise UserError(f"{path} {wrong}; {mend} again")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


# ---- trace files ----------------------------------------------------------------------------------------------------


def write_sections(
    path: str | Path, rows: Sequence[Mapping[str, Tensor]], fingerprint: Mapping[str, str] | None
) -> None:
    """Write the trace sections of several sequences to one file. All sequences must have the same sections."""
    tensors = {}
    for name in rows[0]:
        axis, values = declared()[name].joined_axis, [row[name] for row in rows]
        tensors[name] = torch.cat(values, dim=axis).contiguous()
        tensors[name + LENGTHS] = torch.tensor([v.shape[axis] for v in values], dtype=torch.int64)
    metadata = {"format": FORMAT, "format_version": str(FORMAT_VERSION)}
    write_sealed(path, tensors, **metadata, fingerprint=json.dumps(dict(fingerprint or {})))


def read_sections(path: str | Path, fingerprint: Mapping[str, str] | None) -> list[dict[str, Tensor]]:
    """Read the sections of each sequence in a file, without checking their values.

    Raises TraceError for a file with a wrong format or wrong sections, and for an unexpected fingerprint entry.
    """
    tensors, metadata = _read(path)
    recorded = _fingerprint(path, metadata)
    for key, value in (fingerprint or {}).items():
        if recorded.get(key) != value:
            raise TraceError(f"{path} was recorded with {key} {_shown(recorded.get(key))}, not {_shown(value)}")
    names = {EVICT_AT.name, *(tensor.removesuffix(LENGTHS) for tensor in tensors)}
    sections = declared()
    if unknown := sorted(names - sections.keys()):
        raise TraceError(f"{path} has an unknown section {_shown(unknown[0])}; known sections: {', '.join(sections)}")
    if missing := sorted({*names, *(name + LENGTHS for name in names)} - tensors.keys()):
        raise TraceError(f"{path} holds no {missing[0]}")
    split = {name: _split(path, name, tensors[name], tensors[name + LENGTHS]) for name in sections if name in names}
    count = len(split[EVICT_AT.name])
    if not count:
        raise TraceError(f"{path} holds no trace")
    for name, values in split.items():
        if len(values) != count:
            raise TraceError(f"{path}: {name} has {len(values)} sequences, but {EVICT_AT.name} has {count}")
    return [{name: values[row].clone() for name, values in split.items()} for row in range(count)]


def read_row(path: str | Path, row: int, sha256: str) -> dict[str, Tensor]:
    """Read the sections of one sequence of a file that was read whole before, without reading the other sequences.

    sha256 : the hash that the file had then (`stored_hash`). Raises TraceError if it has another one now.
    """
    try:
        with open_tensors(path) as file:
            if (file.metadata() or {}).get(HASH) != sha256:
                raise TraceError(f"{path} has changed since this run began; start again")
            stored, sections = set(file.keys()), {}
            for name in (name for name in declared() if name in stored):
                lengths, axis = file.get_tensor(name + LENGTHS).tolist(), declared()[name].joined_axis
                start = sum(lengths[:row])
                sections[name] = file.get_slice(name)[(*[slice(None)] * axis, slice(start, start + lengths[row]))]
            return sections
    except TraceError:
        raise
    except Exception as error:  # the file is gone, or damaged since
        raise TraceError(f"{path} cannot be read: {_shown(error)}") from error


def stored_hash(path: str | Path) -> str:
    """Return the hash in the metadata of a file that was read whole before."""
    with open_tensors(path) as file:
        return str(file.metadata()[HASH])


def read_fingerprint(path: str | Path) -> dict[str, str]:
    """Return the fingerprint that `save_traces` stored in a file. Raises TraceError as `load_traces` does."""
    return _fingerprint(path, _read(path)[1])


def _split(path: str | Path, name: str, values: Tensor, lengths: Tensor) -> Sequence[Tensor]:
    section = declared()[name]
    minimum = 1 if name == EVICT_AT.name else 0  # a sequence has at least one token; other sections may be empty
    if lengths.dtype != torch.int64 or lengths.ndim != 1 or bool((lengths < minimum).any()):
        raise TraceError(f"{path}: {name}{LENGTHS} must be an int64 tensor [n] of numbers >= {minimum}")
    total = sum(lengths.tolist())  # int64 could overflow
    if values.ndim != len(section.axes) or values.shape[section.joined_axis] != total:
        raise TraceError(f"{path}: {name} {list(values.shape)} does not hold {total} {section.joined}s in total")
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
        tensors, metadata = read_sealed(path, "a trace file", FORMAT, ("2", str(FORMAT_VERSION)), "sample")
    except UserError as error:
        raise TraceError(error.message) from None
    if metadata["format_version"] == "2" and "opened" in tensors:
        raise TraceError(f"{path} has pages in format version 2, which mixed page closing with eviction; sample again")
    return tensors, metadata
