"""Clustered attention: no entry is evicted, but a query reads only a part of the entries (sparse_rl/methods/pages).

This is LuKA section 3.2. The pages that a query opens are recorded and replayed. There are three departures from the
paper; a setting restores each of the paper's forms:

- log n is added to the logit of a summary of n tokens. In equation 1, a summary weighs as much as one token
  (`bias: none`).
- One softmax covers all entries that are read. In equation 3, opening a page leaves its attention mass unchanged
  (`softmax: nested`).
- A summary is the mean of its page's tokens. In the experiments of section 4.2, tokens are weighted by a softmax over
  the attention that they received (`compressor: attention`; its temperature, to which the paper gives no value, is 1).
"""

from __future__ import annotations

import math

from sparse_rl.methods.config import ClusteredConfig
from sparse_rl.methods.pages.pages import Pages
from sparse_rl.policies.base import Policy


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

    def summaries(self, entries: int) -> int:
        return entries // self.config.page

    def most_read(self, prompt: int, fed: int) -> int:
        """Return the maximum number of entries that a decoding query reads until `fed` tokens have been fed.

        A query reads sinks, tail, and one summary per closed page; for an opened page, it reads the page's tokens
        instead of the summary.
        """
        pages = self.pages

        def read(query: int) -> int:
            closed = int(pages.closed(prompt, query))
            return query + 1 - (closed - self.most_opened(closed)) * (pages.size - 1)

        return max((read(query) for query in range(max(prompt, fed - pages.size), fed)), default=fed)
