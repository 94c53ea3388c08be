"""Sealed files: tensors and some texts in one safetensors file, with a hash of all of it.

A file is read whole or refused: a changed bit is another hash. The hash finds damage; it is no signature. The metadata
of a file are format, format_version, texts of its own, and the hash.
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
from torch import Tensor

from sparse_rl.errors import UserError
from sparse_rl.files import usual_permissions

HASH = "sha256"


def content_hash(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """sha256 of what a file holds: of each tensor its name, dtype, shape and bytes, and all metadata but the hash."""
    names = sorted(tensors)
    said = {key: metadata[key] for key in sorted(metadata) if key != HASH}
    kinds = [(name, str(tensors[name].dtype), list(tensors[name].shape)) for name in names]
    digest = hashlib.sha256(json.dumps([said, kinds]).encode())
    for name in names:
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_sealed(path: str | Path, tensors: Mapping[str, Tensor], **metadata: str) -> None:
    """Write contiguous tensors on the CPU, none of which shares memory. metadata : format, format_version, and more"""
    save_file(dict(tensors), str(path), metadata={**metadata, HASH: content_hash(tensors, metadata)})
    usual_permissions(path)


def read_sealed(
    path: str | Path, what: str, format: str, versions: Sequence[str], mend: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file, as they were written.

    what : a file of this format, for errors; versions : those that are read; mend : what to do with a damaged file

    Raises UserError: no file, none of this format, truncated or changed, or of another version.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        found = content_hash(tensors, metadata)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except Exception as error:  # damage can make safetensors and torch raise anything
        why = shown(error)
        raise UserError(f"{path} cannot be read (truncated, or not a safetensors file): {why}") from error
    if (other := metadata.get("format")) != format:
        raise UserError(f"{path} is not {what} (format {shown(other)}, expected {format!r})")
    if (version := metadata.get("format_version")) not in versions:
        raise UserError(f"{path} has format version {shown(version)}, this reads {' and '.join(versions)}")
    if HASH not in metadata:
        raise UserError(f"{path} has no {HASH}: an earlier version wrote it, and damage would not show; {mend} anew")
    if metadata[HASH] != found:
        raise UserError(f"{path} is damaged: its content has another {HASH} than was written; copy or {mend} anew")
    return tensors, metadata


def shown(value: Any) -> str:
    """What a file says, in an error: as Python writes it, and no more than a line of it."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
