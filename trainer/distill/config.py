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
    max_length : tokens of the longest sequence, prompt and completion; null: what the model and its engine can hold
    max_completion_length : tokens of the longest completion
    overlong : what is longer is cut off, as in G-KV section 7.4; or such a sequence is dropped
    """

    max_completion_length: PositiveInt = 4096
    completions: Literal["data", "student"] = "data"
    keep: dict[str, Any] | Text | None = None
    keep_from: Positive = 1.0
    refresh_every: NonNegativeInt = 0
    max_length: PositiveInt | None = None
    overlong: Literal["truncate", "drop"] = "truncate"
    packing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        drops = self.overlong == "drop"
        for key, given in (("keep", self.keep), ("refresh_every", self.refresh_every), ("overlong", drops)):
            if given and self.completions == "student":
                raise UserError("is for the dataset's completions; remove it", key)
