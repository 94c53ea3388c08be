"""Declarations of the sections that a trace may hold: their dtypes, axes, checks, and functions to batch and pack them.

A section is one tensor of a trace: `evict_at`, or another kind of decisions that the sampler made. Files, batches,
packing and checkpoints treat all sections alike, by their declarations. A view lists the sections that it replays. A
section that is not declared, or that a view cannot replay, is an error: a replay without it would silently give another
attention. A cache method declares its sections in SECTIONS, in the module that the method's configuration names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from sparse_rl.errors import UserError
from sparse_rl.methods.config import CONFIGS
from sparse_rl.trace import checks
from sparse_rl.trace.checks import NEVER, Sections


class TraceError(UserError):
    """Raised for an invalid trace or trace file; the message names the mistake and its place."""


Check = Callable[[Tensor, Sections, "int | None"], "str | None"]
Batch = Callable[[Sequence[Tensor], Sequence[int], int], Tensor]
Pack = Callable[[Sequence[Tensor], Sequence[int], Sequence[int]], Tensor]


def _no_packing(documents: Sequence[Tensor], starts: Sequence[int], ends: Sequence[int]) -> Tensor:
    if len(documents) == 1:
        return documents[0]
    raise TraceError("sequences with refitted or paged entries cannot be packed into one row; set packing: false")


@dataclass(frozen=True, kw_only=True)
class Section:
    """One kind of section. The tensor of a section in one trace is called its values.

    name : name of the section in memory and in files
    dtype : dtype of the values
    axes : names of the axes of the values; axes of the same name have the same size throughout a trace. The axis
        `layer` has all layers; `global_layer` has those without a sliding window, the only ones that a policy evicts
    joined : the axis along which the values of several traces are joined; all other axes must have equal sizes in these
        traces
    needs : sections that a trace with this section must also have, such as the settings that are needed to read it
    check : function, (values, sections, number of prompt tokens or None) -> a description of the mistake in the values,
        or None. The sections are those of the whole trace if the section has the axis `layer`, and otherwise those that
        the policy recorded (`policy_part`). They are checked in the order of `declared`, so a check may rely on earlier
        checks
    batch : function, (values of each row, the column at which each row starts, number of columns) -> one tensor for all
        rows
    pack : function, (values of each document, start position of each, end position of each) -> the values of the packed
        sequence; the default rejects several documents
    """

    name: str
    dtype: torch.dtype
    axes: tuple[str, ...]
    joined: str
    check: Check
    batch: Batch
    pack: Pack = _no_packing
    needs: tuple[str, ...] = ()

    @property
    def joined_axis(self) -> int:
        """Index of `joined` in `axes`, from 0."""
        return self.axes.index(self.joined)


# ---- evict_at: int32 [L, Hkv, S], the first query position that no longer attends to a token -----------------------


def _shifted(values: Tensor, start: int) -> Tensor:
    return torch.where(values < NEVER, values + start, NEVER).to(values.dtype)


def _batch_evict_at(rows: Sequence[Tensor], starts: Sequence[int], width: int) -> Tensor:
    """Return int32 [layers, rows, kv heads, width]; padding has 0, so that no query sees it."""
    return by_layer([_shifted(values, start) for values, start in zip(rows, starts, strict=True)], starts, width, 0)


def by_layer(rows: Sequence[Tensor], starts: Sequence[int], width: int, empty: float) -> Tensor:
    """Batch the values [layers, kv heads, tokens, ...] of all rows: [layers, rows, kv heads, width, ...].

    The values of a row start at the row's column in `starts`; padding columns get `empty`. Layers come first, so that
    one layer's slice is contiguous.
    """
    layers, kv_heads, _, *rest = rows[0].shape
    batch = torch.full((layers, len(rows), kv_heads, width, *rest), empty, dtype=rows[0].dtype)
    for row, (values, start) in enumerate(zip(rows, starts, strict=True)):
        batch[:, row, :, start : start + values.shape[2]] = values
    return batch


def _pack_evict_at(documents: Sequence[Tensor], starts: Sequence[int], ends: Sequence[int]) -> Tensor:
    """Join evict_at of documents, limited to each document's end, so that no later document sees the tokens."""
    places = zip(documents, starts, ends, strict=True)
    return torch.cat([_shifted(values, start).clamp(max=end) for values, start, end in places], dim=-1).to(torch.int32)


EVICT_AT = Section(
    name="evict_at",
    dtype=torch.int32,
    axes=("layer", "kv_head", "token"),
    joined="token",
    check=checks.check_evict_at,
    batch=_batch_evict_at,
    pack=_pack_evict_at,
)

# ---- helpers to declare further sections ----------------------------------------------------------------------------


def batch_times(rows: Sequence[Tensor], starts: Sequence[int], width: int) -> Tensor:
    """Batch positions, shifted by the start of their row: int32 [rows, longest row], right-padded with NEVER."""
    batch = torch.full((len(rows), max(len(values) for values in rows)), NEVER, dtype=torch.int32)
    for row, (values, start) in enumerate(zip(rows, starts, strict=True)):
        batch[row, : len(values)] = values + start
    return batch


def _shared_settings(rows: Sequence[Tensor], starts: Sequence[int], width: int) -> Tensor:
    if any(not torch.equal(values, rows[0]) for values in rows):
        raise TraceError("settings differ between the traces of a batch: they were sampled under different policies")
    return rows[0]


def numbers(
    name: str, dtype: torch.dtype, axis: str, check: Check, batch: Batch = _shared_settings, needs: tuple[str, ...] = ()
) -> Section:
    """Declare a section with one axis: settings, which are equal in all traces of a batch, or times in a sequence."""
    return Section(name=name, dtype=dtype, axes=(axis,), joined=axis, check=check, batch=batch, needs=needs)


# ---- routed: int16 [L, S, K], the experts that a token takes in each layer, in the order of the router's choice -----
#      -1 means that none is recorded: a layer without experts, padding, and the last token, which is never fed


def _batch_routed(rows: Sequence[Tensor], starts: Sequence[int], width: int) -> Tensor:
    """Return int16 [layers, rows, width, K]."""
    return by_layer([values[:, None] for values in rows], starts, width, -1)[:, :, 0]


ROUTED = Section(
    name="routed",
    dtype=torch.int16,
    axes=("layer", "token", "choice"),
    joined="token",
    check=checks.check_routed,
    batch=_batch_routed,
    pack=lambda documents, starts, ends: torch.cat(list(documents), dim=1),
)

# ---- windowed: int32 [L], the sliding window of each layer in tokens, 0 for a layer whose entries a policy evicts ----


WINDOWED = Section(
    name="windowed",
    dtype=torch.int32,
    axes=("layer",),
    joined="layer",
    check=checks.check_windowed,
    batch=_shared_settings,
    pack=lambda documents, starts, ends: _shared_settings(documents, starts, 0),
)

SECTIONS: dict[str, Section] = {
    "evict_at": EVICT_AT,
    "windowed": WINDOWED,
    "routed": ROUTED,
    # the end of a context that was compacted once; without further sections its entries cannot be replayed
    "compacted_at": numbers("compacted_at", torch.int32, "context_end", checks.check_compacted_at, batch_times),
}
"""The sections that belong to no method, by name. evict_at is the first; it is the only one that every trace has."""


def declared() -> dict[str, Section]:
    """Return the sections that a trace may have, by name: SECTIONS and the sections of all registered cache methods."""
    modules = dict.fromkeys(config.sections for config in CONFIGS.values() if config.sections is not None)
    of_methods = [section for module in modules for section in import_module(module).SECTIONS]
    return SECTIONS | {section.name: section for section in of_methods}
