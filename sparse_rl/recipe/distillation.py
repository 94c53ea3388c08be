"""The kinds that learn from the predictions of a dense teacher: distill, KL distillation under recorded evictions, and
kvpop, the retrofit of a learned policy, `kvpop` or `dms`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rollout.config import SamplingConfig
from sparse_rl.config import flat
from sparse_rl.data.config import DataConfig
from sparse_rl.errors import UserError
from sparse_rl.methods.config import KVpopPolicyConfig, PolicyConfig
from sparse_rl.recipe.run import ReplayedRecipe, Run, SampledRecipe
from trainer.config import (
    DistillationLossConfig,
    DistillConfig,
    KVpopConfig,
    KVpopLossConfig,
    KVpopTrainingConfig,
    TeacherConfig,
    refuse_own_groups,
)

if TYPE_CHECKING:
    from trainer.batch import Example

logger = logging.getLogger("sparse_rl")


@dataclass(frozen=True, kw_only=True)
class TaughtRecipe(ReplayedRecipe):
    """Training on the predictions of a dense teacher."""

    wanting: ClassVar[str] = "has no teacher; use one of distill or kvpop"
    taught_by: TeacherConfig = flat(TeacherConfig)
    loss: DistillationLossConfig = flat(DistillationLossConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.taught_by.teacher_cache is not None and self.loss.top_k is None:
            wrong = "needs top_k, the number of log-probabilities to keep per token, for example 256"
            raise UserError(wrong, "teacher_cache")

    def with_models(self, directory_of: Callable[[str], str]) -> Self:
        recipe, teacher = super().with_models(directory_of), self.taught_by.teacher
        if teacher is None:
            return recipe
        return replace(recipe, taught_by=replace(self.taught_by, teacher=directory_of(teacher)))

    @property
    def teacher_model(self) -> str:
        """Directory or hub name of the teacher."""
        return self.taught_by.teacher or self.model

    @property
    def without_teacher(self) -> bool:
        """True if only the cross-entropy of given completions is trained, which needs no teacher."""
        return self.data.traces is not None and self.loss.kl_weight == 0

    @property
    def own_teacher(self) -> bool:
        """True if the starting model itself is the teacher, and no teacher cache replaces the teacher."""
        return self.taught_by.teacher is None and self.taught_by.teacher_cache is None

    def findings(self, run: Run) -> dict[str, str]:
        return {**super().findings(run), "teacher": self._teacher_words(run.config)}

    def _teacher_words(self, config: Any) -> str:
        """Describe the teacher. Raises UserError if the teacher does not suit the student's configuration."""
        from sparse_rl.models.load import load_config
        from sparse_rl.models.weights import check_weights

        teacher = self.taught_by.teacher
        if self.without_teacher:
            return "none, as kl_weight is 0"
        if (folder := self.taught_by.teacher_cache) is not None:
            return f"predictions saved in {folder}: {len(self.open_teacher_cache(folder, config).places)} sequences"
        if teacher is None:
            return "the model itself, with a full cache"
        teacher_config = load_config(teacher)
        check_weights(teacher_config, teacher, "teacher")
        if teacher_config.vocab_size != config.vocab_size:
            raise UserError(
                f"has a vocabulary of {teacher_config.vocab_size} tokens, but the student's has {config.vocab_size}; "
                "use a teacher with the student's vocabulary",
                "teacher",
            )
        return f"{teacher}, with a full cache"

    def input_files(self) -> dict[str, tuple[str | None, bool]]:
        from trainer.teacher import INDEX

        if (cache := self.taught_by.teacher_cache) is None:
            return {**super().input_files(), "teacher": (self.taught_by.teacher, True)}
        # the index of a cache has the checksums of its other files
        return {**super().input_files(), "teacher_cache": (f"{cache}/{INDEX}", False)}

    def open_teacher_cache(self, folder: str, config: Any) -> Any:
        """Return the teacher cache in a folder, after a check that it is of this recipe's teacher."""
        from trainer.teacher import TeacherCache

        facts = {
            "source": self.teacher_model,
            "temperature": self.loss.temperature,
            "top_k": self.loss.top_k,
            "vocab_size": config.vocab_size,
        }
        return TeacherCache(folder, facts)

    def examples(self, run: Run) -> tuple[list[Example], list[Example] | None]:
        """Return (training examples, held-out examples), made once per machine; the second may be None."""
        from trainer.launch import once

        examples = once(f"examples {self.data}", lambda: self.make_examples(run, run.rows, self.data, "data"))
        if self.validation is None:
            return examples, None
        data = self.validation.limited_data()
        held_out = once(f"held out {data}", lambda: self.make_examples(run, run.held_out, data, "validation.data"))
        return examples, held_out

    def make_examples(self, run: Run, rows: Any, data: DataConfig, where: str) -> list[Example]:
        """Return the rows of a dataset as token sequences."""
        raise NotImplementedError

    def _taught_options(self, held_out: Any) -> dict[str, Any]:
        options = self.training_arguments()
        if held_out is not None:
            assert self.validation is not None
            options |= {"eval_strategy": "steps", "eval_steps": self.validation.every}
        rows = self.training.per_device_train_batch_size
        return {**options, **vars(self.replay), "per_device_eval_batch_size": rows}

    def _given_teacher(self, config: Any, examples: list[Example]) -> Any:
        """Return the teacher's name, None for the model itself or no teacher, or the teacher cache, which must contain
        all `examples`."""
        if self.without_teacher:
            return None
        if (folder := self.taught_by.teacher_cache) is None:
            return self.taught_by.teacher
        cache = self.open_teacher_cache(folder, config)
        if unknown := sum(example not in cache for example in examples):
            message = f"{folder} lacks {unknown} sequences of this dataset; run sparse-rl teacher with this recipe"
            raise UserError(message, "teacher_cache")
        return cache


