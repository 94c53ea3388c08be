"""Values that no sampler can have recorded: each section is held against itself, the others, and its prompt.

A check takes (values of its section, all sections of the trace by name, tokens of the prompt or None where nobody knows
them), and returns the mistake in words, or None. Shapes, dtypes and the sections that belong together are checked
before (record.py). What matters most: nothing lets a query see a token that comes later.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

NEVER = 2**30
"""In evict_at: no query misses the token; larger than any position."""

SETTINGS = 7  # numbers in refit_with
PAGING = 8  # numbers in paged_with
ROUNDING = 1e-4  # of the sum of a page's pi, in float32

Sections = Mapping[str, Tensor]


def last_query(sections: Sections) -> int:
    """The position of the last query: the last token is sampled, and never fed."""
    return sections["evict_at"].shape[-1] - 2


def check_evict_at(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """A token sees itself, so it is evicted after its own position; and before the last query, or never."""
    if 0 in values.shape:
        return f"evict_at {list(values.shape)} is empty: a trace has a layer, a kv head and a token"
    last = last_query(sections)
    early = values <= torch.arange(values.shape[-1], dtype=torch.int32)
    late = (values > last) & (values != NEVER)
    kept = f"the last query is at {last}; a token that no query misses has {NEVER}"
    for wrong, why in ((early, "a token is evicted after its own position"), (late, kept)):
        if bool(wrong.any()):
            layer, head, token = (int(i) for i in wrong.nonzero()[0])
            return f"evict_at[{layer}, {head}, {token}] = {int(values[layer, head, token])}: {why}"
    return None


# ---- refit_at, refit_with, compacted_at -----------------------------------------------------------------------------


def check_refit_at(times: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """Ascending, after the prompt and before the last query; tokens go at these times alone, and so many stay.

    Each compaction keeps the sinks, the window and `refitted` entries between them (see `check_refit_with`).
    """
    evict_at, last, said = sections["evict_at"], last_query(sections), times.tolist()[:20]
    if bool((times.diff() <= 0).any()) or bool(((times < 1) | (times > last)).any()):
        return f"refit_at {said} is not ascending from 1 to {last}, where the last query is"
    if prompt is not None and bool((times < prompt).any()):
        return f"refit_at {said} has a compaction inside the prompt of {prompt} tokens"
    gone = evict_at < NEVER
    stray = gone & ~torch.isin(evict_at, times)
    if bool(stray.any()):
        return f"a token is evicted at {int(evict_at[stray][0])}, where refit_at {said} has no compaction"
    sinks, window, refitted, queries = (int(number) for number in sections["refit_with"][:4])
    if len(times) and int(times[0]) < queries:
        return f"refit_at {said} has a compaction before there are the {queries} reference queries of refit_with"
    if bool(gone[..., :sinks].any()):
        return f"one of the {sinks} sinks of refit_with is evicted"
    age = evict_at - torch.arange(evict_at.shape[-1], dtype=torch.int32)
    if bool((gone & (age <= window)).any()):
        return f"a token is evicted while it is one of the last {window}, the window of refit_with"
    by_time = torch.zeros(*evict_at.shape[:2], len(times) + 1, dtype=torch.int64)
    by_time.scatter_add_(-1, torch.searchsorted(times, evict_at), torch.ones_like(evict_at, dtype=torch.int64))
    held = times - by_time[..., :-1].cumsum(-1)
    if bool((held != sinks + refitted + window).any()):
        layer, head, place = (int(i) for i in (held != sinks + refitted + window).nonzero()[0])
        return (
            f"the compaction at {int(times[place])} leaves {int(held[layer, head, place])} entries in layer {layer}, "
            f"kv head {head}, and refit_with says {sinks} + {refitted} + {window}"
        )
    return None


def check_refit_with(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """sinks, window, refitted, reference queries, ridge, and two flags; see sparse_rl/matching/record.py."""
    wrong = f"refit_with {values.tolist()[:20]} has a number that no fit is made with"
    if len(values) != SETTINGS or not bool((values.isfinite() & (values >= 0)).all()) or int(values[:4].max()) >= NEVER:
        return wrong
    sinks, window, refitted, queries, ridge, *flags = values.tolist()
    whole = all(number == int(number) for number in (sinks, window, refitted, queries))
    return None if whole and refitted and queries and ridge and set(flags) <= {0.0, 1.0} else wrong


def check_compacted_at(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """One place in the sequence, inside its prompt; nothing is evicted at another."""
    evict_at = sections["evict_at"]
    length = evict_at.shape[-1] if prompt is None else prompt + 1
    if len(values) != 1 or not 0 < int(values[0]) < length:
        where = f"a sequence of {length} tokens" if prompt is None else f"a prompt of {prompt} tokens"
        return f"compacted_at {values.tolist()[:20]} is no place in {where}"
    if bool(((evict_at != values) & (evict_at != NEVER)).any()):
        return f"a token is evicted elsewhere than at the end of the compacted context, {int(values[0])}"
    return None


# ---- opened, closed_at, paged_with, paged_layers, pi ----------------------------------------------------------------


def paged_layers(sections: Sections) -> Tensor:
    """The layers whose tokens are paged: int64 [N]."""
    return sections.get("paged_layers", torch.arange(sections["evict_at"].shape[0])).long()


def check_opened(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """A query opens pages that have closed for it, each once; nothing in a layer without pages."""
    most = int(sections["paged_with"][3])
    if values.shape[-1] != most:
        return f"opened has {values.shape[-1]} places for pages, and paged_with says {most}"
    queries = torch.arange(values.shape[2])
    closed = torch.searchsorted(sections["closed_at"], queries.int(), right=True)
    closed[-1] = 0  # the last token is never fed
    beyond = (values < -1) | (values >= closed[:, None])
    if bool(beyond.any()):
        layer, head, query, place = (int(i) for i in beyond.nonzero()[0])
        return (
            f"opened[{layer}, {head}, {query}] has page {int(values[layer, head, query, place])}, where "
            f"{int(closed[query])} pages have closed, from page 0 on; -1 is no page"
        )
    for step in range(1, most):
        if bool(((values[..., step:] == values[..., :-step]) & (values[..., step:] >= 0)).any()):
            return "opened has a page twice for one query"
    if bool((_outside(values, sections) >= 0).any()):
        return "opened has a page in a layer that is none of paged_layers"
    return None


def check_closed_at(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """Page p closes `window` tokens after its own last one, or at the end of the prompt, if that is later.

    All pages are there that close by the last query.
    """
    size, window, sinks = (int(number) for number in sections["paged_with"][:3])
    said, last = values.tolist()[:20], last_query(sections)
    earliest = sinks + window + size * torch.arange(1, len(values) + 2)
    behind = values > earliest[:-1]
    if prompt is None:  # those that close late all close at the end of the prompt
        prompt = int(values[0]) if bool(behind.any()) else 0
    closes = earliest.clamp(min=prompt)
    if not torch.equal(values.long(), closes[:-1]) or bool((values > last).any()):
        return (
            f"closed_at {said} is wrong: pages of {size} tokens behind {sinks} sinks close {window} tokens after their "
            f"end, not inside the prompt, and not after the last query at {last}"
        )
    if (len(values) or prompt) and int(closes[-1]) <= last:
        return f"closed_at {said} lacks page {len(values)}, which closes at {int(closes[-1])}"
    paged = sections["evict_at"].index_select(0, paged_layers(sections))
    if bool((paged != NEVER).any()):
        return "evict_at has an eviction in a layer whose tokens are paged: these stay, and closed_at says the rest"
    return None


def check_paged_with(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """size, window, sinks, most, and four flags; see sparse_rl/methods/pages/pages.py."""
    numbers = values.tolist()
    if len(numbers) != PAGING or min(numbers) < 0 or not numbers[0] or not set(numbers[4:]) <= {0, 1}:
        return f"paged_with {numbers[:20]} is not how tokens can be paged"
    if max(numbers) >= NEVER:
        return f"paged_with {numbers} has a number that is no count of tokens"
    if bool(numbers[6]) == ("pi" in sections):
        return "pi must be there exactly where summaries are not plain means"
    return None


def check_paged_layers(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """At least one layer, ascending."""
    layers, count = values.tolist(), sections["evict_at"].shape[0]
    if not layers or layers != sorted({layer for layer in layers if 0 <= layer < count}):
        return f"paged_layers {layers[:20]} is not ascending, from layer 0 to {count - 1}"
    return None


def check_pi(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """Between 0 and 1, with the sum 1 over a closed page, and 0 outside of closed pages."""
    if not bool(((values >= 0) & (values <= 1)).all()):
        return "pi has a weight that is not between 0 and 1"
    size, _, sinks = (int(number) for number in sections["paged_with"][:3])
    end = sinks + size * len(sections["closed_at"])
    paged = values.index_select(0, paged_layers(sections))
    sums = paged[..., sinks:end].unflatten(-1, (-1, size)).sum(-1) if end > sinks else paged.new_ones(1)
    if bool(((sums - 1).abs() > ROUNDING).any()):
        return f"pi of a closed page's tokens sums to {float(sums[(sums - 1).abs() > ROUNDING][0]):.4g}, not 1"
    if bool(paged[..., :sinks].any()) or bool(paged[..., end:].any()) or bool(_outside(values, sections).any()):
        return "pi has a weight for a token that is in no closed page"
    return None


def _outside(values: Tensor, sections: Sections) -> Tensor:
    """The values [layers, ...] of the layers that are not paged."""
    paged = set(paged_layers(sections).tolist())
    others = [layer for layer in range(values.shape[0]) if layer not in paged]
    return values[others]
