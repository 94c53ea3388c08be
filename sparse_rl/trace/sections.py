"""The kinds of section that a trace may hold: what each is made of, and how it is checked, batched and packed.

A trace is `evict_at` and whatever further decisions its sampler made, a tensor each. All that handles traces (files,
batches, packing, checkpoints) asks the declarations in SECTIONS and knows no section by name; which sections it can
replay is said by each view of sparse_rl/attention/views. A section without a declaration, or that a view cannot
replay, is refused: a trace replayed without one of its sections is silently another attention.

What must be known to read a section (which layers it speaks of, say) is a section beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sparse_rl.errors import UserError

NEVER = 2**30
"""In evict_at: no query misses the token; larger than any position."""


class TraceError(UserError):
    """A trace or trace file that breaks the contract: what is wrong, and where."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One kind of section; `values` below is its tensor in one trace.

    name : in memory and in files
    dtype, axes : of values; sizes of axes of one name agree throughout a trace
    joined : the one of `axes` along which the values of several traces are joined; the others' sizes are the same in
        all traces that go together
    check : (values, evict_at) -> what is wrong with the values, in words; None where nothing is
    batch : (values of each row, the column in which each row starts, columns) -> one tensor for all rows
    pack : (values of each document, the position at which each starts, and ends) -> the values of their sequence
    """

    name: str
    dtype: torch.dtype
    axes: tuple[str, ...]
    joined: str
    check: Callable[[torch.Tensor, torch.Tensor], str | None]
    batch: Callable[[Sequence[torch.Tensor], Sequence[int], int], torch.Tensor]
    pack: Callable[[Sequence[torch.Tensor], Sequence[int], Sequence[int]], torch.Tensor]

    @property
    def joined_axis(self) -> int:
        """The place of `joined` among `axes`, from 0."""
        return self.axes.index(self.joined)


# ---- evict_at: int32 [L, Hkv, S], the first query position that no longer attends to a token -----------------------


def _check_evict_at(values: torch.Tensor, _: torch.Tensor) -> str | None:
    """A token sees itself, so it is evicted after its own position; and before the last query, or never."""
    if 0 in values.shape:
        return f"evict_at {list(values.shape)} is empty: a trace has a layer, a kv head and a token"
    last = values.shape[-1] - 2  # the last query: the last token is sampled, and never fed
    early = values <= torch.arange(values.shape[-1], dtype=torch.int32)
    late = (values > last) & (values != NEVER)
    kept = f"the last query is at {last}, and what none of them misses has {NEVER}"
    for wrong, why in ((early, "a token is evicted after its own position"), (late, kept)):
        if bool(wrong.any()):
            layer, head, token = (int(i) for i in wrong.nonzero()[0])
            return f"evict_at[{layer}, {head}, {token}] = {int(values[layer, head, token])}: {why}"
    return None


def _moved(values: torch.Tensor, start: int) -> torch.Tensor:
    """The values of a sequence whose first token stands at `start`."""
    return torch.where(values < NEVER, values + start, NEVER).to(values.dtype)


def _batch_evict_at(rows: Sequence[torch.Tensor], starts: Sequence[int], width: int) -> torch.Tensor:
    """int32 [L, B, Hkv, width], layers first, so that one layer's slice is contiguous; pad keys 0: nobody sees them."""
    return _by_layer([_moved(values, start) for values, start in zip(rows, starts, strict=True)], starts, width, 0)


def _by_layer(rows: Sequence[torch.Tensor], starts: Sequence[int], width: int, empty: float) -> torch.Tensor:
    """Values [L, Hkv, S, ...] of each row, at its columns: [L, B, Hkv, width, ...], `empty` elsewhere."""
    layers, kv_heads, _, *rest = rows[0].shape
    batch = torch.full((layers, len(rows), kv_heads, width, *rest), empty, dtype=rows[0].dtype)
    for row, (values, start) in enumerate(zip(rows, starts, strict=True)):
        batch[:, row, :, start : start + values.shape[2]] = values
    return batch


def _pack_evict_at(documents: Sequence[torch.Tensor], starts: Sequence[int], ends: Sequence[int]) -> torch.Tensor:
    """A document's end caps its values, so that the next document does not see it."""
    places = zip(documents, starts, ends, strict=True)
    return torch.cat([_moved(values, start).clamp(max=end) for values, start, end in places], dim=-1).to(torch.int32)


EVICT_AT = Section(
    name="evict_at",
    dtype=torch.int32,
    axes=("layer", "kv_head", "token"),
    joined="token",
    check=_check_evict_at,
    batch=_batch_evict_at,
    pack=_pack_evict_at,
)

# ---- refit_at: int32 [C], the tokens seen at each compaction that gave what stayed new biases and values ------------
# ---- refit_with: float64 [K], how (sparse_rl/matching/record.py) ---------------------------------------------------

SETTINGS = 7  # numbers in refit_with


def _check_refit_at(values: torch.Tensor, evict_at: torch.Tensor) -> str | None:
    """Ascending, after the first token and before the last query."""
    times, last = values.tolist(), evict_at.shape[-1] - 2
    if any(a >= b for a, b in zip([0, *times], times, strict=False)) or any(time > last for time in times):
        return f"refit_at {times[:20]} is not ascending from 1 to {last}, where the last query is"
    gone = evict_at[evict_at < NEVER].unique()
    if bool((stray := ~torch.isin(gone, values)).any()):
        return f"a token is evicted at {int(gone[stray][0])}, where refit_at {times[:20]} has no compaction"
    return None


