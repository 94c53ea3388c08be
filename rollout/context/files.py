"""Contexts as files: what is left of a context, in one safetensors file.

    tokens                                     int64 [T], of the whole context
    layers.N.{keys, values, bias, positions}   of layer N, as LayerEntries
    metadata                                   format, format_version, fitted, seconds (JSON), sha256 of all the rest

A file is read whole or refused: a changed bit is another hash. The hash finds damage; it is no signature.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rollout.context.cache import Context, LayerEntries
from sparse_rl.errors import NotWrittenError, UserError, one_line, reason
from sparse_rl.files import usual_permissions
from sparse_rl.trace.files import HASH, content_hash

FORMAT = "sparse_rl.context"
FORMAT_VERSION = 1
PARTS = tuple(part.name for part in fields(LayerEntries))


def save_context(path: str | Path, context: Context) -> None:
    """Write a context as one safetensors file (see the module). Raises NotWrittenError where that fails."""
    tensors = {"tokens": torch.tensor(context.tokens)}
    for number, layer in enumerate(context.layers):
        # Cloned: layers may share memory, which the library refuses.
        tensors |= {
            f"layers.{number}.{name}": x.cpu().clone().contiguous() for name, x in zip(PARTS, layer, strict=True)
        }
    said = {"fitted": json.dumps(context.fitted), "seconds": json.dumps(context.seconds)}
    metadata = {"format": FORMAT, "format_version": str(FORMAT_VERSION), **said}
    try:
        save_file(tensors, str(path), metadata={**metadata, HASH: content_hash(tensors, metadata)})
    except Exception as error:  # the library has errors of its own for a full disk and for a missing folder
        raise NotWrittenError(str(path), reason(error)) from error
    usual_permissions(path)


def load_context(path: str | Path, device: str | torch.device = "cpu") -> Context:
    """The context that `save_context` wrote, its entries on `device`.

    Raises UserError: no file, not such a file, damaged, or of another format version.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        found = content_hash(tensors, metadata)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except Exception as error:  # damage can make safetensors and torch raise anything
        why = reason(error)
        raise UserError(f"{path} cannot be read (truncated, or not a safetensors file): {why}") from error
    if metadata.get("format") != FORMAT:
        raise UserError(f"{path} is not a compacted context (format {_shown(metadata.get('format'))})")
    if (version := metadata.get("format_version")) != str(FORMAT_VERSION):
        raise UserError(f"{path} has format version {_shown(version)}, this reads {FORMAT_VERSION}")
    if metadata.get(HASH) != found:
        raise UserError(f"{path} is damaged: its content has another {HASH} than was written; compact the context anew")
    layers = [
        LayerEntries(*(tensors[f"layers.{number}.{name}"].to(device) for name in PARTS))
        for number in range(len(tensors) // len(PARTS))
    ]
    fitted, seconds = json.loads(metadata["fitted"]), json.loads(metadata["seconds"])
    return Context(tensors["tokens"].tolist(), layers, fitted, seconds)


def _shown(value: str | None) -> str:
    return one_line(repr(value), 200)
