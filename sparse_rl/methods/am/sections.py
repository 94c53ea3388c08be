"""Trace sections of Attention Matching: the times at which entries got new biases and values, the fit settings, and
the parts and reference queries of a context that was compacted once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sparse_rl.matching import compacted
from sparse_rl.trace.checks import NEVER, Sections, last_query
from sparse_rl.trace.sections import Section, batch_times, numbers

SETTINGS = 7  # length of refit_with
CONTEXT_SETTINGS = 4  # length of compacted_with
QUERY_NUMBERS = 3  # numbers for each reference query in compacted_queries


def check_refit_at(times: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """Check the times of the compactions, `refit_at`; return an error message, or None if they are valid.

    The times must ascend, from the end of the prompt to the last query. Tokens may be evicted only at these times.
    Each compaction must keep the sinks, the window, and as many other entries as `refit_with` says.
    """
    evict_at, last, shown = sections["evict_at"], last_query(sections), times.tolist()[:20]
    if bool((times.diff() <= 0).any()) or bool(((times < 1) | (times > last)).any()):
        return f"refit_at {shown} is not ascending from 1 to {last}, the position of the last query"
    if prompt is not None and bool((times < prompt).any()):
        return f"refit_at {shown} has a compaction inside the prompt of {prompt} tokens"
    evicted = evict_at < NEVER
    stray = evicted & ~torch.isin(evict_at, times)
    if bool(stray.any()):
        return f"a token is evicted at {int(evict_at[stray][0])}, but refit_at {shown} has no compaction there"
    sinks, window, refitted, queries = (int(number) for number in sections["refit_with"][:4])
    if len(times) and int(times[0]) < queries:
        return f"refit_at {shown} has a compaction before token {queries}; refit_with has {queries} reference queries"
    if bool(evicted[..., :sinks].any()):
        return f"one of the {sinks} sinks of refit_with is evicted"
    age = evict_at - torch.arange(evict_at.shape[-1], dtype=torch.int32)
    if bool((evicted & (age <= window)).any()):
        return f"a token is evicted while it is one of the last {window}, the window of refit_with"
    by_time = torch.zeros(*evict_at.shape[:2], len(times) + 1, dtype=torch.int64)
    by_time.scatter_add_(-1, torch.searchsorted(times, evict_at), torch.ones_like(evict_at, dtype=torch.int64))
    held = times - by_time[..., :-1].cumsum(-1)
    if bool((held != sinks + refitted + window).any()):
        layer, head, place = (int(i) for i in (held != sinks + refitted + window).nonzero()[0])
        return (
            f"the compaction at {int(times[place])} leaves {int(held[layer, head, place])} entries in layer {layer}, "
            f"kv head {head}, but refit_with says {sinks} + {refitted} + {window}"
        )
    return None


def check_refit_with(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """Check the fit settings, `refit_with`; return an error message, or None if they are valid.

    The seven numbers are sinks, window, refitted, reference queries, ridge and two flags
    (sparse_rl/matching/record.py).
    """
    message = f"refit_with {values.tolist()[:20]} is not a valid list of fit settings"
    if len(values) != SETTINGS or not bool((values.isfinite() & (values >= 0)).all()) or int(values[:4].max()) >= NEVER:
        return message
    sinks, window, refitted, queries, ridge, *flags = values.tolist()
    whole = all(number == int(number) for number in (sinks, window, refitted, queries))
    return None if whole and refitted and queries and ridge and set(flags) <= {0.0, 1.0} else message


def check_compacted_with(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """Check the fit settings of a compacted context, `compacted_with`; return an error message, or None.

    The four numbers are ridge, and flags for pursuit, biases and values (sparse_rl/matching/compacted.py).
    """
    if len(values) == CONTEXT_SETTINGS and bool(values.isfinite().all()):
        ridge, pursuit, *fitted = values.tolist()
        if ridge > 0 and {pursuit, *fitted} <= {0.0, 1.0} and any(fitted):
            return None
    return f"compacted_with {values.tolist()[:20]} is not a valid list of fit settings"


def check_compacted_parts(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """Check the bounds of the parts of a compacted context, `compacted_parts`; return an error message, or None.

    The bounds must ascend inside the context. Tokens outside the parts must stay.
    """
    end, shown = int(sections["compacted_at"]), values.tolist()[:20]
    if len(values) < 2 or bool((values.diff() <= 0).any()) or int(values[0]) < 0 or int(values[-1]) > end:
        return f"compacted_parts {shown} is not a list of at least two ascending positions from 0 to {end}"
    outside = sections["evict_at"].clone()
    outside[..., int(values[0]) : int(values[-1])] = NEVER
    if bool((outside != NEVER).any()):
        return f"a token is evicted that is in none of the parts of compacted_parts {shown}"
    return None


def check_compacted_queries(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """Check the reference queries of a compacted context, `compacted_queries`; return an error message, or None.

    Each row is a part, a token of the context, and a query head within its group or -1 for all of them. Every part must
    have a query.
    """
    end, parts = int(sections["compacted_at"]), len(sections["compacted_parts"]) - 1
    if values.shape[1] != QUERY_NUMBERS:
        return f"compacted_queries has {values.shape[1]} numbers per reference query, not {QUERY_NUMBERS}"
    low, high = torch.tensor([0, 0, compacted.GROUP]), torch.tensor([parts - 1, end - 1, NEVER - 1])
    if bool((wrong := ((values < low) | (values > high)).any(1)).any()):
        place = int(wrong.nonzero()[0])
        bounds = f"{parts} parts and {end} tokens"
        return f"compacted_queries[{place}] = {values[place].tolist()} is not a query of a context with {bounds}"
    if missing := sorted(set(range(parts)) - set(values[:, 0].tolist())):
        return f"compacted_queries has no reference query for part {missing[0]}"
    return None


def _batch_queries(rows: Sequence[Tensor], starts: Sequence[int], width: int) -> Tensor:
    """Batch reference queries; tokens are shifted by the start of their row: int32 [rows, longest row, 3]. The padding
    is a query of part -1, which does not exist.
    """
    shifted = [
        values + torch.tensor([0, start, 0], dtype=torch.int32) for values, start in zip(rows, starts, strict=True)
    ]
    return pad_sequence(shifted, batch_first=True, padding_value=-1)


def _others(name: str) -> tuple[str, ...]:
    return ("compacted_at", *(other for other in compacted.SECTIONS if other != name))


SECTIONS = (
    # the settings under which entries got new biases and values (sparse_rl/matching/record.py)
    numbers("refit_with", torch.float64, "setting", check_refit_with, needs=("refit_at",)),
    # the number of tokens seen at each compaction that fits entries
    numbers("refit_at", torch.int32, "compaction", check_refit_at, batch_times, ("refit_with",)),
    # the settings of the fits of a compacted context (sparse_rl/matching/compacted.py)
    numbers("compacted_with", torch.float64, "context_setting", check_compacted_with, needs=_others("compacted_with")),
    # the positions at which the parts of a compacted context begin, and the end of the last part
    numbers(
        "compacted_parts", torch.int32, "part_bound", check_compacted_parts, batch_times, _others("compacted_parts")
    ),
    # the reference queries of the parts of a compacted context
    Section(
        name="compacted_queries",
        dtype=torch.int32,
        axes=("reference", "column"),
        joined="reference",
        check=check_compacted_queries,
        batch=_batch_queries,
        needs=_others("compacted_queries"),
    ),
)
