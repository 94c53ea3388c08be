"""Settings of the teacher of a training. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparse_rl.config import Configuration, PathText


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(Configuration):
    """Settings of the dense teacher whose token distributions the student learns.

    teacher : model with the student's vocabulary; None means the starting model itself
    teacher_cache : folder of log-probs that `sparse-rl teacher` writes and training reads; if it is set, training does
        not load the teacher
    teacher_cache_dtype : dtype of the log-probs in the teacher cache
    """

    teacher: PathText | None = None
    teacher_cache: PathText | None = None
    teacher_cache_dtype: Literal["float32", "bfloat16", "float16"] = "float16"
