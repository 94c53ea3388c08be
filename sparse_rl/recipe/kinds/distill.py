"""kind: distill, KL distillation under recorded evictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from rollout.config import SamplingConfig
from sparse_rl.config import flat
from sparse_rl.errors import UserError
from sparse_rl.recipe.kinds.sampled import SampledRecipe
from sparse_rl.recipe.kinds.taught import TaughtRecipe
from trainer.distill.config import DistillConfig


@dataclass(frozen=True, kw_only=True)
class DistillRecipe(SampledRecipe, TaughtRecipe):
    """KL distillation under recorded evictions (G-KV appendix C)."""

    kind: ClassVar[str] = "distill"
    distill: DistillConfig = flat(DistillConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scorers is not None and self.distill.packing:
            raise UserError("scorers read each sequence from its start; set packing: false", "packing")
        if self.distill.packing and not self.cache.packs:
            raise UserError(f"sequences under {self.cache.name} cannot be packed; set packing: false", "packing")
        if self.distill.completions == "student" and self.taught_by.teacher_cache is not None:
            wrong = "covers only the dataset's completions, but the student samples new ones; remove teacher_cache"
            raise UserError(wrong, "teacher_cache")
        if self.distill.refresh_every and self.training.save_steps % self.distill.refresh_every:
            every = self.training.save_steps
            wrong = f"must divide save_steps ({every}), because resuming sends the checkpoint's weights to the engine"
            raise UserError(wrong, "refresh_every")

    def sampling(self, samples: int = 1) -> SamplingConfig:
        return SamplingConfig(self.distill.max_completion_length, self.loss.temperature, n=samples, seed=self.seed)

    def samples_behind_prompts(self) -> bool:
        return self.distill.completions == "student"

    def columns(self) -> tuple[str, ...]:
        if self.distill.completions == "student":
            return ("prompt",)
        return ("prompt", "completion") if self.distill.keep is None else ("prompt", "completion", "answer")

    def named_rewards(self) -> tuple[str, list[Any]]:
        return "keep", [] if self.distill.keep is None else [self.distill.keep]

    def attending_models(self) -> list[str]:
        """Return the models that use the attention kernel. With packing, a teacher uses it too, for its packed rows."""
        teacher = self.taught_by.teacher
        return [self.model, *([teacher] if self.distill.packing and teacher is not None else [])]

    def further_models(self, own_engine: bool) -> list[tuple[str, str]]:
        uses_same_weights = self.own_teacher and self.launch.zero_stage < 3 and not self.distill.refresh_every
        if own_engine or self.distill.completions == "student" or uses_same_weights:
            return []
        return [("simulating model", self.dtype)]
