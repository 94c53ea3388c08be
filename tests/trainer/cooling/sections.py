"""The sections that the made-up method `cooling` adds to the trace."""

from __future__ import annotations

import torch

from sparse_rl.trace.sections import Sections, batch_times, last_query, numbers


def check_times(values: torch.Tensor, sections: Sections, prompt: int | None) -> str | None:
    ascending = bool((values.diff() > 0).all()) and bool((values <= last_query(sections)).all())
    return None if ascending else f"cooled_at {values.tolist()} is not ascending up to the last query"


def check_factor(values: torch.Tensor, sections: Sections, prompt: int | None) -> str | None:
    return None if len(values) == 1 and 0 <= float(values[0]) <= 1 else "cooled_by is no factor"


SECTIONS = (
    numbers("cooled_at", torch.int32, "compaction", check_times, batch_times, ("cooled_by",)),
    numbers("cooled_by", torch.float64, "factor", check_factor, needs=("cooled_at",)),
)
