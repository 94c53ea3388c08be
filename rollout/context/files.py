"""Contexts as files: the kept entries of a context, in one sealed file (sparse_rl/trace/sealed.py).

tokens                                     int64 [T], token ids of the whole context
layers.N.{keys, values, bias, positions}   entries of the N-th layer without a sliding window, as in LayerEntries
windows.N.{keys, values}                   tokens of layer N, which has a sliding window, as in WindowCache
recorded.NAME                              trace sections of the fits, if they can be replayed
metadata                                   fitted, seconds, model (name and fingerprint), windows (JSON)

Version 2 of the format has no sliding windows. Contexts without them are still written in it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import torch

from rollout.context.cache import Context, LayerEntries
from sparse_rl.attention.windows.cache import WindowCache
from sparse_rl.errors import NotWrittenError, reason
from sparse_rl.models.identity import Identity
from sparse_rl.trace.sealed import read_sealed, write_sealed

FORMAT = "sparse_rl.context"
FORMAT_VERSION, WITHOUT_WINDOWS = "3", "2"
RECORDED, WINDOWS = "recorded.", "windows."
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
    version = WITHOUT_WINDOWS
    if context.of_windows is not None:
        version, texts["windows"] = FORMAT_VERSION, context.of_windows.sizes
        for number, pair in context.of_windows.layers.items():
            names = (f"{WINDOWS}{number}.{name}" for name in ("keys", "values"))
            tensors |= {name: x.cpu().clone().contiguous() for name, x in zip(names, pair, strict=True)}
    metadata = {name: json.dumps(value) for name, value in texts.items()}
    try:
        write_sealed(path, tensors, format=FORMAT, format_version=version, **metadata)
    except Exception as error:  # safetensors raises its own errors for a full disk and for a missing folder
        raise NotWrittenError(str(path), reason(error)) from error


def load_context(path: str | Path, device: str | torch.device = "cpu") -> Context:
    """Read a context that `save_context` wrote, and move its entries to `device`.

    Raises UserError if the file is missing, damaged, of another kind or of another format version.
    """
    versions = [WITHOUT_WINDOWS, FORMAT_VERSION]
    tensors, metadata = read_sealed(path, "a compacted context", FORMAT, versions, "compact the context")
    layers = [
        LayerEntries(*(tensors[f"layers.{number}.{name}"].to(device) for name in PARTS))
        for number in range(sum(name.startswith("layers.") for name in tensors) // len(PARTS))
    ]
    recorded = {name.removeprefix(RECORDED): x for name, x in tensors.items() if name.startswith(RECORDED)}
    fitted, seconds, model = (json.loads(metadata[name]) for name in ("fitted", "seconds", "model"))
    tokens, of_windows = tensors["tokens"].tolist(), None
    if "windows" in metadata:
        of_windows = WindowCache(json.loads(metadata["windows"]))
        of_windows.seen = [len(tokens)]
        of_windows.layers = {
            number: (tensors[f"{WINDOWS}{number}.keys"].to(device), tensors[f"{WINDOWS}{number}.values"].to(device))
            for number, size in enumerate(of_windows.sizes)
            if size
        }
    return Context(tokens, layers, fitted, seconds, recorded, Identity(**model), of_windows)
