"""What distillation under recorded evictions is told. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sparse_rl.config import Configuration, NonNegativeInt, Positive, PositiveInt, Text
from sparse_rl.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DistillConfig(Configuration):
    """KL distillation under recorded evictions: a teacher with a full cache, a student with `cache` (G-KV appendix C).

    completions : those of the dataset, whose evictions are simulated; or the student's own, sampled under eviction
    keep : a reward that the dataset's completions must score `keep_from` with; the others are dropped
    refresh_every : steps after which the simulating model takes the student's weights; 0: it stays the starting model
    packing : put several short sequences into one row; none sees another
    max_length : longer sequences are dropped
    max_completion_length : longer completions are dropped, or not sampled
    """

    max_completion_length: PositiveInt = 4096
    completions: Literal["data", "student"] = "data"
    keep: dict[str, Any] | Text | None = None
    keep_from: Positive = 1.0
    refresh_every: NonNegativeInt = 0
    max_length: PositiveInt | None = None
    packing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.completions == "student" and (self.keep is not None or self.refresh_every):
            key = "keep" if self.keep is not None else "refresh_every"
            raise UserError("is for the dataset's completions; remove it", key)
