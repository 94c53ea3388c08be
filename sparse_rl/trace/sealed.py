"""Sealed files: tensors and texts in one safetensors file, with a hash of the whole content in the metadata.

A changed file is rejected as a whole, because any changed bit changes the hash. The hash is not a signature.
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
    """Read the tensors and the metadata of a file.

    what : name of the format in error messages, such as "a trace file"
    versions : the format versions that can be read
    mend : verb in error messages for making the file again, such as "sample"

    Raises UserError if the file does not exist, has another format or version, or is truncated or changed.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        actual_hash = content_hash(tensors, metadata)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except Exception as error:  # damage can make safetensors and torch raise anything
        reason = shown(error)
        raise UserError(f"{path} cannot be read (truncated, or not a safetensors file): {reason}") from error
    if (actual_format := metadata.get("format")) != format:
        raise UserError(f"{path} is not {what} (format {shown(actual_format)}, expected {format!r})")
    if (version := metadata.get("format_version")) not in versions:
        accepted = " and ".join(versions)
        raise UserError(f"{path} has format version {shown(version)}; the supported versions: {accepted}; {mend} again")
    if HASH not in metadata:
        raise UserError(f"{path} has no {HASH}: an earlier version wrote it, and damage would not show; {mend} again")
    if metadata[HASH] != actual_hash:
        raise UserError(
            f"{path} is damaged: its content does not match the stored {HASH}; copy the file or {mend} again"
        )
    return tensors, metadata


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
