"""EvictionTrace, the record of a sampler's cache decisions for a sequence; functions that batch, pack and store traces.

A token that has left the cache never returns, so one integer per layer l, kv head h and token t records all evictions:

    evict_at[l, h, t] = the first query position that no longer attends to token t   (NEVER if there is none)
    query q sees token t   <=>   t <= q < evict_at[l, h, t]

A sampler that does more than evict entries records its other decisions in further sections (sections.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from sparse_rl.trace.files import read_sections, write_sections
from sparse_rl.trace.sections import EVICT_AT, NEVER, SUPPORT, TraceError, declared, policy_part, window_evictions


@dataclass(frozen=True, eq=False)
class EvictionTrace:
    """The cache decisions for one sequence of S tokens (prompt and completion), in L layers with Hkv kv heads each.

    evict_at : int32 [L, Hkv, S], in host memory; NEVER (2**30) if the token is never evicted. Values >= S - 1 cannot be
        observed, because the last token is sampled but never fed; they are stored as NEVER
    further : the sections other than evict_at, by name, in host memory; each must be declared (sections.py)
    validate : False skips the checks (for tests that build deliberately wrong traces)
    documents : where the documents end that `pack_traces` has packed into this sequence; () for one document

    Raises TraceError for a section that is not declared, has a wrong dtype or shape, lacks another section that it
    needs, or has values that no sampler can have recorded (sections.py).
    """

    evict_at: Tensor
    further: Mapping[str, Tensor] = field(default_factory=dict)
    validate: bool = field(default=True, repr=False)
    documents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.check()

    def check(self, prompt: int | None = None) -> None:
        """Raise TraceError if a section has values that no sampler can have recorded.

        The constructor runs this check. Each replay repeats it, because tensors are mutable. If `prompt`, the
        number of prompt tokens, is given, refits and page openings before the end of the prompt are errors too.
        """
        if self.validate:
            _check(self.sections, prompt)

    @property
    def sections(self) -> dict[str, Tensor]:
        """All sections by name, evict_at first."""
        return {EVICT_AT.name: self.evict_at, **self.further}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> EvictionTrace:
        """Rebuild a trace from its `sections`. Raises TraceError if evict_at is missing, or a section is invalid.

        state : the sections by name, including evict_at int32 [L, Hkv, S]
        """
        if EVICT_AT.name not in state:
            raise TraceError(f"a trace needs the section {EVICT_AT.name}; it has {', '.join(state) or 'no section'}")
        further = {name: values for name, values in state.items() if name != EVICT_AT.name}
        return cls(state[EVICT_AT.name], further)

    @classmethod
    def recorded(cls, evict_at: Tensor, further: Mapping[str, Tensor] | None = None) -> EvictionTrace:
        """Make a trace from an engine's recorded decisions. Raises TraceError if the constructor rejects them.

        evict_at : integers [L, Hkv, S] on any device; converted to int32 in host memory, and values >= S - 1 become
            NEVER
        further : the other sections by name, as declared (sections.py), in host memory
        """
        evict_at = evict_at.to("cpu", torch.int32)
        return cls(evict_at.masked_fill(evict_at >= evict_at.shape[-1] - 1, NEVER), further or {})

    @classmethod
    def dense(cls, layers: int, kv_heads: int, length: int, windows: Sequence[int] = ()) -> EvictionTrace:
        """Make the trace of a full cache, [layers, kv_heads, length], in which a policy evicts no token.

        windows : the sliding window of each layer, 0 for a layer without one; () means that no layer has one
        """
        evict_at = torch.full((layers - sum(map(bool, windows)), kv_heads, length), NEVER, dtype=torch.int32)
        return cls(evict_at).beside_windows(windows)

    def dense_like(self) -> EvictionTrace:
        """Make the trace that a full cache would have recorded for this sequence, drawn from the same supports."""
        supports = {name: self.further[name] for name in SUPPORT if name in self.further}
        return EvictionTrace.dense(*self.shape, self.windows).beside(supports)

    def beside(self, further: Mapping[str, Tensor]) -> EvictionTrace:
        """Return this trace with further sections."""
        return replace(self, further={**self.further, **further}) if further else self

    def beside_windows(self, windows: Sequence[int]) -> EvictionTrace:
        """Return the trace of a model that also has layers with a sliding window; this trace has the other layers.

        windows : the window of each layer of the model, in tokens, 0 for a layer of this trace; if no layer has a
            window, the result is this trace
        """
        if not any(windows):
            return self
        evict_at = torch.empty(len(windows), *self.shape[1:], dtype=torch.int32)
        windowed = torch.tensor(windows, dtype=torch.int32)
        evict_at[windowed == 0] = self.evict_at
        for layer in windowed.nonzero()[:, 0].tolist():
            evict_at[layer] = window_evictions(windows[layer], len(self))
        return EvictionTrace(evict_at, {"windowed": windowed, **self.further})

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of layers, of kv heads per layer, and of tokens in prompt and completion."""
        return self.layers, self.kv_heads, len(self)

    @property
    def layers(self) -> int:
        """Number of layers that hold keys and values."""
        return self.evict_at.shape[0]

    @property
    def kv_heads(self) -> int:
        """Number of kv heads in a layer."""
        return self.evict_at.shape[1]

    def __len__(self) -> int:
        return self.evict_at.shape[2]

    def policy_part(self) -> EvictionTrace:
        """Return the trace of what a policy recorded (see `policy_part`); this trace itself if there is no more."""
        part = policy_part(self.sections)
        if part.keys() == self.sections.keys():
            return self
        return EvictionTrace(part.pop(EVICT_AT.name), part, self.validate)

    @property
    def windows(self) -> list[int]:
        """Sliding window of each layer in tokens, 0 for a layer without one; [] if no layer has one."""
        windowed: list[int] = self.further["windowed"].tolist() if "windowed" in self.further else []
        return windowed

    @property
    def global_layers(self) -> list[int]:
        """Indices of the layers without a sliding window, which are those whose entries a policy evicts."""
        return [layer for layer, window in enumerate(self.windows or [0] * self.layers) if not window]

    def visible(self, layer: int) -> Tensor:
        """Return one layer's attention mask, True if the query sees the token: bool [Hkv, S queries, S tokens]."""
        position = torch.arange(len(self))
        causal = position[None, :] <= position[:, None]
        return causal & (position[:, None] < self.evict_at[layer][:, None, :])

    # ---- statistics ---------------------------------------------------------------------------------------------

    def kept_counts(self, query: int | None = None) -> Tensor:
        """Return the number of tokens in the cache when a query attends: int64 [L, Hkv].

        query : position of the query; None means the last query, at position S - 2
        """
        query = max(len(self) - 2, 0) if query is None else query
        return (self.evict_at[..., : query + 1] > query).sum(-1)

    def decoding_counts(self, prompt: int) -> Tensor:
        """Return the number of entries in the cache when each decoding query attends: int64 [L, Hkv, queries]. Without
        such a query, there is one count of 0.

        prompt : number of prompt tokens; the prompt's own queries do not count
        """
        fed = len(self) - 1
        if fed <= prompt:
            return torch.zeros(*self.shape[:2], 1, dtype=torch.long)
        evict_at = self.evict_at[..., :fed].long().clamp(max=fed)
        evictions = torch.zeros(*self.shape[:2], fed + 1, dtype=torch.long).scatter_add_(
            -1, evict_at, torch.ones_like(evict_at)
        )
        held = torch.arange(1, fed + 1) - evictions[..., :fed].cumsum(-1)  # by query
        return held[..., prompt:]

    def peak_counts(self, prompt: int) -> Tensor:
        """Return the maximum of `decoding_counts` over the queries: int64 [L, Hkv]."""
        return self.decoding_counts(prompt).amax(-1)

    def retention(self) -> float:
        """Return the share of fed tokens in the cache at the end, from 0 to 1: mean over layers and kv heads (G-KV).

        Layers with a sliding window are not counted.
        """
        return float(self.policy_part().kept_counts().float().mean()) / max(len(self) - 1, 1)

    def density(self, bins: int, layer: int | None = None) -> Tensor:
        """Return the share of tokens that the cache holds at the end, by position: float32 [bins].

        layer : the only layer that is counted; None means the mean over all layers without a sliding window
        """
        fed = max(len(self) - 1, 1)
        evict_at = self.evict_at[self.global_layers if layer is None else [layer]]
        held = (evict_at[..., :fed] >= fed).float().mean(dim=(0, 1))
        bin_of_token = torch.arange(fed) * bins // fed
        total = torch.zeros(bins).index_add_(0, bin_of_token, held)
        return total / torch.zeros(bins).index_add_(0, bin_of_token, torch.ones(fed)).clamp(min=1)

    # ---- files --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, fingerprint: Mapping[str, str] | None = None) -> None:
        """Write a file that holds only this trace; see `save_traces`."""
        save_traces(path, [self], fingerprint)

    @classmethod
    def load(cls, path: str | Path, fingerprint: Mapping[str, str] | None = None) -> EvictionTrace:
        """Read a file that holds one trace; see `load_traces`. Raises TraceError if the file holds several traces."""
        traces = load_traces(path, fingerprint)
        if len(traces) != 1:
            raise TraceError(f"{path} holds {len(traces)} traces; read it with load_traces")
        return traces[0]


