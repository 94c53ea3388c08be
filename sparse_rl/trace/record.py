"""EvictionTrace: everything that a sampler did to the cache of one sequence, and several of them together.

Eviction is monotone (a token that has left the cache never returns), so one integer per layer, kv head and token
says it all:

    evict_at[l, h, t] = the first query position that no longer attends to token t   (NEVER if there is none)
    query q sees token t   <=>   t <= q < evict_at[l, h, t]

A sampler that does more than evict records it in further sections (sections.py). Positions are logical (index in
prompt + completion).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from sparse_rl.trace.files import read_sections, write_sections
from sparse_rl.trace.sections import EVICT_AT, NEVER, TraceError, declared


@dataclass(frozen=True, eq=False)
class EvictionTrace:
    """The cache of one sequence of S = prompt + completion tokens.

    evict_at : int32 [L, Hkv, S], in host memory; NEVER (2**30) where the token is never evicted. Values >= S - 1 cannot
        be observed (the last token is sampled but never fed) and are stored as NEVER.
    further : by name, the sections beside evict_at, in host memory; each is declared (sections.py)
    validate : False skips the checks (tests build deliberately wrong traces with it)

    Raises TraceError: a section that is not declared, of a wrong dtype or shape, or without another that belongs to it;
    or values that no sampler can have recorded, such as evict_at[l, h, t] <= t (a token always sees itself). See
    checks.py.
    """

    evict_at: Tensor
    further: Mapping[str, Tensor] = field(default_factory=dict)
    validate: bool = field(default=True, repr=False)

    def __post_init__(self) -> None:
        self.check()

    def check(self, prompt: int | None = None) -> None:
        """Raise TraceError where a section has values that no sampler can have recorded (checks.py).

        prompt : tokens of the prompt, where they are known; nothing was refitted, paged or opened before its end

        It was done when the trace was made. It is done again before each replay, since tensors can be written to.
        """
        if self.validate:
            _check(self.sections, prompt)

    @property
    def sections(self) -> dict[str, Tensor]:
        """All sections by name, evict_at first."""
        return {EVICT_AT.name: self.evict_at, **self.further}

    def to_state(self) -> dict[str, Tensor]:
        """The trace as plain data, for checkpoints: its sections, which `torch.load` reads with weights_only."""
        return self.sections

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> EvictionTrace:
        """The trace of `to_state`.

        state : the sections by name, evict_at int32 [L, Hkv, S] among them

        Raises TraceError, as the constructor does, and where there is no evict_at.
        """
        if EVICT_AT.name not in state:
            raise TraceError(f"a trace without {EVICT_AT.name}: it has {', '.join(state) or 'nothing'}")
        further = {name: values for name, values in state.items() if name != EVICT_AT.name}
        return cls(state[EVICT_AT.name], further)

    @classmethod
    def recorded(cls, evict_at: Tensor, further: Mapping[str, Tensor] | None = None) -> EvictionTrace:
        """The trace of what an engine has recorded.

        evict_at : whole numbers [L, Hkv, S] on any device; they become int32 in host memory, and those that cannot be
            observed (>= S - 1) NEVER
        further : the other sections by name, as they are declared (sections.py), in host memory

        Raises TraceError as the constructor does.
        """
        evict_at = evict_at.to("cpu", torch.int32)
        return cls(evict_at.masked_fill(evict_at >= evict_at.shape[-1] - 1, NEVER), further or {})

    @classmethod
    def dense(cls, layers: int, kv_heads: int, length: int) -> EvictionTrace:
        """The trace of a full cache, [layers, kv_heads, length]: nothing is ever evicted."""
        return cls(torch.full((layers, kv_heads, length), NEVER, dtype=torch.int32))

    def dense_like(self) -> EvictionTrace:
        """The trace that a full cache would have left of this sequence."""
        return EvictionTrace.dense(*self.shape)

    @classmethod
    def from_events(cls, layers: int, kv_heads: int, length: int, events: Tensor) -> EvictionTrace:
        """The trace [layers, kv_heads, length] of some evictions; what no event names is NEVER evicted.

        events : int64 [E, 4] of (layer, kv_head, token, evict_at)

        Raises TraceError where an event names a layer, kv head or token that there is not, or as the constructor does.
        """
        evict_at = torch.full((layers, kv_heads, length), NEVER, dtype=torch.int32)
        layer, head, token, at = events.unbind(1)
        for name, index, size in (("layer", layer, layers), ("kv_head", head, kv_heads), ("token", token, length)):
            if bool(((index < 0) | (index >= size)).any()):
                raise TraceError(f"an event names {name} {int(index[(index < 0) | (index >= size)][0])} of {size}")
        evict_at[layer, head, token] = at.to(torch.int32)
        return cls.recorded(evict_at)

    def to_events(self) -> Tensor:
        """The evictions as int64 [E, 4] of (layer, kv_head, token, evict_at), in that order."""
        index = (self.evict_at < NEVER).nonzero()
        at = self.evict_at[index[:, 0], index[:, 1], index[:, 2]]
        return torch.cat([index, at[:, None].long()], dim=1)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(L, Hkv, S): layers, kv heads, and tokens of prompt and completion."""
        return self.layers, self.kv_heads, len(self)

    @property
    def layers(self) -> int:
        """L, the model's layers."""
        return self.evict_at.shape[0]

    @property
    def kv_heads(self) -> int:
        """Hkv, the kv heads of a layer."""
        return self.evict_at.shape[1]

    def __len__(self) -> int:
        return self.evict_at.shape[2]

    def layer(self, index: int) -> Tensor:
        """evict_at of one layer, int32 [Hkv, S]."""
        return self.evict_at[index]

    def visible(self, layer: int) -> Tensor:
        """Which query sees which token: bool [Hkv, S (query), S (token)]."""
        position = torch.arange(len(self))
        causal = position[None, :] <= position[:, None]
        return causal & (position[:, None] < self.evict_at[layer][:, None, :])

    # ---- statistics ---------------------------------------------------------------------------------------------

    def kept_counts(self, query: int | None = None) -> Tensor:
        """Tokens that are held as a query (default: the last one fed, S - 2) attends: int64 [L, Hkv]."""
        query = max(len(self) - 2, 0) if query is None else query
        return (self.evict_at[..., : query + 1] > query).sum(-1)

    def peak_counts(self, prompt: int) -> Tensor:
        """The most entries that are held as a query of decoding attends: int64 [L, Hkv].

        prompt : tokens of the prompt; the queries behind it count
        """
        fed = len(self) - 1
        if fed <= prompt:
            return torch.zeros(self.shape[:2], dtype=torch.long)
        gone_at = self.evict_at[..., :fed].long().clamp(max=fed)
        gone = torch.zeros(*self.shape[:2], fed + 1, dtype=torch.long).scatter_add_(
            -1, gone_at, torch.ones_like(gone_at)
        )
        held = torch.arange(1, fed + 1) - gone[..., :fed].cumsum(-1)  # by query
        return held[..., prompt:].amax(-1)

    def retention(self) -> float:
        """Entries held / tokens fed at the end of the sequence, averaged over layers and kv heads (G-KV): 0 to 1."""
        return float(self.kept_counts().float().mean()) / max(len(self) - 1, 1)

    def density(self, bins: int = 20, layer: int | None = None) -> Tensor:
        """Share of the tokens still held at the end, by relative position in the sequence: float32 [bins].

        layer : that layer alone; None: the mean over all
        """
        fed = max(len(self) - 1, 1)
        evict_at = self.evict_at if layer is None else self.evict_at[layer : layer + 1]
        held = (evict_at[..., :fed] >= fed).float().mean(dim=(0, 1))
        which = torch.arange(fed) * bins // fed
        total = torch.zeros(bins).index_add_(0, which, held)
        return total / torch.zeros(bins).index_add_(0, which, torch.ones(fed)).clamp(min=1)

    # ---- files --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, fingerprint: Mapping[str, str] | None = None) -> None:
        """Write a file that holds this trace alone; see `save_traces`."""
        save_traces(path, [self], fingerprint)

    @classmethod
    def load(cls, path: str | Path, fingerprint: Mapping[str, str] | None = None) -> EvictionTrace:
        """Read a file that holds one trace; see `load_traces`. Raises TraceError as that does, and for several."""
        traces = load_traces(path, fingerprint)
        if len(traces) != 1:
            raise TraceError(f"{path} holds {len(traces)} traces; read it with load_traces")
        return traces[0]


