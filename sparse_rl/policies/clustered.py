"""Clustered attention: nothing goes, but a query reads little of it (sparse_rl/pages).

LuKA section 3.2. Which pages a query opens is recorded, and replayed. A departure, ours: log n is added to the logit of
a summary of n tokens; in equation 1 it weighs as one token (`bias: none`). And the softmax is over what is read, where
equation 3 leaves the mass of an opened page as it was.
"""

from __future__ import annotations

from sparse_rl.pages import Pages
from sparse_rl.policies.base import Policy
from sparse_rl.policies.config import ClusteredConfig


class Clustered(Policy):
    config: ClusteredConfig
    score_reads = ()

    @property
    def pages(self) -> Pages:
        return Pages.of(self.config)

    def most_read(self, prompt: int, fed: int) -> int:
        """Sinks, tail and summaries, and for each page that is opened its tokens in the place of its summary."""
        pages = self.pages

        def read(query: int) -> int:
            closed = int(pages.closed(prompt, query))
            return query + 1 - closed * (pages.size - 1) + min(pages.most, closed) * (pages.size - 1)

        return max((read(query) for query in range(max(prompt, fed - pages.size), fed)), default=fed)
