"""Pages of tokens: the closed pages, their summaries, and the pages that a query opens (LuKA section 3.2).

Pure tensor code over rows and kv heads, shared by engine and trainer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from sparse_rl.kernels.ranked import ranked


@dataclass(frozen=True)
class Pages:
    """The division of tokens into pages, as numbers that a trace holds (the package docstring defines pages).

    size : n, number of tokens of a page
    window : minimum number of tokens between a page's end and its closing
    sinks : number of tokens before the first page, always raw
    most : K, maximum number of pages that a query opens
    weighed : True if log n is added to a summary's logit, so that it weighs as much as n tokens; else as much as one
    valued : True if a summary has a value; else its value is zero
    uniform : True if a summary is the plain mean; else the trace has the weight of each token in it (section pi)
    joint : True if one softmax covers everything that is read; else the tokens of an opened page share the weight that
        its summary has in the softmax over sinks, tail and summaries (equation 3), which is not replayed
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
        """The division that a policy's settings define. config : ClusteredConfig"""
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
        """The division that a trace was sampled under. settings : the section paged_with, int32 [8]"""
        size, window, sinks, most, *flags = settings.tolist()
        return cls(size, window, sinks, most, *map(bool, flags))

    def settings(self) -> Tensor:
        """The section paged_with: int32 [8]."""
        return torch.tensor(astuple(self), dtype=torch.int32)

    @property
    def bias(self) -> float:
        """Number that is added to the logit of a summary: log n, or 0."""
        return math.log(self.size) if self.weighed else 0.0

    def closed(self, prompt: Any, query: Any) -> Any:
        """Number of closed pages, always the first pages, whose summaries a query sees.

        prompt : length of the prompt; query : the query's position; ints, or int64 tensors of one shape
        """
        behind = query - self.window - self.sinks
        return (query >= prompt) * (behind > 0) * behind // self.size

    def closing(self, prompt: int, length: int) -> Tensor:
        """The section closed_at: int32 [P], for each page that closes, the first query that sees its summary.

        prompt : length of the prompt; length : S, length of the whole sequence, whose last token is not a query
        """
        numbers = torch.arange(int(self.closed(prompt, length - 2)))
        return (self.sinks + (numbers + 1) * self.size + self.window).clamp(min=prompt).to(torch.int32)

    def tokens(self, pages: Tensor) -> Tensor:
        """The positions of the tokens of pages: int64 [..., n]. pages : page numbers, int64 [...]"""
        return self.sinks + pages[..., None] * self.size + torch.arange(self.size, device=pages.device)

    def all_closed(self, prompts: Sequence[int], queries: Sequence[int]) -> list[int]:
        """`closed` of each row, from the prompts' lengths and the queries' positions."""
        return [int(self.closed(prompt, query)) for prompt, query in zip(prompts, queries, strict=True)]


def summarise(keys: Tensor, values: Tensor, pages: Pages, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The summaries of pages, k_p = sum_t pi_t k_t and v_p likewise: (keys, values) [..., D], in their own dtype.

    keys, values : [..., n, D], of the tokens of each page, keys after RoPE
    weights : pi, float32 [..., n], which get no gradient; None means 1 / n each, the mean

    Sampler and trainer both sum in float64 and then round to the dtype of the cache. Without `Pages.valued` the values
    are zero.
    """

    def mean(x: Tensor) -> Tensor:
        wide = x.double()
        result = wide.mean(-2) if weights is None else (wide * weights.double()[..., None]).sum(-2)
        return result.to(x.dtype)

    key, value = mean(keys), mean(values)
    return key, value if pages.valued else torch.zeros_like(value)


def attention_weights(received: Tensor) -> Tensor:
    """Weights of tokens in a summary by the attention that they received, pi = softmax(w): float32 [..., n].

    received : w, [..., n], attention that the page's tokens have received when the page closes
    """
    return received.softmax(-1).float()


def random_weights(layer: int, heads: int, numbers: Tensor, size: int) -> Tensor:
    """pi = 1 for one token of each page, 0 for the others: float32 [heads, M, size].

    numbers : int64 [M], page numbers; the choice of tokens depends only on layer, head and page
    """
    chosen = []
    for page in numbers.tolist():
        generator = torch.Generator().manual_seed((layer << 15) + page)  # only 32 bits of a seed count
        chosen.append(torch.randint(size, (heads,), generator=generator))
    one_hot = torch.nn.functional.one_hot(torch.stack(chosen, dim=1), size)
    return one_hot.to(numbers.device, torch.float32)


def choose(
    logits: Tensor, raw: int, most: int, threshold: float | None = None, allowed: Tensor | None = None
) -> Tensor:
    """Choose the pages to open: int64 [B, Hkv, K], filled up with -1.

    logits : [B, Hkv, G, raw + M] of the cover, raw entries first, then M summaries; -inf marks entries not seen
    most : K
    threshold : only pages with a larger mass are opened; None means no threshold
    allowed : int64 [B], maximum number of pages per row; None means K

    These are the pages of largest mass under the softmax over the cover; the mass of a page is the maximum over the
    group's query heads. Among masses that are equal in float32, the earlier page is chosen.
    """
    mass = (logits[..., raw:] - logits.logsumexp(-1, keepdim=True)).amax(2)
    count = min(most, mass.shape[-1])
    best = ranked(mass.float(), torch.arange(mass.shape[-1], device=mass.device)).topk(count).indices
    too_small = mass.gather(-1, best) <= (math.log(threshold) if threshold else float("-inf"))
    if allowed is not None:
        too_small |= torch.arange(count, device=logits.device) >= allowed[:, None, None]
    opened = best.masked_fill(too_small, -1)
    return torch.nn.functional.pad(opened, (0, most - count), value=-1)
