"""Clustered attention: no entry is evicted, but a query reads only a part of the entries (sparse_rl/methods/pages).

LuKA section 3.2. The pages that a query opens are recorded and replayed. Three departures, each with the setting that
restores the paper's form: log n is added to the logit of a summary of n tokens, which in equation 1 weighs as one token
(`bias: none`); the softmax is over everything that is read, but equation 3 leaves the mass of an opened page unchanged
(`softmax: nested`); and a summary is the mean of its page, but section 5 weights tokens by their attention
(`compressor: attention`).
"""

from __future__ import annotations

import math

from sparse_rl.methods.config import ClusteredConfig
from sparse_rl.methods.pages.pages import Pages
from sparse_rl.policies.base import Policy


class Clustered(Policy):
    """LuKA's clustered attention: all entries are held, and queries read most pages as summaries (module docstring)."""

    config: ClusteredConfig
    score_reads = ()

    @property
    def pages(self) -> Pages:
        """The division of tokens into pages."""
        return Pages.of(self.config)

    def most_opened(self, closed: int) -> int:
        """Maximum number of pages that a query may open if `closed` pages are closed."""
        share = 1 if self.config.fraction is None else self.config.fraction
        return min(self.pages.most, math.ceil(share * closed - 1e-9))  # as floats, 0.07 x 100 is a little more than 7

    def summaries(self, entries: int) -> int:
        return entries // self.config.page

    def most_read(self, prompt: int, fed: int) -> int:
        """Number of sinks, tail tokens and summaries, with the tokens of each opened page instead of its summary."""
        pages = self.pages

        def read(query: int) -> int:
            closed = int(pages.closed(prompt, query))
            return query + 1 - (closed - self.most_opened(closed)) * (pages.size - 1)

        return max((read(query) for query in range(max(prompt, fed - pages.size), fed)), default=fed)