def batch_traces(traces: Sequence[EvictionTrace], starts: Sequence[int], width: int) -> dict[str, Tensor]:
    """B ragged traces as one padded batch: each of their sections by name. evict_at is int32 [L, B, Hkv, width].

    Row b puts its trace at columns starts[b] .. starts[b] + S_b - 1 of `width` columns: all starts 0 is right
    padding, width - S_b is left padding. What a section says of positions shifts with its row; a padding column has
    evict_at 0, so that nobody sees it. Layers come first, so that the slice of one layer is contiguous.

    Raises TraceError where the traces do not go together (other sections, layers or kv heads), do not fit the columns,
    were sampled under different settings, or are none; and where `EvictionTrace.check` does.
    """
    names = _common_sections(traces)
    for row, (trace, start) in enumerate(zip(traces, starts, strict=True)):
        trace.check()
        if start < 0 or start + len(trace) > width:
            raise TraceError(f"row {row}: {len(trace)} tokens from column {start} do not fit {width} columns")
    known = declared()
    return {name: known[name].batch([t.sections[name] for t in traces], starts, width) for name in names}


def pack_traces(traces: Sequence[EvictionTrace]) -> EvictionTrace:
    """The trace of documents that are packed one after another into one sequence, in which none sees another.

    evict_at is int32 [L, Hkv, sum of the lengths], capped at the end of each document. Raises TraceError where the
    traces do not go together, or are several with another section than evict_at; and where `EvictionTrace.check` does.
    """
    names = _common_sections(traces)
    for trace in traces:
        trace.check()
    ends = list(accumulate(len(trace) for trace in traces))
    starts = [end - len(trace) for end, trace in zip(ends, traces, strict=True)]
    known = declared()
    packed = {name: known[name].pack([t.sections[name] for t in traces], starts, ends) for name in names}
    return EvictionTrace(packed.pop(EVICT_AT.name), packed, validate=False)  # no sampler records a document's end


