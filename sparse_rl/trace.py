"""EvictionTrace: everything that a sampler did to the cache of one sequence.

Eviction is monotone (a token that has left the cache never returns), so one integer per layer, kv head and token
says it all:

    evict_at[l, h, t] = the first query position that no longer attends to token t   (NEVER if there is none)
    query q sees token t   <=>   t <= q < evict_at[l, h, t]

Positions are logical (index in prompt + completion). This file knows tensors and files; it knows neither policies
nor engines nor attention.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

NEVER = 2**30
FORMAT = "sparse_rl.trace"
FORMAT_VERSION = 1
SECTIONS = ("evict_at", "lengths")


class TraceError(ValueError):
    """A trace or trace file that breaks the contract: what is wrong, and where."""


@dataclass(frozen=True, eq=False)
class EvictionTrace:
    """The evictions of one sequence of S = prompt + completion tokens.

    Attributes
    ----------
    evict_at : int32 tensor [L, Hkv, S] in host memory
        NEVER (2**30) where the token is never evicted. Values >= S - 1 cannot be observed (the last token is sampled
        but never fed) and are stored as NEVER.
    validate : bool
        False skips the checks (tests build deliberately wrong traces with it).

    Raises
    ------
    TraceError
        Wrong dtype or rank, or evict_at[l, h, t] <= t (a token always sees itself).
    """

    evict_at: torch.Tensor
    validate: bool = field(default=True, repr=False)

    def __post_init__(self) -> None:
        if not self.validate:
            return
        ev = self.evict_at
        if ev.ndim != 3 or ev.dtype != torch.int32:
            raise TraceError(f"evict_at must be int32 [layers, kv_heads, length], got {ev.dtype} {list(ev.shape)}")
        early = ev <= torch.arange(ev.shape[-1], dtype=torch.int32)
        if bool(early.any()):
            layer, head, t = (int(i) for i in early.nonzero()[0])
            value = int(ev[layer, head, t])
            raise TraceError(f"evict_at[{layer}, {head}, {t}] = {value}: a token is evicted after its own position")

    @classmethod
    def recorded(cls, evict_at: torch.Tensor) -> EvictionTrace:
        """A trace from an engine's record [L, Hkv, S]: to int32 in host memory, unobservable values to NEVER."""
        evict_at = evict_at.to("cpu", torch.int32)
        return cls(evict_at.masked_fill(evict_at >= evict_at.shape[-1] - 1, NEVER))

    @classmethod
    def dense(cls, layers: int, kv_heads: int, length: int) -> EvictionTrace:
        """The trace of a full cache: nothing is ever evicted."""
        return cls(torch.full((layers, kv_heads, length), NEVER, dtype=torch.int32))

    @classmethod
    def from_events(cls, layers: int, kv_heads: int, length: int, events: torch.Tensor) -> EvictionTrace:
        """A trace from int64 events [E, 4] of (layer, kv_head, token, evict_at)."""
        evict_at = torch.full((layers, kv_heads, length), NEVER, dtype=torch.int32)
        layer, head, token, at = events.unbind(1)
        for name, index, size in (("layer", layer, layers), ("kv_head", head, kv_heads), ("token", token, length)):
            if bool(((index < 0) | (index >= size)).any()):
                raise TraceError(f"an event names {name} {int(index[(index < 0) | (index >= size)][0])} of {size}")
        evict_at[layer, head, token] = at.to(torch.int32)
        return cls.recorded(evict_at)

    def to_events(self) -> torch.Tensor:
        """The evictions as int64 [E, 4] of (layer, kv_head, token, evict_at), in that order."""
        index = (self.evict_at < NEVER).nonzero()
        at = self.evict_at[index[:, 0], index[:, 1], index[:, 2]]
        return torch.cat([index, at[:, None].long()], dim=1)

    @property
    def layers(self) -> int:
        return self.evict_at.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.evict_at.shape[1]

    def __len__(self) -> int:
        return self.evict_at.shape[2]

    def layer(self, index: int) -> torch.Tensor:
        """evict_at of one layer, int32 [Hkv, S]."""
        return self.evict_at[index]

    def visible(self, layer: int) -> torch.Tensor:
        """Which query sees which token: bool [Hkv, S (query), S (token)]."""
        position = torch.arange(len(self))
        causal = position[None, :] <= position[:, None]
        return causal & (position[:, None] < self.evict_at[layer][:, None, :])

    # ---- statistics ---------------------------------------------------------------------------------------------

    def kept_counts(self, query: int | None = None) -> torch.Tensor:
        """Tokens that a query (default: the last one fed, S - 2) attends to: int64 [L, Hkv]."""
        query = max(len(self) - 2, 0) if query is None else query
        return (self.evict_at[..., : query + 1] > query).sum(-1)

    def retention(self) -> float:
        """Cache length / sequence length at the end of the sequence, averaged over layers and heads (G-KV)."""
        return float(self.kept_counts().float().mean()) / max(len(self) - 1, 1)

    def density(self, bins: int = 20) -> torch.Tensor:
        """Share of the tokens still held at the end, by relative position in the sequence: float [bins]."""
        fed = max(len(self) - 1, 1)
        held = (self.evict_at[..., :fed] >= fed).float().mean(dim=(0, 1))
        which = torch.arange(fed) * bins // fed
        total = torch.zeros(bins).index_add_(0, which, held)
        return total / torch.zeros(bins).index_add_(0, which, torch.ones(fed)).clamp(min=1)

    # ---- files --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, fingerprint: Mapping[str, str] | None = None) -> None:
        """Write one trace; see `save_traces`."""
        save_traces(path, [self], fingerprint)

    @classmethod
    def load(cls, path: str | Path, fingerprint: Mapping[str, str] | None = None) -> EvictionTrace:
        """Read a file that holds one trace; see `load_traces`."""
        traces = load_traces(path, fingerprint)
        if len(traces) != 1:
            raise TraceError(f"{path} holds {len(traces)} traces; read it with load_traces")
        return traces[0]


