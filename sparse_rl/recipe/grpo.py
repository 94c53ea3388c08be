"""kind: grpo, RL under a sparse cache; {policy: full} is RL with a full cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rollout.config import GRPORolloutConfig, SamplingConfig
from sparse_rl.config import Text, as_mapping, flat
from sparse_rl.errors import UserError
from sparse_rl.methods.config import LearnedConfig
from sparse_rl.recipe.run import Run, SampledRecipe, ToolsRecipe
from trainer.config import SparseGRPOConfig, check_ahead, check_turns


@dataclass(frozen=True, kw_only=True)
class GRPORecipe(SampledRecipe, ToolsRecipe):
    """RL under a sparse cache; {policy: full} is RL with a full cache.

    rewards : names of rewards, or mappings {name: ..., weight: ..., parameters of the reward}; [] if the environment
        has a method get_reward
    """

    kind: ClassVar[str] = "grpo"
    rewards: list[dict[str, Any] | Text]
    rollout: GRPORolloutConfig | None = field(default_factory=GRPORolloutConfig)
    grpo: SparseGRPOConfig = flat(SparseGRPOConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.grpo.check_options(self.trainer_options)
        if self.trainer_options.get("sync_ref_model"):
            self._check_sync_ref_model()
        if not all(self.rewards) or not (self.rewards or self.environment):
            raise UserError("name at least one reward, for example [math]", "rewards")
        if self.uses_tools:
            compacts = self.prompt_cache is not None
            check_turns(self.cache, self.grpo, self.scorers, compacts=compacts, recorded=self.recorded)
        elif self.trainer_options.get("max_tool_calling_iterations") is not None:
            raise UserError("has no effect without tools or environment; remove it", "max_tool_calling_iterations")
        rollout, accumulation = self.rollout, self.training.gradient_accumulation_steps
        served = rollout is not None and (rollout.engine == "server" or bool(rollout.servers))
        check_ahead(rollout, self.grpo, accumulation, self.steps_per_generation, served=served, tools=self.uses_tools)
        if self.completions_per_generation % self.grpo.num_generations:
            name = "steps_per_generation" if self.grpo.steps_per_generation else "gradient_accumulation_steps"
            batch = self.completions_per_generation
            raise UserError(
                f"{self.grpo.num_generations} does not divide the global batch {batch} (per_device_train_batch_size "
                f"{self.training.per_device_train_batch_size} × launch.processes {self.launch.processes} × {name} "
                f"{self.steps_per_generation}); groups must be whole",
                "num_generations",
            )
        if self.validation is not None and self.validation.data.thinking != self.data.thinking:
            raise UserError("must equal data.thinking", "validation.data.thinking")

    def _check_recorded(self) -> None:
        super()._check_recorded()
        if self.recorded and self.validation is not None:
            raise UserError("would sample, but recorded rollouts have no engine; use sparse-rl eval", "validation")

    def samples_in_row(self) -> int:
        return self.grpo.num_generations

    def own_code(self) -> list[Any]:
        return [*self.rewards, *self.tool_names()]

    def tool_limits(self) -> tuple[int | None, float]:
        return self.trainer_options.get("max_tool_calling_iterations"), self.grpo.tool_seconds

    def findings(self, run: Run) -> dict[str, str]:
        topics = super().findings(run)
        if self.uses_tools:
            self.given_tools(run.tokenizer, len(self.rewards))
            topics["turns"] = f"{self.cache.turns}, with {', '.join(self.tool_names())}"
        if self.recorded:
            recording = self.recording(run.config)
            recording.check_sampling(self.sampling())
            topics["off-policy"] = self._off_policy_words(recording.same_weights)
        return topics

    def _off_policy_words(self, same_weights: bool) -> str:
        """Describe ratio, clipping and importance correction of recorded groups."""
        grpo = self.grpo
        weight = f"the loss has p_trainer / p_sampler ({grpo.importance_correction} at {grpo.importance_clip:g})"
        if grpo.importance_correction == "none":
            weight = "the loss treats recorded groups as if the present weights had sampled them"
        clip = "the clipped ratio is to the weights with which a group is first scored"
        if grpo.importance_correction == "ppo":
            weight, clip = "the loss has p_trainer / p_sampler", "clipping limits this ratio"
        guard = "checks the gap before the first update alone" if same_weights else "is off"
        return f"{weight}; {clip}; there is no probe at the start, and the guard {guard}"

    def _check_sync_ref_model(self) -> None:
        """Raise UserError for settings that do not work with a reference model that follows the trained model."""
        if self.lora is not None:
            wrong = "with lora the reference model, which has no adapter, never changes; remove lora or sync_ref_model"
            raise UserError(wrong, "sync_ref_model")
        if isinstance(self.cache, LearnedConfig):
            raise UserError(
                f"cache.policy {self.cache.name} has scorers, but the reference model has none; remove sync_ref_model",
                "sync_ref_model",
            )

    @property
    def steps_per_generation(self) -> int:
        """Number of micro-batches per process whose completions are sampled in one generation."""
        return self.grpo.steps_per_generation or self.training.gradient_accumulation_steps

    @property
    def completions_per_generation(self) -> int:
        """Number of completions that are sampled in one generation, over all processes."""
        return self.training.per_device_train_batch_size * self.launch.processes * self.steps_per_generation

    def check_prompts(self, count: int) -> int:
        """Return the number of prompts in a generation. Raises UserError if the dataset's `count` prompts are fewer."""
        need = self.completions_per_generation // self.grpo.num_generations
        if count < need:
            raise UserError(
                f"holds {count} prompts, but one generation takes {need} (per_device_train_batch_size × processes × "
                "steps / num_generations); lower the batch, or add data",
                "data",
            )
        return need

    def samples_behind_prompts(self) -> bool:
        return True

    def columns(self) -> tuple[str, ...]:
        return ("prompt",)

    def evaluation(self, run: str) -> dict[str, Any] | None:
        """Return an eval recipe, as a mapping, of the held-out problems under the policy saved with the model."""
        if self.validation is None:
            return None
        sampling = self.sampling(self.validation.samples)
        further: dict[str, Any] = {} if self.prompt_cache is None else {"prompt_cache": as_mapping(self.prompt_cache)}
        if self.uses_tools:
            rounds, seconds = self.tool_limits()
            further |= {"tools": self.tools, "environment": self.environment, "tool_seconds": seconds}
            further["max_tool_calling_iterations"] = rounds
        return {
            "kind": "eval",
            "model": run,
            "output_dir": f"{run}/eval",
            "seed": self.seed,
            "dtype": self.dtype,
            "tasks": {"validation": as_mapping(self.validation.limited_data())},
            "accuracy": self.rewards[0] if self.rewards else "environment",
            "samples": sampling.n,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_completion_length": sampling.max_tokens,
            **further,
        }

    def sampling(self, samples: int = 1) -> SamplingConfig:
        grpo = self.grpo
        cut = grpo.top_p, grpo.top_k, grpo.min_p
        return SamplingConfig(grpo.max_completion_length, grpo.temperature, *cut, n=samples, seed=self.seed)

    def named_rewards(self) -> tuple[str, list[Any]]:
        return "rewards", self.rewards

    def describe_batches(self, rows: int) -> str:
        prompts = self.check_prompts(rows)
        completions = (rows // prompts) * self.completions_per_generation * self.grpo.num_iterations
        steps = self.count_steps(completions // self.update_rows())
        samples = f"{prompts} prompts × {self.grpo.num_generations} samples a generation"
        return f"{samples}, {self.update_rows()} completions a step, {steps} steps"

    def sequences(self) -> int:
        return self.training.per_device_train_batch_size * self.steps_per_generation

    # ---- the run ------------------------------------------------------------------------------------------------

    def make_trainer(self, run: Run, folder: Path) -> Any:
        from trainer import rundir
        from trainer.arguments import adapters
        from trainer.grpo.trainer import SparseGRPOArguments, SparseGRPOTrainer

        options, validation = self.training_arguments(), self.validation
        if validation is not None:
            groups = -(-self.training.per_device_train_batch_size // validation.samples)
            options |= {
                "eval_strategy": "steps",
                "eval_steps": validation.every,
                "num_generations_eval": validation.samples,
                "per_device_eval_batch_size": groups * validation.samples,
            }
        functions, weights = run.rewards
        options |= {**vars(self.grpo), **vars(self.replay), "scorers": self.scorers, "reward_weights": weights}
        completions = rundir.CompletionLog(folder)
        trainer = SparseGRPOTrainer(
            model=self.model,
            reward_funcs=functions,
            args=SparseGRPOArguments(**options),
            train_dataset=run.rows,
            eval_dataset=run.held_out,
            processing_class=run.tokenizer,
            peft_config=adapters(self.lora, run.skeleton),
            callbacks=[rundir.RunLog(folder), completions],
            **self.sampled_by(run),
            **self.given_tools(run.tokenizer, len(self.rewards)),
            thinking=self.data.thinking,
        )
        completions.trainer = trainer
        return trainer
