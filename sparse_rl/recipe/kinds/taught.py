"""Base of the kinds distill and kvpop, which train on the predictions of a dense teacher."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from sparse_rl.config import flat
from sparse_rl.errors import UserError
from sparse_rl.recipe.kinds.sampled import ReplayedRecipe
from trainer.losses.config import DistillationLossConfig
from trainer.teacher.config import TeacherConfig


@dataclass(frozen=True, kw_only=True)
class TaughtRecipe(ReplayedRecipe):
    """Training on the predictions of a dense teacher."""

    wanting: ClassVar[str] = "has no teacher; use one of distill or kvpop"
    taught_by: TeacherConfig = flat(TeacherConfig)
    loss: DistillationLossConfig = flat(DistillationLossConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.taught_by.teacher_cache is not None and self.loss.top_k is None:
            raise UserError(
                "needs top_k, the number of log-probabilities to keep per token, for example 256", "teacher_cache"
            )

    def with_models(self, directory_of: Callable[[str], str]) -> Self:
        recipe, teacher = super().with_models(directory_of), self.taught_by.teacher
        if teacher is None:
            return recipe
        return dataclasses.replace(recipe, taught_by=dataclasses.replace(self.taught_by, teacher=directory_of(teacher)))

    @property
    def teacher_model(self) -> str:
        """Directory or hub name of the teacher."""
        return self.taught_by.teacher or self.model

    @property
    def own_teacher(self) -> bool:
        """True if the starting model itself is the teacher, and no teacher cache replaces the teacher."""
        return self.taught_by.teacher is None and self.taught_by.teacher_cache is None

    def expected_teacher_facts(self, vocab_size: int) -> dict[str, Any]:
        """Return the fields of trainer.teacher.cache.TeacherFacts that this recipe requires of a teacher cache."""
        return {
            "source": self.teacher_model,
            "temperature": self.loss.temperature,
            "top_k": self.loss.top_k,
            "vocab_size": vocab_size,
        }
