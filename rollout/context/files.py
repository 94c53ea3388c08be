"""Contexts as files: what is left of a context, in one sealed file (sparse_rl/trace/sealed.py).

tokens                                     int64 [T], of the whole context
layers.N.{keys, values, bias, positions}   of layer N, as LayerEntries
metadata                                   fitted, seconds (JSON)
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import torch

from rollout.context.cache import Context, LayerEntries
from sparse_rl.errors import NotWrittenError, reason
from sparse_rl.trace.sealed import read_sealed, write_sealed

FORMAT = "sparse_rl.context"
FORMAT_VERSION = "1"
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
    try:
        write_sealed(path, tensors, format=FORMAT, format_version=FORMAT_VERSION, **said)
    except Exception as error:  # the library has errors of its own for a full disk and for a missing folder
        raise NotWrittenError(str(path), reason(error)) from error


def load_context(path: str | Path, device: str | torch.device = "cpu") -> Context:
    """The context that `save_context` wrote, its entries on `device`.

    Raises UserError: no file, not such a file, damaged, or of another format version.
    """
    tensors, said = read_sealed(path, "a compacted context", FORMAT, [FORMAT_VERSION], "compact the context")
    layers = [
        LayerEntries(*(tensors[f"layers.{number}.{name}"].to(device) for name in PARTS))
        for number in range(len(tensors) // len(PARTS))
    ]
    return Context(tensors["tokens"].tolist(), layers, json.loads(said["fitted"]), json.loads(said["seconds"]))
