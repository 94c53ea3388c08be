"""What a trace says of its compactions: when they were, and how their entries were fitted. The fits are made again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from sparse_rl.matching.block import Fit
from sparse_rl.trace import TraceError


@dataclass(frozen=True)
class Record:
    """The settings that a fit follows from, once it is known what stays."""

    sinks: int
    window: int
    refitted: int
    reference_queries: int
    ridge: float
    pursuit: bool
    paper: bool

    @classmethod
    def of(cls, config: Any) -> Record:
        """config : AMConfig"""
        pursuit, paper = config.select == "omp", config.fit == "paper"
        return cls(config.sinks, config.window, config.refitted, config.reference_queries, config.ridge, pursuit, paper)

    @classmethod
    def read(cls, settings: torch.Tensor) -> Record:
        """Of the section refit_with. Raises TraceError where a fit cannot be made again."""
        sinks, window, refitted, queries, ridge, pursuit, paper = settings.tolist()
        if paper:
            raise TraceError("fit: paper is for comparison; a fit of its kind cannot be replayed, use fit: ridge")
        return cls(int(sinks), int(window), int(refitted), int(queries), ridge, bool(pursuit), False)

    @property
    def fit(self) -> Fit:
        return Fit("omp" if self.pursuit else "attention", ridge=self.ridge, paper=self.paper)

    def sections(self, times: Sequence[int]) -> dict[str, torch.Tensor]:
        """times : tokens seen at each compaction"""
        settings = torch.tensor(astuple(self), dtype=torch.float64)
        return {"refit_at": torch.tensor(times, dtype=torch.int32), "refit_with": settings}