def save_traces(
    path: str | Path, traces: Sequence[EvictionTrace], fingerprint: Mapping[str, str] | None = None
) -> None:
    """Write whole traces to one file (files.py).

    fingerprint : what made them, e.g. {"model": ..., "policy": ...}; it is stored, and can be checked on load

    Raises TraceError where there is no trace, they do not go together, or one of them could not be read again.
    """
    if not traces:
        raise TraceError(f"{path}: no trace to save")
    _common_sections(traces)
    for trace in traces:
        _check(trace.sections)  # what is written can be read
    write_sections(path, [trace.sections for trace in traces], fingerprint)


def load_traces(path: str | Path, fingerprint: Mapping[str, str] | None = None) -> list[EvictionTrace]:
    """Read and check a file of traces.

    fingerprint : what must have made them; an entry that the file has beside these is not looked at

    Raises TraceError: not a trace file, truncated or changed, another format version, no trace, an unknown or missing
    section, wrong shapes, a value that no sampler can have recorded, or a fingerprint entry that differs from the
    expected one.
    """
    rows = read_sections(path, fingerprint)
    try:
        return [EvictionTrace.from_state(sections) for sections in rows]
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def _check(sections: Mapping[str, Tensor], prompt: int | None = None) -> None:
    """Raise TraceError at the first section that is not as declared, or that cannot be beside the others."""
    known, sizes = declared(), dict[str, int]()
    for name, values in sections.items():
        if name not in known:
            raise TraceError(f"unknown trace section {name!r}; the sections are {', '.join(known)}")
        section = known[name]
        if values.ndim != len(section.axes) or values.dtype != section.dtype:
            wanted = f"{str(section.dtype).removeprefix('torch.')} [{', '.join(section.axes)}]"
            raise TraceError(f"{name} must be {wanted}, got {values.dtype} {list(values.shape)}")
        for axis, size in zip(section.axes, values.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise TraceError(f"{name} has {size} {axis.replace('_', ' ')}s, where the trace has {sizes[axis]}")
        if lacking := [needed for needed in section.needs if needed not in sections]:
            raise TraceError(f"a trace with the section {name} needs {lacking[0]}, too; it has {', '.join(sections)}")
    for name, section in known.items():
        if name in sections and (wrong := section.check(sections[name], sections, prompt)):
            raise TraceError(wrong)


def _common_sections(traces: Sequence[EvictionTrace]) -> list[str]:
    """The names of the sections that all traces have. Raises TraceError where they do not go together, or are none."""
    if not traces:
        raise TraceError("no trace given")
    first, known = traces[0].sections, declared()
    for row, trace in enumerate(traces):
        if trace.sections.keys() != first.keys():
            raise TraceError(f"trace {row} has the sections {', '.join(trace.sections)}, trace 0 {', '.join(first)}")
        for name, values in trace.sections.items():
            section = known[name]
            kept = [i for i in range(len(section.axes)) if i != section.joined_axis]
            if any(values.shape[i] != first[name].shape[i] for i in kept):
                ours = " x ".join(f"{values.shape[i]} {section.axes[i].replace('_', ' ')}s" for i in kept)
                theirs = " x ".join(str(first[name].shape[i]) for i in kept)
                raise TraceError(f"trace {row} has {ours}, trace 0 {theirs} ({name})")
    return list(first)


def trace_bytes(layers: int, kv_heads: int, length: int, sequences: int = 1, each: int = 4) -> int:
    """Recorded decisions, `each` bytes per layer, kv head and token, in host memory; an eviction is one int32."""
    return each * layers * kv_heads * length * sequences
