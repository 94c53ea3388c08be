"""The record of compactions in a trace: their times, and the settings with which the trainer recomputes the fits."""

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
    """The settings that, together with the entries that stay, determine a fit. A trace holds them as numbers.

    sinks, window : number of first tokens, and of most recent tokens, that are not fitted
    refitted : t, the number of entries per kv head that a compaction keeps and fits
    reference_queries : number of last tokens whose queries are the reference queries
    ridge : ridge of the value fit
    pursuit : True if keys are chosen by orthogonal matching pursuit (omp or omp_fast), False if by attention
    paper : True if the fit uses the paper's own solvers, which cannot be replayed
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
        """Make the record from a policy's settings, an AMConfig."""
        pursuit, paper = config.select != "attention", config.fit == "paper"
        return cls(config.sinks, config.window, config.refitted, config.reference_queries, config.ridge, pursuit, paper)

    @classmethod
    def read(cls, settings: Tensor) -> Record:
        """Read the record from the trace section refit_with.

        settings : the section, float64 [7]

        Raises TraceError if it says that the paper's own solvers were used.
        """
        sinks, window, refitted, queries, ridge, pursuit, paper = settings.tolist()
        if paper:
            raise TraceError("`fit: paper` is only for comparison and cannot be replayed; use `fit: ridge`")
        return cls(int(sinks), int(window), int(refitted), int(queries), ridge, bool(pursuit), False)

    @property
    def fit(self) -> Fit:
        """Settings for `refit`. What only affects the choice of entries has its default value: `aggregate`, and omp for
        omp_fast.
        """
        return Fit("omp" if self.pursuit else "attention", ridge=self.ridge, paper=self.paper)

    def sections(self, times: Sequence[int]) -> dict[str, Tensor]:
        """Return the trace sections refit_at, int32 [number of compactions], and refit_with, float64 [7].

        times : number of tokens seen at each compaction
        """
        settings = torch.tensor(astuple(self), dtype=torch.float64)
        return {"refit_at": torch.tensor(times, dtype=torch.int32), "refit_with": settings}
