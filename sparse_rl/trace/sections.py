"""The sections that a trace may hold, each declared once: dtype, axes, check, and how it is batched and packed.

A section is one tensor of a trace: `evict_at`, or another kind of decisions that the sampler made. A section that is
not declared, or that a view cannot replay, is an error: a replay without it would silently give another attention. A
cache method declares its sections in SECTIONS, in the module that the method's configuration names.

A check rejects values that no sampler can have recorded. Above all, no trace may let a query see a later token. It gets
the values of one section, all sections of the trace by name, and the number of prompt tokens (None means unknown). It
returns a description of the mistake, or None. Shapes, dtypes and missing sections are checked first (record.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from sparse_rl.errors import UserError
from sparse_rl.methods.config import CONFIGS

NEVER = 2**30
"""Value of evict_at for a token that is never evicted; larger than any position."""


class TraceError(UserError):
    """Raised for an invalid trace or trace file; the message names the mistake and its place."""


Sections = Mapping[str, Tensor]
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

    name, dtype : name of the section in memory and in files, and dtype of its values
    axes : names of the axes of the values; axes of the same name have the same size throughout a trace. The axis
        `layer` has all layers; `global_layer` has those without a sliding window, the only ones that a policy evicts;
        `model_layer` also has the layers without keys and values
    joined : the axis along which the values of several traces are joined; all other axes must have equal sizes in these
        traces
    needs : sections that a trace with this section must also have, such as the settings that are needed to read it
    check : function, (values, sections, number of prompt tokens or None) -> a description of the mistake, or None. It
        gets the sections of the whole trace if the section has the axis `layer` or `model_layer`, and otherwise the
        `policy_part`. A check may rely on the checks of sections that come earlier in `declared`
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


# ---- helpers to declare sections ------------------------------------------------------------------------------------


def last_query(sections: Sections) -> int:
    """Return the position of the last query: number of tokens - 2, because the last token is sampled but never fed."""
    return sections["evict_at"].shape[-1] - 2


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


# ---- evict_at: int32 [L, Hkv, S], the first query position that no longer attends to a token -----------------------


def _check_evict_at(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """Each token is evicted after its own position and by the last query, or never."""
    if 0 in values.shape:
        return f"evict_at {list(values.shape)} is empty: a trace has at least one layer, kv head and token"
    last = last_query(sections)
    early = values <= torch.arange(values.shape[-1], dtype=torch.int32)
    late = (values > last) & (values != NEVER)
    late_rule = f"the last query is at {last}; a token that is never evicted has {NEVER}"
    for invalid, violated_rule in ((early, "a token can be evicted only after its own position"), (late, late_rule)):
        if bool(invalid.any()):
            layer, head, token = (int(i) for i in invalid.nonzero()[0])
            return f"evict_at[{layer}, {head}, {token}] = {int(values[layer, head, token])}: {violated_rule}"
    return None


def _shifted(values: Tensor, start: int) -> Tensor:
    return torch.where(values < NEVER, values + start, NEVER).to(values.dtype)


def _batch_evict_at(rows: Sequence[Tensor], starts: Sequence[int], width: int) -> Tensor:
    """Return int32 [layers, rows, kv heads, width]; padding has 0, so that no query sees it."""
    return by_layer([_shifted(values, start) for values, start in zip(rows, starts, strict=True)], starts, width, 0)


def _pack_evict_at(documents: Sequence[Tensor], starts: Sequence[int], ends: Sequence[int]) -> Tensor:
    places = zip(documents, starts, ends, strict=True)
    return torch.cat([_shifted(values, start).clamp(max=end) for values, start, end in places], dim=-1).to(torch.int32)


EVICT_AT = Section(
    name="evict_at",
    dtype=torch.int32,
    axes=("layer", "kv_head", "token"),
    joined="token",
    check=_check_evict_at,
    batch=_batch_evict_at,
    pack=_pack_evict_at,
)

# ---- windowed: int32 [L], the sliding window of each layer in tokens, 0 for a layer whose entries a policy evicts ----


def window_evictions(window: int, length: int) -> Tensor:
    """Return evict_at of a layer with a sliding window for a sequence of `length` tokens: int32 [length].

    Query q sees the tokens after q - window, so it evicts token t = q - window.
    """
    evict_at = torch.arange(window, window + length, dtype=torch.int32)
    return evict_at.masked_fill_(evict_at >= length - 1, NEVER)


def _check_windowed(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """Some layer, but not every layer, has a window, and evict_at of these layers is t + window."""
    if bool((values < 0).any()) or bool((values == 0).all()) or bool((values > 0).all()):
        return f"windowed {values.tolist()[:20]} must have windows >= 1 for some layers, and 0 for the other layers"
    evict_at = sections["evict_at"]
    for layer in values.nonzero()[:, 0].tolist():
        window = int(values[layer])
        if bool((evict_at[layer] != window_evictions(min(window, NEVER), evict_at.shape[-1])).any()):
            return f"evict_at of layer {layer} is not that of its sliding window of {window} tokens"
    return None


WINDOWED = Section(
    name="windowed",
    dtype=torch.int32,
    axes=("layer",),
    joined="layer",
    check=_check_windowed,
    batch=_shared_settings,
    pack=lambda documents, starts, ends: _shared_settings(documents, starts, 0),
)

# ---- routed: int16 [M, S, K], the experts that a token takes in each of the model's M layers, in the order of the
#      router's choice. A hybrid model has more layers than evict_at, which has those with keys and values
#      -1 means that none is recorded: a layer without experts, padding, and the last token, which is never fed


def _check_routed(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """A layer with experts has distinct experts for every token except the last; other layers have -1 throughout."""
    if len(values) < (layers := len(sections["evict_at"])):
        return f"routed has {len(values)} layers, but evict_at has {layers}"
    recorded = values >= 0
    if bool((values < -1).any()) or bool((recorded.any(-1) != recorded.all(-1)).any()):
        return "routed has a token with some experts recorded and others not: either all of its experts are -1, or none"
    tokens = recorded.any(-1)  # [M, S]
    if bool(tokens[:, -1:].any()):
        return "routed has experts for the last token, which is never fed"
    partial = tokens.any(-1) & ~tokens[:, :-1].all(-1)
    if bool(partial.any()):
        layer = int(partial.nonzero()[0])
        token = int((~tokens[layer]).nonzero()[0])
        return f"routed has no experts for token {token} of layer {layer}, although this layer has experts"
    ordered = values.sort(-1).values
    if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()):
        return "routed has the same expert twice for one token"
    return None


def _batch_routed(rows: Sequence[Tensor], starts: Sequence[int], width: int) -> Tensor:
    """Return int16 [layers, rows, width, K]."""
    return by_layer([values[:, None] for values in rows], starts, width, -1)[:, :, 0]


ROUTED = Section(
    name="routed",
    dtype=torch.int16,
    axes=("model_layer", "token", "choice"),
    joined="token",
    check=_check_routed,
    batch=_batch_routed,
    pack=lambda documents, starts, ends: torch.cat(list(documents), dim=1),
)

# ---- compacted_at: the end of a context that was compacted once; without further sections it cannot be replayed -----


def _check_compacted_at(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """It is one position inside the prompt, and all evictions are at this position."""
    evict_at = sections["evict_at"]
    length = evict_at.shape[-1] if prompt is None else prompt + 1
    if len(values) != 1 or not 0 < int(values[0]) < length:
        where = f"a sequence of {length} tokens" if prompt is None else f"a prompt of {prompt} tokens"
        return f"compacted_at {values.tolist()[:20]} is not a position in {where}"
    if bool(((evict_at != values) & (evict_at != NEVER)).any()):
        return f"a token is evicted at a position other than {int(values[0])}, the end of the compacted context"
    return None


COMPACTED_AT = numbers("compacted_at", torch.int32, "context_end", _check_compacted_at, batch_times)

SUPPORT = "support_sizes", "support", "support_bits"
"""The sections that say from which tokens each token was drawn (support.py). Views do not read them."""

SECTIONS: dict[str, Section] = {section.name: section for section in (EVICT_AT, WINDOWED, ROUTED, COMPACTED_AT)}
"""The sections that belong to no method, by name. evict_at is the first; it is the only one that every trace has."""


def declared() -> dict[str, Section]:
    """Return the sections that a trace may have, by name: SECTIONS, supports, and those of all registered methods."""
    of_methods = (config.sections for config in CONFIGS.values() if config.sections is not None)
    modules = dict.fromkeys(["sparse_rl.trace.support", *of_methods])
    return SECTIONS | {section.name: section for module in modules for section in import_module(module).SECTIONS}


def policy_part(sections: Sections) -> dict[str, Tensor]:
    """Return the sections that a cache policy recorded: `evict_at` of the layers without a sliding window, int32
    [layers without a window, Hkv, S], or [.., B, Hkv, S] of a batch; all other sections unchanged, but
    without `windowed` and `routed`, which the model's windows and routers determine, and without supports.

    sections : name -> values of one trace, or of a batch
    """
    part = {name: values for name, values in sections.items() if name not in ("windowed", "routed", *SUPPORT)}
    if "windowed" in sections:
        part["evict_at"] = sections["evict_at"][sections["windowed"] == 0]
    return part