def _check_refit_with(values: torch.Tensor, _: torch.Tensor) -> str | None:
    if len(values) != SETTINGS or not bool((values.isfinite() & (values >= 0)).all()) or not values[2] * values[4] > 0:
        return f"refit_with {values.tolist()[:20]} is not what fits are made with"
    return None


def _batch_refit_at(rows: Sequence[torch.Tensor], starts: Sequence[int], width: int) -> torch.Tensor:
    """int32 [B, most C], right-padded with NEVER."""
    batch = torch.full((len(rows), max(len(values) for values in rows)), NEVER, dtype=torch.int32)
    for row, (values, start) in enumerate(zip(rows, starts, strict=True)):
        batch[row, : len(values)] = values + start
    return batch


def _the_same(rows: Sequence[torch.Tensor], starts: Sequence[int], width: int) -> torch.Tensor:
    """The one that all rows have."""
    if any(not torch.equal(values, rows[0]) for values in rows):
        raise TraceError("settings differ between the traces of a batch: they were sampled under different policies")
    return rows[0]


def _no_packing(documents: Sequence[torch.Tensor], starts: Sequence[int], ends: Sequence[int]) -> torch.Tensor:
    if len(documents) == 1:
        return documents[0]
    raise TraceError("sequences whose entries were refitted or paged cannot be packed into one row; use packing: false")


def _settings(
    name: str, dtype: torch.dtype, axis: str, check: Callable[[torch.Tensor, torch.Tensor], str | None]
) -> Section:
    """Numbers that all traces of a batch have alike."""
    return Section(name=name, dtype=dtype, axes=(axis,), joined=axis, check=check, batch=_the_same, pack=_no_packing)


REFIT_AT = Section(
    name="refit_at",
    dtype=torch.int32,
    axes=("compaction",),
    joined="compaction",
    check=_check_refit_at,
    batch=_batch_refit_at,
    pack=_no_packing,
)
REFIT_WITH = _settings("refit_with", torch.float64, "setting", _check_refit_with)

# ---- opened: int16 [L, Hkv, S, K], the pages that a query read token by token, -1: none -----------------------------
# ---- paged_with: int32 [8], how tokens are paged (sparse_rl/pages/pages.py) ------------------------------------------
# ---- paged_layers: int32 [N], the layers whose tokens are paged, where there are others ------------------------------
# ---- pi: float32 [L, Hkv, S], how much of its page's summary a token is, where that is not the same for all ----------

PAGING = 8  # numbers in paged_with


def _check_opened(values: torch.Tensor, evict_at: torch.Tensor) -> str | None:
    most = int(values.max()) if values.numel() else -1
    if most >= evict_at.shape[-1] or (values.numel() and int(values.min()) < -1):
        return f"opened has page {most}, and the sequence has {evict_at.shape[-1]} tokens; -1 is no page"
    ordered = values.sort(-1).values
    if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()):
        return "opened has a page twice for one query"
    return None


def _check_paged_with(values: torch.Tensor, _: torch.Tensor) -> str | None:
    if len(values) != PAGING or not bool((values >= 0).all()) or not values[0] > 0:
        return f"paged_with {values.tolist()[:20]} is not how tokens can be paged"
    return None


def _check_paged_layers(values: torch.Tensor, evict_at: torch.Tensor) -> str | None:
    layers = values.tolist()
    if layers != sorted({layer for layer in layers if 0 <= layer < evict_at.shape[0]}):
        return f"paged_layers {layers[:20]} is not ascending, from layer 0 to {evict_at.shape[0] - 1}"
    return None


def _check_pi(values: torch.Tensor, _: torch.Tensor) -> str | None:
    if not bool(((values >= 0) & (values <= 1)).all()):
        return "pi has a weight that is not between 0 and 1"
    return None


def _batch_pi(rows: Sequence[torch.Tensor], starts: Sequence[int], width: int) -> torch.Tensor:
    """float32 [L, B, Hkv, width], layers first."""
    return _by_layer(rows, starts, width, 0.0)


def _batch_opened(rows: Sequence[torch.Tensor], starts: Sequence[int], width: int) -> torch.Tensor:
    """int16 [L, B, Hkv, width, K], layers first; page numbers are those of their row."""
    return _by_layer(rows, starts, width, -1)


OPENED = Section(
    name="opened",
    dtype=torch.int16,
    axes=("layer", "kv_head", "token", "open_page"),
    joined="token",
    check=_check_opened,
    batch=_batch_opened,
    pack=_no_packing,
)
PAGED_WITH = _settings("paged_with", torch.int32, "page_setting", _check_paged_with)
PI = Section(
    name="pi",
    dtype=torch.float32,
    axes=("layer", "kv_head", "token"),
    joined="token",
    check=_check_pi,
    batch=_batch_pi,
    pack=_no_packing,
)
PAGED_LAYERS = _settings("paged_layers", torch.int32, "paged_layer", _check_paged_layers)

# ---- compacted_at: int32 [1], where a context ended whose entries were fitted to queries that are not recorded -----


def _check_compacted_at(values: torch.Tensor, evict_at: torch.Tensor) -> str | None:
    if len(values) != 1 or not 0 < int(values[0]) < evict_at.shape[-1]:
        return f"compacted_at {values.tolist()[:20]} is no place in a sequence of {evict_at.shape[-1]} tokens"
    return None


COMPACTED_AT = _settings("compacted_at", torch.int32, "context_end", _check_compacted_at)

ALL = (EVICT_AT, REFIT_AT, REFIT_WITH, OPENED, PAGED_WITH, PAGED_LAYERS, PI, COMPACTED_AT)
SECTIONS: dict[str, Section] = {section.name: section for section in ALL}
"""The sections that a trace may have, by name; evict_at is the first, and the only one that every trace has."""
