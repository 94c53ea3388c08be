"""The kinds of section that a trace may hold: what each is made of, and how it is batched and packed.

A trace is `evict_at` and whatever further decisions its sampler made, a tensor each. All that handles traces (files,
batches, packing, checkpoints) asks the declarations and knows no section by name; a view says which sections it
replays. A section without a declaration, or that a view cannot replay, is refused: a trace replayed without one of its
sections is silently another attention.

What must be known to read a section (which layers it speaks of, say) is a section beside it, named in `needs`. The
values that a section cannot have are in checks.py. A method declares its own in SECTIONS of a module that its settings
name.
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
    """A trace or trace file that breaks the contract: what is wrong, and where."""


Check = Callable[[Tensor, Sections, "int | None"], "str | None"]
Batch = Callable[[Sequence[Tensor], Sequence[int], int], Tensor]
Pack = Callable[[Sequence[Tensor], Sequence[int], Sequence[int]], Tensor]


def _no_packing(documents: Sequence[Tensor], starts: Sequence[int], ends: Sequence[int]) -> Tensor:
    if len(documents) == 1:
        return documents[0]
    raise TraceError("sequences whose entries were refitted or paged cannot be packed into one row; use packing: false")


@dataclass(frozen=True, kw_only=True)
class Section:
    """One kind of section; `values` below is its tensor in one trace.

    name : in memory and in files
    dtype, axes : of values; sizes of axes of one name agree throughout a trace
    joined : the one of `axes` along which the values of several traces are joined; the others' sizes are the same in
        all traces that go together
    needs : names of sections that must stand beside it
    check : (values, all sections, tokens of the prompt or None) -> what is wrong with the values, in words; None where
        nothing is. Sections are checked in the order of `declared`, and a check may rely on those before it
    batch : (values of each row, the column in which each row starts, columns) -> one tensor for all rows
    pack : (values of each document, the position at which each starts, and ends) -> the values of their sequence; by
        default several documents are refused
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
        """The place of `joined` among `axes`, from 0."""
        return self.axes.index(self.joined)


# ---- evict_at: int32 [L, Hkv, S], the first query position that no longer attends to a token -----------------------


def _moved(values: Tensor, start: int) -> Tensor:
    """The values of a sequence whose first token stands at `start`."""
    return torch.where(values < NEVER, values + start, NEVER).to(values.dtype)


def _batch_evict_at(rows: Sequence[Tensor], starts: Sequence[int], width: int) -> Tensor:
    """int32 [L, B, Hkv, width]; pad keys 0: nobody sees them."""
    return by_layer([_moved(values, start) for values, start in zip(rows, starts, strict=True)], starts, width, 0)


def by_layer(rows: Sequence[Tensor], starts: Sequence[int], width: int, empty: float) -> Tensor:
    """Values [L, Hkv, S, ...] of each row, at its columns: [L, B, Hkv, width, ...], `empty` elsewhere.

    Layers come first, so that one layer's slice is contiguous.
    """
    layers, kv_heads, _, *rest = rows[0].shape
    batch = torch.full((layers, len(rows), kv_heads, width, *rest), empty, dtype=rows[0].dtype)
    for row, (values, start) in enumerate(zip(rows, starts, strict=True)):
        batch[:, row, :, start : start + values.shape[2]] = values
    return batch


def _pack_evict_at(documents: Sequence[Tensor], starts: Sequence[int], ends: Sequence[int]) -> Tensor:
    """A document's end caps its values, so that the next document does not see it."""
    places = zip(documents, starts, ends, strict=True)
    return torch.cat([_moved(values, start).clamp(max=end) for values, start, end in places], dim=-1).to(torch.int32)


EVICT_AT = Section(
    name="evict_at",
    dtype=torch.int32,
    axes=("layer", "kv_head", "token"),
    joined="token",
    check=checks.check_evict_at,
    batch=_batch_evict_at,
    pack=_pack_evict_at,
)

# ---- what the further sections share --------------------------------------------------------------------------------


def batch_times(rows: Sequence[Tensor], starts: Sequence[int], width: int) -> Tensor:
    """int32 [B, most], right-padded with NEVER, of positions, which move with their row."""
    batch = torch.full((len(rows), max(len(values) for values in rows)), NEVER, dtype=torch.int32)
    for row, (values, start) in enumerate(zip(rows, starts, strict=True)):
        batch[row, : len(values)] = values + start
    return batch


def _the_same(rows: Sequence[Tensor], starts: Sequence[int], width: int) -> Tensor:
    """The one that all rows have."""
    if any(not torch.equal(values, rows[0]) for values in rows):
        raise TraceError("settings differ between the traces of a batch: they were sampled under different policies")
    return rows[0]


def numbers(
    name: str, dtype: torch.dtype, axis: str, check: Check, batch: Batch = _the_same, needs: tuple[str, ...] = ()
) -> Section:
    """A section of one axis: settings, which all traces of a batch have alike, or times, as many as a sequence has."""
    return Section(name=name, dtype=dtype, axes=(axis,), joined=axis, check=check, batch=batch, needs=needs)


SECTIONS: dict[str, Section] = {
    "evict_at": EVICT_AT,
    # where a context ended whose entries were fitted to queries that are not recorded
    "compacted_at": numbers("compacted_at", torch.int32, "context_end", checks.check_compacted_at),
}
"""The sections that are no method's own, by name; evict_at is the first, and the only one that every trace has."""


def declared() -> dict[str, Section]:
    """The sections that a trace may have, by name: SECTIONS, and those of all registered methods."""
    modules = dict.fromkeys(config.sections for config in CONFIGS.values() if config.sections is not None)
    own = [section for module in modules for section in import_module(module).SECTIONS]
    return SECTIONS | {section.name: section for section in own}
