"""Which teacher a taught training has. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparse_rl.config import Configuration, PathText


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(Configuration):
    """Training on what a dense teacher says of a text.

    teacher : a model with the student's vocabulary; None: the starting model itself
    teacher_cache : a folder that `sparse-rl teacher` writes and training reads; the teacher is then not loaded
    teacher_cache_dtype : of the log-probs in it
    """

    teacher: PathText | None = None
    teacher_cache: PathText | None = None
    teacher_cache_dtype: Literal["float32", "bfloat16", "float16"] = "float16"
