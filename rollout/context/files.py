"""Contexts as files: the kept entries of a context, in one sealed file (sparse_rl/trace/sealed.py).

tokens                                     int64 [T], token ids of the whole context
layers.N.{keys, values, bias, positions}   entries of layer N, as in LayerEntries
recorded.NAME                              trace sections of the fits, if they can be replayed
metadata                                   fitted, seconds, model (name and fingerprint) (JSON)
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import torch

from rollout.context.cache import Context, LayerEntries
from sparse_rl.errors import NotWrittenError, reason
from sparse_rl.models.identity import Identity
from sparse_rl.trace.sealed import read_sealed, write_sealed

FORMAT = "sparse_rl.context"
FORMAT_VERSION = "2"
RECORDED = "recorded."
PARTS = tuple(part.name for part in fields(LayerEntries))


def save_context(path: str | Path, context: Context) -> None:
    """Write a context to one safetensors file. Raises NotWrittenError if the file cannot be written."""
    tensors = {"tokens": torch.tensor(context.tokens)}
    for number, layer in enumerate(context.layers):
        # Cloned, because layers may share memory, which safetensors rejects.
        tensors |= {
            f"layers.{number}.{name}": x.cpu().clone().contiguous() for name, x in zip(PARTS, layer, strict=True)
        }
    tensors |= {RECORDED + name: values.clone().contiguous() for name, values in context.recorded.items()}
    texts = {"fitted": context.fitted, "seconds": context.seconds, "model": asdict(context.model)}
    metadata = {name: json.dumps(value) for name, value in texts.items()}
    try:
        write_sealed(path, tensors, format=FORMAT, format_version=FORMAT_VERSION, **metadata)
    except Exception as error:  # safetensors raises its own errors for a full disk and for a missing folder
        raise NotWrittenError(str(path), reason(error)) from error


def load_context(path: str | Path, device: str | torch.device = "cpu") -> Context:
    """Read a context that `save_context` wrote, and move its entries to `device`.

    Raises UserError if the file is missing, damaged, of another kind or of another format version.
    """
    tensors, metadata = read_sealed(path, "a compacted context", FORMAT, [FORMAT_VERSION], "compact the context")
    layers = [
        LayerEntries(*(tensors[f"layers.{number}.{name}"].to(device) for name in PARTS))
        for number in range(sum(name.startswith("layers.") for name in tensors) // len(PARTS))
    ]
    recorded = {name.removeprefix(RECORDED): x for name, x in tensors.items() if name.startswith(RECORDED)}
    fitted, seconds, model = (json.loads(metadata[name]) for name in ("fitted", "seconds", "model"))
    return Context(tensors["tokens"].tolist(), layers, fitted, seconds, recorded, Identity(**model))
