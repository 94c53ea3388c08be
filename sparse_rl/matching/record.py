"""What a trace says of its compactions: when they were, and how their entries were fitted. The fits are made again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from sparse_rl.matching.block import Fit
from sparse_rl.trace import TraceError


@dataclass(frozen=True)
class Record:
    """The settings that a fit follows from, once it is known what stays; numbers, as a trace holds them.

    sinks, window : tokens at the beginning, and the most recent ones, that are not fitted
    refitted : t, entries of a kv head that a compaction leaves and fits
    reference_queries : of how many of the last tokens the queries are
    ridge : of the values' fit
    pursuit : whether keys are chosen by orthogonal matching pursuit; else by attention
    paper : whether the fit is by the paper's own solvers, which is not replayed
    """

    sinks: int
    window: int
    refitted: int
    reference_queries: int
    ridge: float
    pursuit: bool
    paper: bool

    @classmethod
    def of(cls, config: Any) -> Record:
        """The record of a policy's settings. config : AMConfig"""
        pursuit, paper = config.select == "omp", config.fit == "paper"
        return cls(config.sinks, config.window, config.refitted, config.reference_queries, config.ridge, pursuit, paper)

    @classmethod
    def read(cls, settings: Tensor) -> Record:
        """The record that a trace holds. Raises TraceError where its fits cannot be made again.

        settings : the section refit_with, float64 [7]
        """
        sinks, window, refitted, queries, ridge, pursuit, paper = settings.tolist()
        if paper:
            raise TraceError("fit: paper is for comparison; a fit of its kind cannot be replayed, use fit: ridge")
        return cls(int(sinks), int(window), int(refitted), int(queries), ridge, bool(pursuit), False)

    @property
    def fit(self) -> Fit:
        """How the entries are fitted, for `refit`; the aggregate, which only chooses, is not in a record."""
        return Fit("omp" if self.pursuit else "attention", ridge=self.ridge, paper=self.paper)

    def sections(self, times: Sequence[int]) -> dict[str, Tensor]:
        """The trace's sections refit_at, int32 [C], and refit_with, float64 [7].

        times : tokens seen at each of C compactions
        """
        settings = torch.tensor(astuple(self), dtype=torch.float64)
        return {"refit_at": torch.tensor(times, dtype=torch.int32), "refit_with": settings}
