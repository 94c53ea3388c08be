"""Settings of distillation under recorded evictions. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sparse_rl.config import Configuration, NonNegativeInt, Positive, PositiveInt, Text
from sparse_rl.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DistillConfig(Configuration):
    """Settings of KL distillation under recorded evictions (G-KV appendix C).

    The teacher has a full cache, and the student has the cache policy `cache` of the recipe.

    completions : source of the completions. `data`: the dataset has them, and an engine simulates the evictions.
        `student`: the student samples them, under eviction
    keep : reward that selects completions of the dataset; completions that score below `keep_from` are dropped
    keep_from : minimum score for `keep`
    refresh_every : number of steps after which the model that simulates the evictions gets the student's current
        weights; 0 means that it always has the weights of the starting model
    packing : put several short sequences into one row, without attention between the sequences
    max_length : maximum number of tokens in prompt and completion; null means the limit of the model and the engine
    max_completion_length : maximum number of tokens in the completion
    overlong : treatment of sequences that exceed a limit. `truncate` shortens the completion, as in G-KV section 7.4;
        `drop` leaves the sequence out
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
