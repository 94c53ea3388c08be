"""Pages of tokens: which are closed, their summaries, and which of them a query opens (LuKA section 3.2).

Pure tensor code over rows and kv heads, which engine and trainer share.
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
    """How tokens are paged, in numbers that a trace holds (see the package for what a page is).

    size : n, tokens of a page
    window : tokens between a page's end and its closing, at least
    sinks : tokens before the first page, always raw
    most : K, pages that a query opens, at most
    weighed : whether a summary's logit has log n added, so that it weighs as much as n tokens; else it weighs as one
    valued : whether a summary has a value; else it is zero
    uniform : whether a summary is the plain mean; else the record says how much of it each token is (section pi)
    joint : whether one softmax goes over all that is read; else the tokens of an opened page share the weight that its
        summary has in the softmax over sinks, tail and summaries (equation 3), which is not replayed
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
        """The paging of a policy's settings. config : ClusteredConfig"""
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
        """The paging that a trace was sampled under. settings : the section paged_with, int32 [8]"""
        size, window, sinks, most, *flags = settings.tolist()
        return cls(size, window, sinks, most, *map(bool, flags))

    def settings(self) -> Tensor:
        """The section paged_with: int32 [8]."""
        return torch.tensor(astuple(self), dtype=torch.int32)

    @property
    def bias(self) -> float:
        """What is added to the logit of a summary: log n, or 0."""
        return math.log(self.size) if self.weighed else 0.0

    def closed(self, prompt: Any, query: Any) -> Any:
        """How many pages, the first ones, a query sees as summaries.

        prompt : tokens of the prompt; query : its position; ints, or int64 tensors of one shape
        """
        behind = query - self.window - self.sinks
        return (query >= prompt) * (behind > 0) * behind // self.size

    def closing(self, prompt: int, length: int) -> Tensor:
        """The section closed_at: int32 [P], the first query that sees each page as a summary, of those that close.

        prompt : tokens of the prompt; length : S, those of the whole sequence, whose last is no query
        """
        numbers = torch.arange(int(self.closed(prompt, length - 2)))
        return (self.sinks + (numbers + 1) * self.size + self.window).clamp(min=prompt).to(torch.int32)

    def tokens(self, pages: Tensor) -> Tensor:
        """The positions of the tokens of pages: int64 [..., n]. pages : their numbers, int64 [...]"""
        return self.sinks + pages[..., None] * self.size + torch.arange(self.size, device=pages.device)

    def all_closed(self, prompts: Sequence[int], queries: Sequence[int]) -> list[int]:
        """`closed` of each row, given its prompt's length and its query's position."""
        return [int(self.closed(prompt, query)) for prompt, query in zip(prompts, queries, strict=True)]


def summarise(keys: Tensor, values: Tensor, pages: Pages, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The summaries of pages, k_p = sum_t pi_t k_t and v_p likewise: (keys, values) [..., D], in their own dtype.

    keys, values : of the tokens of each page, [..., n, D], keys after RoPE
    weights : pi, float32 [..., n], which get no gradient; None: 1 / n each, the mean

    The sums are made in float64 and then rounded, as the cache holds them, in the sampler and in the trainer alike.
    Without `Pages.valued` the values are zero.
    """

    def mean(x: Tensor) -> Tensor:
        wide = x.double()
        made = wide.mean(-2) if weights is None else (wide * weights.double()[..., None]).sum(-2)
        return made.to(x.dtype)

    key, value = mean(keys), mean(values)
    return key, value if pages.valued else torch.zeros_like(value)


def attention_weights(received: Tensor) -> Tensor:
    """How much of a summary each token is by the attention that it got, pi = softmax(w) over a page: float32 [..., n].

    received : w, the attention that the page's tokens have got as it closes, [..., n]
    """
    return received.softmax(-1).float()


def random_weights(layer: int, heads: int, numbers: Tensor, size: int) -> Tensor:
    """pi = 1 for one token of each page, 0 for the others: float32 [heads, M, size].

    numbers : int64 [M], the pages; the tokens depend on layer, head and page alone
    """
    picked = []
    for page in numbers.tolist():
        generator = torch.Generator().manual_seed((layer << 15) + page)  # of a seed no more than 32 bits count
        picked.append(torch.randint(size, (heads,), generator=generator))
    one_hot = torch.nn.functional.one_hot(torch.stack(picked, dim=1), size)
    return one_hot.to(numbers.device, torch.float32)


def choose(
    logits: Tensor, raw: int, most: int, threshold: float | None = None, allowed: Tensor | None = None
) -> Tensor:
    """The pages to open: int64 [B, Hkv, K], -1 where there are fewer.

    logits : [B, Hkv, G, raw + M] of the cover, raw entries first, then M summaries; -inf: not seen
    most : K
    threshold : pages whose mass is no larger stay closed; None: all masses will do
    allowed : int64 [B], at most so many for a row; None: K

    Those of largest mass under the softmax over the cover, the largest over the group's query heads; of masses that are
    equal in float32 the earlier page.
    """
    mass = (logits[..., raw:] - logits.logsumexp(-1, keepdim=True)).amax(2)
    count = min(most, mass.shape[-1])
    best = ranked(mass.float(), torch.arange(mass.shape[-1], device=mass.device)).topk(count).indices
    too_small = mass.gather(-1, best) <= (math.log(threshold) if threshold else float("-inf"))
    if allowed is not None:
        too_small |= torch.arange(count, device=logits.device) >= allowed[:, None, None]
    opened = best.masked_fill(too_small, -1)
    return torch.nn.functional.pad(opened, (0, most - count), value=-1)