def batch_traces(traces: Sequence[EvictionTrace], starts: Sequence[int], width: int) -> torch.Tensor:
    """Ragged traces as one padded batch.

    Row b puts its trace at columns starts[b] .. starts[b] + S_b - 1 of `width` columns: all starts 0 is right
    padding, width - S_b is left padding. A shifted row's values shift with it; pad keys get 0 (nobody sees them).

    Returns
    -------
    int32 [L, B, Hkv, width], layers first, so that one layer's slice is contiguous.
    """
    layers, kv_heads = _common_shape(traces)
    batch = torch.zeros(layers, len(traces), kv_heads, width, dtype=torch.int32)
    for row, (trace, start) in enumerate(zip(traces, starts, strict=True)):
        if start < 0 or start + len(trace) > width:
            raise TraceError(f"row {row}: {len(trace)} tokens from column {start} do not fit {width} columns")
        shifted = torch.where(trace.evict_at < NEVER, trace.evict_at + start, NEVER)
        batch[:, row, :, start : start + len(trace)] = shifted
    return batch


def pack_traces(traces: Sequence[EvictionTrace], across_documents: bool = False) -> EvictionTrace:
    """Documents packed one after another into one sequence: their traces as one.

    A document's end caps evict_at, so that the next document does not see it (unless `across_documents`).
    """
    _common_shape(traces)
    parts, start = [], 0
    for trace in traces:
        end = start + len(trace)
        cap = NEVER if across_documents else end
        parts.append(torch.where(trace.evict_at < NEVER, trace.evict_at + start, NEVER).clamp(max=cap))
        start = end
    return EvictionTrace(torch.cat(parts, dim=-1).to(torch.int32))


def save_traces(
    path: str | Path, traces: Sequence[EvictionTrace], fingerprint: Mapping[str, str] | None = None
) -> None:
    """Write traces as named safetensors sections: `evict_at` [L, Hkv, sum of S] and `lengths` [n].

    `fingerprint` says what made them, e.g. {"model": ..., "policy": ...}; it is stored and can be checked on load.
    """
    if not traces:
        raise TraceError(f"{path}: no trace to save")
    _common_shape(traces)
    sections = {
        "evict_at": torch.cat([t.evict_at for t in traces], dim=-1).contiguous(),
        "lengths": torch.tensor([len(t) for t in traces], dtype=torch.int64),
    }
    metadata = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "fingerprint": json.dumps(dict(fingerprint or {})),
    }
    save_file(sections, str(path), metadata=metadata)


def load_traces(path: str | Path, fingerprint: Mapping[str, str] | None = None) -> list[EvictionTrace]:
    """Read and check a file of traces.

    Raises
    ------
    TraceError
        Not a trace file, truncated, another format version, an unknown or missing section, wrong shapes, a value
        that no eviction can have, or a fingerprint entry that differs from the expected one.
    """
    sections, metadata = _read(path)
    if metadata.get("format") != FORMAT:
        raise TraceError(f"{path} is not a trace file (format {metadata.get('format')!r}, expected {FORMAT!r})")
    if metadata.get("format_version") != str(FORMAT_VERSION):
        raise TraceError(f"{path} has format version {metadata.get('format_version')}, this reads {FORMAT_VERSION}")
    if set(sections) != set(SECTIONS):
        raise TraceError(f"{path} has the sections {sorted(sections)}, expected {sorted(SECTIONS)}")
    found = _fingerprint(path, metadata)
    for key, value in (fingerprint or {}).items():
        if found.get(key) != value:
            raise TraceError(f"{path} was recorded with {key} {found.get(key)!r}, not {value!r}")
    evict_at = sections["evict_at"]
    if (
        sections["lengths"].dtype != torch.int64
        or sections["lengths"].ndim != 1
        or bool((sections["lengths"] < 1).any())
    ):
        raise TraceError(f"{path}: lengths must be int64 [n] of positive numbers")
    lengths = sections["lengths"].tolist()
    if evict_at.ndim != 3 or evict_at.shape[-1] != sum(lengths):
        raise TraceError(
            f"{path}: evict_at {list(evict_at.shape)} does not hold sequences of {sum(lengths)} tokens in all"
        )
    try:
        return [EvictionTrace(part.clone()) for part in evict_at.split(lengths, dim=-1)]
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def read_fingerprint(path: str | Path) -> dict[str, str]:
    """What made the traces of a file."""
    metadata = _read(path)[1]
    if metadata.get("format") != FORMAT:
        raise TraceError(f"{path} is not a trace file (format {metadata.get('format')!r}, expected {FORMAT!r})")
    return _fingerprint(path, metadata)


def _fingerprint(path: str | Path, metadata: Mapping[str, str]) -> dict[str, str]:
    try:
        found = json.loads(metadata.get("fingerprint", "{}"))
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise TraceError(f"{path}: its fingerprint is not a JSON mapping")
    return found


def _common_shape(traces: Sequence[EvictionTrace]) -> tuple[int, int]:
    """(layers, kv heads) that all traces share. Raises TraceError where they differ, or where there is none."""
    if not traces:
        raise TraceError("no trace given")
    shapes = [(t.layers, t.kv_heads) for t in traces]
    for row, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise TraceError(
                f"trace {row} has {shape[0]} layers x {shape[1]} kv heads, trace 0 {shapes[0][0]} x {shapes[0][1]}"
            )
    return shapes[0]


def _read(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise TraceError(f"{path} cannot be read (truncated, or not a safetensors file): {error}") from None
