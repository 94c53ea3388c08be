"""Trace sections of Attention Matching: the times at which entries got new biases and values, and the fit settings."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl.trace.checks import NEVER, Sections, last_query
from sparse_rl.trace.sections import batch_times, numbers

SETTINGS = 7  # length of refit_with


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


SECTIONS = (
    # the settings under which entries got new biases and values (sparse_rl/matching/record.py)
    numbers("refit_with", torch.float64, "setting", check_refit_with, needs=("refit_at",)),
    # the number of tokens seen at each compaction that fits entries
    numbers("refit_at", torch.int32, "compaction", check_refit_at, batch_times, ("refit_with",)),
)
