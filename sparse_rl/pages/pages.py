"""The settings of clustered attention, and which pages are closed: functions of counts alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch


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
    def read(cls, settings: torch.Tensor) -> Pages:
        """The paging that a trace was sampled under. settings : the section paged_with, int32 [8]"""
        size, window, sinks, most, *flags = settings.tolist()
        return cls(size, window, sinks, most, *map(bool, flags))

    def settings(self) -> torch.Tensor:
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

    def closing(self, prompt: int, length: int) -> torch.Tensor:
        """The section closed_at: int32 [P], the first query that sees each page as a summary, of those that close.

        prompt : tokens of the prompt; length : S, those of the whole sequence, whose last is no query
        """
        numbers = torch.arange(int(self.closed(prompt, length - 2)))
        return (self.sinks + (numbers + 1) * self.size + self.window).clamp(min=prompt).to(torch.int32)

    def tokens(self, pages: torch.Tensor) -> torch.Tensor:
        """The positions of the tokens of pages: int64 [..., n]. pages : their numbers, int64 [...]"""
        return self.sinks + pages[..., None] * self.size + torch.arange(self.size, device=pages.device)

    def all_closed(self, prompts: Sequence[int], queries: Sequence[int]) -> list[int]:
        """`closed` of each row, given its prompt's length and its query's position."""
        return [int(self.closed(prompt, query)) for prompt, query in zip(prompts, queries, strict=True)]
