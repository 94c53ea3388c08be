"""Settings of distillation under recorded evictions. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sparse_rl.config import Configuration, NonNegativeInt, Positive, PositiveInt, Text
from sparse_rl.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DistillConfig(Configuration):
    """KL distillation under recorded evictions: a teacher with a full cache, a student with `cache` (G-KV appendix C).

    completions : data uses the dataset's completions and simulates their evictions; student samples completions from
        the student, under eviction
    keep : reward that selects the dataset's completions; those that score below `keep_from` are dropped
    keep_from : minimum score for `keep`
    refresh_every : number of steps after which the simulating model gets the student's weights; 0 keeps the starting
        model
    packing : put several short sequences into one row, where none sees another
    max_length : maximum number of tokens in prompt and completion; null means the limit of the model and its engine
    max_completion_length : maximum number of tokens in the completion
    overlong : truncate longer completions, as in G-KV section 7.4, or drop these sequences
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
        for key, value in (("keep", self.keep), ("refresh_every", self.refresh_every), ("overlong", drops)):
            if value and self.completions == "student":
                raise UserError("applies only to the dataset's completions (completions: data); remove it", key)
