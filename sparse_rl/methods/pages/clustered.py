"""Clustered attention: nothing goes, but a query reads little of it (sparse_rl/methods/pages).

LuKA section 3.2. Which pages a query opens is recorded, and replayed. Three departures: log n is added to the logit of
a summary of n tokens, which in equation 1 weighs as one token (`bias: none`); the softmax is over what is read, where
equation 3 leaves the mass of an opened page as it was (`softmax: nested`); and a summary is the mean of its page, where
section 5 weighs tokens by their attention (`compressor: attention`).
"""

from __future__ import annotations

import math

from sparse_rl.methods.config import ClusteredConfig
from sparse_rl.methods.pages.pages import Pages
from sparse_rl.policies.base import Policy


class Clustered(Policy):
    """LuKA's clustered attention: all is held, and queries read most pages as summaries; see the module."""

    config: ClusteredConfig
    score_reads = ()

    @property
    def pages(self) -> Pages:
        """How tokens are paged."""
        return Pages.of(self.config)

    def most_opened(self, closed: int) -> int:
        """The pages that a query may open of so many closed ones."""
        share = 1 if self.config.fraction is None else self.config.fraction
        return min(self.pages.most, math.ceil(share * closed - 1e-9))  # 0.07 x 100 is a little more than 7

    def summaries(self, entries: int) -> int:
        return entries // self.config.page

    def most_read(self, prompt: int, fed: int) -> int:
        """Sinks, tail and summaries, and for each page that is opened its tokens in the place of its summary."""
        pages = self.pages

        def read(query: int) -> int:
            closed = int(pages.closed(prompt, query))
            return query + 1 - (closed - self.most_opened(closed)) * (pages.size - 1)

        return max((read(query) for query in range(max(prompt, fed - pages.size), fed)), default=fed)