def batch_traces(traces: Sequence[EvictionTrace], starts: Sequence[int], width: int) -> dict[str, Tensor]:
    """Join traces of different lengths into one padded batch. Returns the batched sections by name.

    The batch has one row per trace and `width` columns. The trace of row b, with S_b tokens, occupies the columns from
    starts[b] to starts[b] + S_b - 1. Positions in a section are shifted by the start of their row. evict_at is int32
    [layers, rows, kv heads, width], and 0 in padding columns, so that no query sees them.

    Raises TraceError if there is no trace; if the traces differ in their sections, layers, kv heads or settings; if a
    trace does not fit the columns; or if `EvictionTrace.check` rejects a trace.
    """
    names = _common_sections(traces)
    for row, (trace, start) in enumerate(zip(traces, starts, strict=True)):
        trace.check()
        if start < 0 or start + len(trace) > width:
            raise TraceError(f"row {row}: {len(trace)} tokens from column {start} do not fit into {width} columns")
    return {name: declared()[name].batch([t.sections[name] for t in traces], starts, width) for name in names}


def pinned(section: Tensor, device: torch.device | str) -> Tensor:
    """Return a batched section in pinned memory, from which a GPU copies layers while it computes; on a CPU, as it is.

    section : values [layers, ...] in host memory
    """
    return section if torch.device(device).type == "cpu" or section.is_pinned() else section.pin_memory()


