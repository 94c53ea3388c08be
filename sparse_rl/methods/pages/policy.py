"""Clustered attention (LuKA section 3.2): no entry is evicted, but a query reads only a part of the entries.

Pages of tokens, their summaries, and the choice of the pages that a query opens; engine and trainer share this code,
which works on tensors over rows and kv heads. The pages that a query opens are recorded and replayed. There are three
departures from the paper; a setting restores each of the paper's forms:

- log n is added to the logit of a summary of n tokens. In equation 1, a summary weighs as much as one token
  (`bias: none`).
- One softmax covers all entries that are read. In equation 3, opening a page leaves its attention mass unchanged
  (`softmax: nested`).
- A summary is the mean of its page's tokens. In the experiments of section 4.2, tokens are weighted by a softmax over
  the attention that they received (`compressor: attention`; its temperature, to which the paper gives no value, is 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from sparse_rl.clock import part
from sparse_rl.kernels.topk import ranked
from sparse_rl.methods.config import ClusteredConfig
from sparse_rl.policies.base import Policy


@dataclass(frozen=True)
class Pages:
    """The division of tokens into pages (see __init__.py), as numbers that a trace holds."""

    size: int  # n, number of tokens of a page
    window: int  # minimum number of tokens between a page's end and its closing
    sinks: int  # number of tokens before the first page, always raw
    most: int  # K, maximum number of pages that a query opens
    weighed: bool  # True if log n is added to a summary's logit, so that it weighs as much as n tokens
    valued: bool  # False if the values of summaries are zero
    uniform: bool = True  # True if a summary is the plain mean of its tokens, else the section pi has their weights
    # True if one softmax covers all entries that are read; if False, the tokens of an opened page share the weight
    # that the page's summary has in the softmax over sinks, tail and summaries (equation 3), which cannot be replayed
    joint: bool = True

    @classmethod
    def of(cls, config: Any) -> Pages:
        return cls(
            config.page,
            config.window,
            config.sinks,
            config.open_pages,
            weighed=config.bias == "log_n",
            valued=config.values == "kept",
            uniform=config.compressor == "mean",
            joint=config.softmax == "joint",
        )

    @classmethod
    def read(cls, settings: Tensor) -> Pages:
        """Read the trace section paged_with, int32 [8]."""
        size, window, sinks, most, *flags = settings.tolist()
        return cls(size, window, sinks, most, *map(bool, flags))

    def settings(self) -> Tensor:
        """Return the trace section paged_with, int32 [8]: the fields of this class as numbers."""
        return torch.tensor(astuple(self), dtype=torch.int32)

    @property
    def bias(self) -> float:
        """Number that is added to the logit of a summary: log n, or 0."""
        return math.log(self.size) if self.weighed else 0.0

    def closed(self, prompt: Any, query: Any) -> Any:
        """Return the number of pages that are closed for a query, always the first ones; int or int64 tensor."""
        behind = query - self.window - self.sinks
        return (query >= prompt) * (behind > 0) * behind // self.size

    def closing(self, prompt: int, length: int) -> Tensor:
        """Return the trace section closed_at, int32: for each page that closes, the first query to see its summary."""
        numbers = torch.arange(int(self.closed(prompt, length - 2)))  # the last token is never fed, so it is no query
        return (self.sinks + (numbers + 1) * self.size + self.window).clamp(min=prompt).to(torch.int32)

    def tokens(self, pages: Tensor) -> Tensor:
        """Return the positions of the tokens of pages, given by their numbers: int64 [...] -> int64 [..., n]."""
        return self.sinks + pages[..., None] * self.size + torch.arange(self.size, device=pages.device)

    def all_closed(self, prompts: Sequence[int], queries: Sequence[int]) -> list[int]:
        return [int(self.closed(prompt, query)) for prompt, query in zip(prompts, queries, strict=True)]


class Clustered(Policy):
    config: ClusteredConfig
    score_reads = ()

    @property
    def pages(self) -> Pages:
        return Pages.of(self.config)

    def most_opened(self, closed: int) -> int:
        """Return the maximum number of pages that a query may open if `closed` pages are closed."""
        share = 1 if self.config.fraction is None else self.config.fraction
        return min(self.pages.most, math.ceil(share * closed - 1e-9))  # as floats, 0.07 x 100 is a little more than 7

    def most_read(self, prompt: int, fed: int) -> int:
        pages = self.pages

        def read(query: int) -> int:  # sinks, tail, and for each closed page its tokens or its summary
            closed = int(pages.closed(prompt, query))
            return query + 1 - (closed - self.most_opened(closed)) * (pages.size - 1)

        return max((read(query) for query in range(max(prompt, fed - pages.size), fed)), default=fed)


def summarise(keys: Tensor, values: Tensor, pages: Pages, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the keys and values of the pages' summaries, k_p = sum_t pi_t k_t and v_p = sum_t pi_t v_t.

    keys, values : [..., n, D], of the n tokens of each page, keys after RoPE
    weights : pi, float32 [..., n], which get no gradient; None means 1 / n for each token, the mean

    Returns (keys, values), each [..., D], in the dtypes of the inputs. Sampler and trainer both sum in float64 and then
    round to the dtype of the cache. If `Pages.valued` is False, the values are zero.
    """

    def mean(x: Tensor) -> Tensor:
        wide = x.double()
        result = wide.mean(-2) if weights is None else (wide * weights.double()[..., None]).sum(-2)
        return result.to(x.dtype)

    key, value = mean(keys), mean(values)
    return key, value if pages.valued else torch.zeros_like(value)


def random_weights(layer: int, heads: int, numbers: Tensor, size: int) -> Tensor:
    """Return summary weights, 1 for one random token of each of the pages `numbers`: float32 [heads, M, size]."""
    chosen = []
    for page in numbers.tolist():
        generator = torch.Generator().manual_seed((layer << 15) + page)  # only 32 bits of a seed count
        chosen.append(torch.randint(size, (heads,), generator=generator))
    one_hot = torch.nn.functional.one_hot(torch.stack(chosen, dim=1), size)
    return one_hot.to(numbers.device, torch.float32)


@part("choose", detail=True)
def choose(
    logits: Tensor, raw: int, most: int, threshold: float | None = None, allowed: Tensor | None = None
) -> Tensor:
    """Choose the pages to open for one query per row: the K = `most` with the largest attention mass, or fewer.

    The mass of a page is its summary's share in the softmax over the cover, the maximum over the query heads of a
    group. Among masses that are equal in float32, the earlier page is chosen.

    logits : [B, Hkv, G, raw + M], of the cover: first the raw entries, then the summaries of M pages; -inf marks
        entries that are not seen
    threshold, allowed : only pages with a larger mass are opened, and at most `allowed`, int64 [B]; None is no limit

    Returns the numbers of the pages, int64 [B, Hkv, K], filled up with -1.
    """
    mass = (logits[..., raw:] - logits.logsumexp(-1, keepdim=True)).amax(2)
    count = min(most, mass.shape[-1])
    best = ranked(mass.float(), torch.arange(mass.shape[-1], device=mass.device)).topk(count).indices
    too_small = mass.gather(-1, best) <= (math.log(threshold) if threshold else float("-inf"))
    if allowed is not None:
        too_small |= torch.arange(count, device=logits.device) >= allowed[:, None, None]
    opened = best.masked_fill(too_small, -1)
    return torch.nn.functional.pad(opened, (0, most - count), value=-1)
