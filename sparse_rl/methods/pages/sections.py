"""Trace sections of clustered attention: the division into pages, their closing, and the pages that queries opened.

Checks are those of sparse_rl/trace/sections.py.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import torch
from torch import Tensor

from sparse_rl.methods.pages.policy import Pages
from sparse_rl.trace.sections import NEVER, Section, Sections, batch_times, by_layer, last_query, numbers

ROUNDING = 1e-4  # tolerance of the sum of a page's pi, in float32
PAGED = ("paged_with", "closed_at", "opened")


def paged_layers(sections: Sections) -> Tensor:
    """Return the numbers of the layers whose tokens are divided into pages, int64 [number of such layers]."""
    return sections.get("paged_layers", torch.arange(sections["evict_at"].shape[0])).long()


def _check_opened(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """Each query opens only closed pages, no page twice, and no page in a layer without pages."""
    most = int(sections["paged_with"][3])
    if values.shape[-1] != most:
        return f"opened has {values.shape[-1]} places for pages, but paged_with says {most}"
    queries = torch.arange(values.shape[2])
    closed = torch.searchsorted(sections["closed_at"], queries.int(), right=True)
    closed[-1] = 0  # the last token is never fed
    beyond = (values < -1) | (values >= closed[:, None])
    if bool(beyond.any()):
        layer, head, query, place = (int(i) for i in beyond.nonzero()[0])
        return (
            f"opened[{layer}, {head}, {query}] is page {int(values[layer, head, query, place])}, but only "
            f"{int(closed[query])} pages, numbered from 0, have closed; -1 means no page"
        )
    for step in range(1, most):
        if bool(((values[..., step:] == values[..., :-step]) & (values[..., step:] >= 0)).any()):
            return "opened has a page twice for one query"
    if bool((_outside(values, sections) >= 0).any()):
        return "opened has a page in a layer that is not in paged_layers"
    return None


def _check_closed_at(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """Each page closes `window` tokens after its last token, or at the end of the prompt if that is later; all pages
    that close by the last query are listed.
    """
    size, window, sinks = (int(number) for number in sections["paged_with"][:3])
    shown, last = values.tolist()[:20], last_query(sections)
    earliest = sinks + window + size * torch.arange(1, len(values) + 2)
    behind = values > earliest[:-1]
    if prompt is None:  # pages that close later than necessary all close at the end of the prompt
        prompt = int(values[0]) if bool(behind.any()) else 0
    closes = earliest.clamp(min=prompt)
    if not torch.equal(values.long(), closes[:-1]) or bool((values > last).any()):
        return (
            f"closed_at {shown} is wrong: pages of {size} tokens after {sinks} sinks close {window} tokens after their "
            f"end, not inside the prompt, and not after the last query at {last}"
        )
    if (len(values) or prompt) and int(closes[-1]) <= last:
        return f"closed_at {shown} lacks page {len(values)}, which closes at {int(closes[-1])}"
    paged = sections["evict_at"].index_select(0, paged_layers(sections))
    if bool((paged != NEVER).any()):
        return "evict_at has an eviction in a layer whose tokens are paged; such a layer never evicts"
    return None


def _check_paged_with(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    numbers = values.tolist()
    if len(numbers) != len(fields(Pages)) or min(numbers) < 0 or not numbers[0] or not set(numbers[4:]) <= {0, 1}:
        return f"paged_with {numbers[:20]} is not a valid division of tokens into pages"
    if max(numbers) >= NEVER:
        return f"paged_with {numbers} has a number that is too large for a count of tokens"
    if bool(numbers[6]) == ("pi" in sections):
        return "pi must be present if, and only if, summaries are not plain means"
    return None


def _check_paged_layers(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    layers, count = values.tolist(), sections["evict_at"].shape[0]
    if not layers or layers != sorted({layer for layer in layers if 0 <= layer < count}):
        return f"paged_layers {layers[:20]} is not an ascending list of layers from 0 to {count - 1}"
    return None


def _check_pi(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """The weights are between 0 and 1, sum to 1 over each closed page, and are 0 outside closed pages."""
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
    """Return the part of `values` [layers, ...] that belongs to layers without pages."""
    paged = set(paged_layers(sections).tolist())
    others = [layer for layer in range(values.shape[0]) if layer not in paged]
    return values[others]


SECTIONS = (
    # the division of tokens into pages (pages.py)
    numbers("paged_with", torch.int32, "page_setting", _check_paged_with, needs=PAGED),
    # the global layers whose tokens are paged, if not all are
    numbers("paged_layers", torch.int32, "paged_layer", _check_paged_layers, needs=PAGED),
    # for each page that closes, from page 0 on, the first query that reads the page's summary
    numbers("closed_at", torch.int32, "closed_page", _check_closed_at, batch_times, PAGED),
    # the pages that each query reads token by token, numbered within their row; -1 means no page
    Section(
        name="opened",
        dtype=torch.int16,
        axes=("global_layer", "kv_head", "token", "open_page"),
        joined="token",
        check=_check_opened,
        batch=partial(by_layer, empty=-1),
        needs=PAGED,
    ),
    # the weight of each token in its page's summary, if the weights are not all equal
    Section(
        name="pi",
        dtype=torch.float32,
        axes=("global_layer", "kv_head", "token"),
        joined="token",
        check=_check_pi,
        batch=partial(by_layer, empty=0.0),
        needs=PAGED,
    ),
)