def pack_traces(traces: Sequence[EvictionTrace]) -> EvictionTrace:
    """Join the traces of documents that are packed into one sequence, in which no document sees another.

    In the result, evict_at is int32 [layers, kv heads, sum of the lengths]; no value exceeds the document's end.

    Raises TraceError if the traces differ in their sections, layers or kv heads; if several traces have a section other
    than evict_at; or if `EvictionTrace.check` rejects a trace.
    """
    names = _common_sections(traces)
    for trace in traces:
        trace.check()
    ends = list(accumulate(len(trace) for trace in traces))
    starts = [end - len(trace) for end, trace in zip(ends, traces, strict=True)]
    packed = {name: declared()[name].pack([t.sections[name] for t in traces], starts, ends) for name in names}
    # The checks would reject evictions at a document's end, which no sampler records.
    return EvictionTrace(packed.pop(EVICT_AT.name), packed, validate=False, documents=tuple(ends))


def save_traces(
    path: str | Path, traces: Sequence[EvictionTrace], fingerprint: Mapping[str, str] | None = None
) -> None:
    """Write traces to one file (files.py).

    fingerprint : description of the model, policy and so on that made the traces, e.g. {"model": ..., "policy": ...};
        `load_traces` can check it

    Raises TraceError if there is no trace, a trace is invalid, or the traces differ in sections, layers or kv heads.
    """
    _common_sections(traces)
    for trace in traces:
        _check(trace.sections)  # ensures that the file can be read again
    write_sections(path, [trace.sections for trace in traces], fingerprint)


