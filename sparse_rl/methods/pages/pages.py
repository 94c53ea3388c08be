"""Pages of tokens: the closed pages, their summaries, and the pages that a query opens (LuKA section 3.2).

Engine and trainer share this code, which works on tensors over rows and kv heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from sparse_rl.clock import part
from sparse_rl.kernels.ranked import ranked


@dataclass(frozen=True)
class Pages:
    """The division of tokens into pages (sparse_rl/methods/pages/__init__.py), as numbers that a trace holds.

    size : n, number of tokens of a page
    window : minimum number of tokens between a page's end and its closing
    sinks : number of tokens before the first page, always raw
    most : K, maximum number of pages that a query opens
    weighed : True if log n is added to a summary's logit, so that it weighs as much as n tokens
    valued : False if the values of summaries are zero
    uniform : True if a summary is the plain mean of its tokens; if False, the trace section pi has the tokens' weights
    joint : True if one softmax covers all entries that are read; if False, the tokens of an opened page share the
        weight that the page's summary has in the softmax over sinks, tail and summaries (equation 3), and the trace
        cannot be replayed
    """

    size: int
    window: int
    sinks: int
    most: int
    weighed: bool
    valued: bool
    uniform: bool = True
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
        """Return the division under which a trace was sampled, from its section paged_with: int32 [8]."""
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
        """Return the number of pages that are closed for a query. The closed pages are always the first ones.

        The prompt's length and the query's position are ints or int64 tensors of one shape.
        """
        behind = query - self.window - self.sinks
        return (query >= prompt) * (behind > 0) * behind // self.size

    def closing(self, prompt: int, length: int) -> Tensor:
        """Return the trace section closed_at, int32: for each page that closes, the first query that sees its summary.

        The sequence has `length` tokens; the last one is never fed, so it is not a query.
        """
        numbers = torch.arange(int(self.closed(prompt, length - 2)))
        return (self.sinks + (numbers + 1) * self.size + self.window).clamp(min=prompt).to(torch.int32)

    def tokens(self, pages: Tensor) -> Tensor:
        """Return the positions of the n tokens of each page: int64 [..., n]; `pages` are page numbers, int64 [...]."""
        return self.sinks + pages[..., None] * self.size + torch.arange(self.size, device=pages.device)

    def all_closed(self, prompts: Sequence[int], queries: Sequence[int]) -> list[int]:
        """Return the number of closed pages of each row, from the prompts' lengths and the queries' positions."""
        return [int(self.closed(prompt, query)) for prompt, query in zip(prompts, queries, strict=True)]


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


def attention_weights(received: Tensor) -> Tensor:
    return received.softmax(-1).float()


def random_weights(layer: int, heads: int, numbers: Tensor, size: int) -> Tensor:
    """Return summary weights that are 1 for one random token of each page, else 0: float32 [heads, M, size].

    The random choice depends only on layer, head and page; `numbers` has the M page numbers.
    """
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
    """Choose the pages to open for one query per row: those with the largest attention mass.

    The softmax runs over the cover. The mass of a page is its summary's share, the maximum over the query heads of a
    group. Among masses that are equal in float32, the earlier page is chosen.

    logits : [B, Hkv, G, raw + M], logits of the cover for G query heads per kv head: first the raw entries, then the
        summaries of M pages; -inf marks entries that are not seen
    most : K, maximum number of pages to open
    threshold : only pages with a larger mass are opened; None means no threshold
    allowed : int64 [B], maximum number of pages per row; None means K

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