@dataclass(frozen=True, kw_only=True)
class DistillRecipe(SampledRecipe, TaughtRecipe):
    """KL distillation under recorded evictions (G-KV appendix C)."""

    kind: ClassVar[str] = "distill"
    distill: DistillConfig = flat(DistillConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.distill.check(
            self.cache,
            scorers=self.scorers is not None,
            save_steps=self.training.save_steps,
            cached_teacher=self.taught_by.teacher_cache is not None,
            prompt_cache=self.prompt_cache,
        )
        if self.recorded:
            for key, default in (("completions", "data"), ("refresh_every", 0)):
                if getattr(self.distill, key) != default:
                    raise UserError("has no effect on recorded rollouts; remove this key", key)

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

    @property
    def simulates_apart(self) -> bool:
        """True if a further copy of the model simulates the evictions of given completions."""
        uses_same_weights = self.own_teacher and self.launch.zero_stage < 3 and not self.distill.refresh_every
        return not self.recorded and self.distill.completions != "student" and not uses_same_weights

    # ---- the run ------------------------------------------------------------------------------------------------

    def make_examples(self, run: Run, rows: Any, data: DataConfig, where: str) -> list[Example]:
        """Return the examples of a dataset that remain after the `keep` filter and the length limits."""
        from trainer.batch import accepted
        from trainer.distill import make_examples

        if self.distill.keep is not None:
            reward, least = run.rewards[0][0], self.distill.keep_from
            rows = accepted(rows, reward, least, where, run.tokenizer, data.thinking)
        engine = None if self.rollout is None else self.rollout.max_model_len
        longest = engine, run.config.max_position_embeddings
        return make_examples(
            rows, run.tokenizer, data.thinking, self.distill, longest, where, self.prompt_cache is not None
        )

    def make_trainer(self, run: Run, folder: Path) -> Any:
        from rollout.context.reader import ContextPrompts
        from trainer import rundir
        from trainer.arguments import adapters
        from trainer.distill import DistillArguments, DistillTrainer

        examples, held_out = self.examples(run)
        about = None if self.prompt_cache is None else ContextPrompts.of_row(run.rows[0], run.tokenizer)
        return DistillTrainer(
            model=self.model,
            teacher=self._given_teacher(run.config, [*examples, *(held_out or [])]),
            args=DistillArguments(
                **self._taught_options(held_out), **vars(self.loss), **vars(self.distill), scorers=self.scorers
            ),
            train_dataset=examples,
            eval_dataset=held_out,
            processing_class=run.tokenizer,
            peft_config=adapters(self.lora, run.skeleton),
            callbacks=[rundir.RunLog(folder)],
            about=about,
            **self.sampled_by(run),
        )


@dataclass(frozen=True, kw_only=True)
class KVpopRecipe(TaughtRecipe):
    """Retrofit of a learned policy, `kvpop` or `dms`, whose scorers are trained together with the model.

    cache : {policy: kvpop or dms, parameters of the policy}
    """

    kind: ClassVar[str] = "kvpop"
    cache: PolicyConfig
    training: KVpopTrainingConfig = flat(KVpopTrainingConfig)
    loss: KVpopLossConfig = flat(KVpopLossConfig)
    kvpop: KVpopConfig = flat(KVpopConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        for where, data in self.prompt_sources().items():
            if data.traces:
                wrong = "kind kvpop makes its own evictions; use kind grpo, distill or sft for recorded rollouts"
                raise UserError(wrong, f"{where}.traces")
        if not self.cache.schedule.before_attending:
            raise UserError("recipes of kind kvpop train kvpop or dms", "cache.policy")
        if self.lora is not None:
            wrong = "kind kvpop trains the whole model, or with train_base: false only the scorers; remove lora"
            raise UserError(wrong, "lora")
        policy: Any = self.cache
        if policy.scorer.name == "recency" and not self.kvpop.train_base:
            raise UserError("the scorer recency has no parameters to train; set train_base: true", "train_base")
        refuse_own_groups(self.trainer_options.get("optim"))
        if self.kvpop.max_length < policy.schedule.first(1):
            self.warnings.append(
                f"rows of at most {self.kvpop.max_length} tokens never exceed the budget: nothing is evicted"
            )

    def foresees(self) -> bool:
        return isinstance(self.cache, KVpopPolicyConfig)

    def describe_batches(self, rows: int) -> str:
        if not self.kvpop.packing:
            return super().describe_batches(rows)
        length = self.kvpop.max_length
        return f"{self.update_rows()} rows of {length} tokens a step; the number of rows is known only after packing"

    def longest_row(self, prompt: int) -> int | None:
        return self.kvpop.max_length

    # ---- the run ------------------------------------------------------------------------------------------------

    def findings(self, run: Run) -> dict[str, str]:
        return {**self._learned_words(run), **super().findings(run)}

    def _learned_words(self, run: Run) -> dict[str, str]:
        """Describe the learned cache, and the memory of the scorers' state as a number of cache entries."""
        import torch

        from sparse_rl.methods.kvpop.scorers import sketch_scorer
        from sparse_rl.policies.make import make_policy

        cache: Any = self.cache
        _, heads, dim = run.shape
        scorer = sketch_scorer(cache.scorer, heads=heads, dim=dim)
        parameters = sum(weight.numel() for weight in scorer.parameters())
        entry = 2 * heads * dim * torch.finfo(getattr(torch, self.dtype)).bits // 8
        state = -(-sum(value.nbytes for value in scorer.memory().values()) // entry)
        size = f"{parameters:,} parameters per layer"
        if state and isinstance(cache, KVpopPolicyConfig):
            size += f"; its state takes the memory of {state} entries, cache.state_entries is {cache.state_entries}"
        return {"cache": repr(make_policy(cache)), "scorer": size}

    def make_examples(self, run: Run, rows: Any, data: DataConfig, where: str) -> list[Example]:
        """Return examples of up to max_length tokens from texts, packed if the recipe has packing: true."""
        from trainer.batch import text_examples

        longest = min(self.kvpop.max_length, run.config.max_position_embeddings)
        packing = self.kvpop.packing
        return text_examples(rows, run.tokenizer, data.thinking, max_length=longest, packing=packing, where=where)

    def make_trainer(self, run: Run, folder: Path) -> Any:
        from sparse_rl.methods.kvpop.dms import DMS
        from sparse_rl.models.directory import POLICY_FILE, SCORERS, saved_policy
        from sparse_rl.models.load import load_model, load_plain_model
        from sparse_rl.policies.make import make_policy
        from trainer import rundir
        from trainer.retrofit import GateTrainer, KVpopArguments, KVpopTrainer
        from trainer.teacher import TeacherCache

        examples, held_out = self.examples(run)
        args = KVpopArguments(**self._taught_options(held_out), **vars(self.loss), **vars(self.kvpop))
        student = load_model(self.model, self.weights_dtype())
        policy: Any = make_policy(self.cache)
        if hasattr(student, SCORERS):
            carried: Any = saved_policy(self.model)
            if carried.config.scorer != policy.config.scorer:
                scorers = carried.config.scorer.as_block()
                message = f"the model carries scorers {scorers}; set cache.scorer to them, or remove its {POLICY_FILE}"
                raise UserError(message, "cache.scorer")
            logger.warning("the scorers that %s carries are trained further", self.model)
        teacher = self._given_teacher(student.config, [*examples, *(held_out or [])])
        if not isinstance(teacher, TeacherCache):
            teacher = load_plain_model(teacher or self.model, self.dtype, "teacher" if teacher else "model")
        kind = GateTrainer if isinstance(policy, DMS) else KVpopTrainer
        return kind(
            student, teacher, policy, args, examples, held_out,
            processing_class=run.tokenizer, callbacks=[rundir.RunLog(folder)],
        )  # fmt: skip