def load_traces(path: str | Path, fingerprint: Mapping[str, str] | None = None) -> list[EvictionTrace]:
    """Read and check a file of traces.

    fingerprint : entries that the file's fingerprint must have; the file may have other entries too

    Raises TraceError for a file that is no trace file, is damaged, has another format version, or holds no trace, for a
    missing, unknown or invalid section, and for an unexpected fingerprint entry.
    """
    rows = read_sections(path, fingerprint)
    try:
        return [EvictionTrace.from_state(sections) for sections in rows]
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def _check(sections: Mapping[str, Tensor], prompt: int | None = None) -> None:
    """Raise TraceError at the first section that violates its declaration or contradicts another section."""
    layers, windowed = sections[EVICT_AT.name].shape[:1], sections.get("windowed")
    part = sections if windowed is None or windowed.shape != layers else policy_part(sections)
    declarations, sizes = declared(), {"global_layer": next(iter(part[EVICT_AT.name].shape), 0)}
    for name, values in sections.items():
        if name not in declarations:
            raise TraceError(f"unknown trace section {name!r}; the sections are {', '.join(declarations)}")
        section = declarations[name]
        if values.ndim != len(section.axes) or values.dtype != section.dtype:
            wanted = f"{str(section.dtype).removeprefix('torch.')} [{', '.join(section.axes)}]"
            raise TraceError(f"{name} must be {wanted}, got {values.dtype} {list(values.shape)}")
        for axis, size in zip(section.axes, values.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise TraceError(f"{name} has {size} {axis.replace('_', ' ')}s, but the trace has {sizes[axis]}")
        if missing := [needed for needed in section.needs if needed not in sections]:
            raise TraceError(f"a trace with the section {name} also needs {missing[0]}; it has {', '.join(sections)}")
    for name, section in declarations.items():
        seen = sections if {"layer", "model_layer"} & {*section.axes} or name in SUPPORT else part
        if name in sections and (mistake := section.check(sections[name], seen, prompt)):
            raise TraceError(mistake)


def _common_sections(traces: Sequence[EvictionTrace]) -> list[str]:
    """Return the names of the sections that all traces have. Raises TraceError if traces differ or are missing."""
    if not traces:
        raise TraceError("at least one trace is needed, but there is none")
    first = traces[0].sections
    for row, trace in enumerate(traces):
        if trace.sections.keys() != first.keys():
            wrong = f"has the sections {', '.join(trace.sections)}, but trace 0 has {', '.join(first)}"
            raise TraceError(f"trace {row} {wrong}")
        for name, values in trace.sections.items():
            section = declared()[name]
            sizes, others = ([*x.shape] for x in (values, first[name]))
            sizes[section.joined_axis] = others[section.joined_axis]
            if sizes != others:
                wrong = f"has {name} {list(values.shape)}, but trace 0 has {list(first[name].shape)}"
                raise TraceError(f"trace {row} {wrong} ({' x '.join(section.axes)})")
    return list(first)


def trace_bytes(layers: int, kv_heads: int, length: int, sequences: int = 1, each: int = 4, experts: int = 0) -> int:
    """Return the bytes of traces that have `each` bytes per layer, kv head and token (4 for evict_at, int32).

    experts : number of experts per token in all layers together, which the section `routed` records in int16
    """
    return (each * layers * kv_heads + 2 * experts) * length * sequences
