"""Base classes of all kinds of recipe.

A fact that callers need for every kind is a method here, which the kinds override. A command that needs a recipe of a
certain class calls `expect`, which rejects other recipes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeVar, cast

from rollout.config import RolloutConfig, SamplingConfig
from rollout.context.config import PromptCacheConfig
from sparse_rl.config import Configuration, PathText, PositiveInt, Seed, as_mapping, flat
from sparse_rl.data.config import DataConfig
from sparse_rl.errors import UserError
from sparse_rl.methods.config import PolicyConfig
from sparse_rl.recipe.schema import dump_yaml, parse_yaml
from trainer.config import LaunchConfig, LoraConfig, TrainingConfig

NOT_YAML = {"yaml": False}
R = TypeVar("R", bound="Recipe")


@dataclass(frozen=True, kw_only=True)
class ValidationConfig(Configuration):
    """Validation on held-out problems at regular intervals. GRPO measures the rewards and the entropy of sampled
    completions. Distillation and KVpop measure KL and cross-entropy, also once before the first step. They do not use
    `samples`.

    every : number of training steps between two validations
    problems : maximum number of held-out problems
    samples : number of completions sampled for each problem
    """

    data: DataConfig
    every: PositiveInt = 20
    problems: PositiveInt = 32
    samples: PositiveInt = 4

    def limited_data(self) -> DataConfig:
        """Return the configuration of the held-out dataset, limited to `problems` problems."""
        return dataclasses.replace(self.data, limit=self.problems)


@dataclass(frozen=True, kw_only=True)
class Recipe(Configuration):
    """Keys that every kind of recipe has.

    model : directory of a model, directory of a run with a final model, or name on the hub; only safetensors weights
        are loaded
    output_dir : directory of the run
    seed : seed of sampling, of the order of the training data, and of newly initialized weights
    dtype : dtype of the computation
    """

    kind: ClassVar[str]
    wanting: ClassVar[str]  # end of the error of `expect` for a recipe of another class; {} is that recipe's kind
    completion_key: ClassVar[str] = "max_completion_length"  # the key that limits a completion
    rollout = cast(RolloutConfig | None, None)  # the sampling engine; only some kinds have this key
    model: PathText
    output_dir: PathText
    seed: Seed = 42
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    trainer_options: dict[str, Any] = field(default_factory=dict, metadata=NOT_YAML)
    """Options of TRL's and transformers' trainers (passed_through.py), which are top-level keys in the YAML."""
    warnings: list[str] = field(default_factory=list, init=False)
    """Warnings about valid but unwise settings, one line each."""

    def resolved(self) -> dict[str, Any]:
        """Return every key with its value, as plain YAML data, so that make_recipe(recipe.resolved()) == recipe."""
        return {"kind": self.kind, **as_mapping(self), **self.trainer_options}

    def as_yaml(self) -> str:
        """Return the text of an equivalent recipe file, with every key written out."""
        return dump_yaml(self.resolved())

    def models(self) -> list[str]:
        """Return the names of the models that the recipe uses one after another."""
        return [self.model]

    def with_models(self, directory_of: Callable[[str], str]) -> Self:
        """Return a copy of the recipe with each model name replaced by `directory_of(name)`."""
        return dataclasses.replace(self, model=directory_of(self.model))

    def expect(self, cls: type[R]) -> R:
        """Return the recipe itself if it is of class `cls`. Raises UserError otherwise."""
        if not isinstance(self, cls):
            raise UserError(f"a recipe of kind {self.kind} {cls.wanting.format(self.kind)}", "kind")
        return self

    def evaluation(self, run: str) -> dict[str, Any] | None:
        """Return an eval recipe, as a mapping, for the run in the folder `run`. None if this recipe has no problems."""
        return None

    # ---- sampling -----------------------------------------------------------------------------------------------

    def with_rollout(self, **changed: Any) -> Self:
        """Return a copy of the recipe with some engine settings replaced."""
        assert self.rollout is not None
        replacement: dict[str, Any] = {"rollout": dataclasses.replace(self.rollout, **changed)}
        return dataclasses.replace(self, **replacement)

    def check_model_len(self) -> None:
        """Raise UserError if `rollout.max_model_len` is too small for a prompt and a completion."""
        need = max(bound or 1 for bound in self.prompt_bounds()) + self.sampling().max_tokens
        if self.rollout is not None and (self.rollout.max_model_len or need) < need:
            wrong = f"must hold a prompt and a completion, at least {need} tokens here; raise or remove this key"
            raise UserError(wrong, "rollout.max_model_len")

    def sampling(self, samples: int = 1) -> SamplingConfig:
        """Return the engine's sampling settings for `samples` completions per prompt."""
        raise NotImplementedError

    def caches(self) -> list[PolicyConfig | None]:
        """Return the cache policies that the engine uses one after another; None is the policy saved with the model."""
        return []

    def prompt_caches(self) -> list[PromptCacheConfig]:
        """Return the settings, used one after another, for compacting contexts; empty if no context is compacted."""
        return []

    def prompt_sources(self) -> dict[str, DataConfig]:
        """Return the datasets that supply prompts: dotted key -> dataset."""
        return {}

    def prompt_bounds(self) -> list[int | None]:
        """Return the maximum number of tokens in a prompt for each dataset in `prompt_sources`; None means unknown."""
        return [data.max_prompt_tokens for data in self.prompt_sources().values()]


@dataclass(frozen=True, kw_only=True)
class TrainRecipe(Recipe):
    """Keys of every kind of recipe that trains a model."""

    wanting: ClassVar[str] = "is not trained; use sparse-rl {}"
    validation = cast(ValidationConfig | None, None)  # only the kinds that use held-out problems have this key
    data: DataConfig
    training: TrainingConfig = flat(TrainingConfig)
    lora: LoraConfig | None = None
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        options = self.trainer_options.get("gradient_checkpointing_kwargs")
        options = parse_yaml(options, "gradient_checkpointing_kwargs") if isinstance(options, str) else options
        if isinstance(options, dict) and options.get("use_reentrant"):
            wrong = "the eviction trace does not survive reentrant checkpointing; remove use_reentrant"
            raise UserError(wrong, "gradient_checkpointing_kwargs.use_reentrant")
        if self.lora is not None and self.launch.zero_stage == 3:
            wrong = "LoRA under ZeRO-3 requires reentrant checkpointing, which cannot be replayed; use stage 2 or lower"
            raise UserError(wrong, "launch.zero_stage")

    def prompt_sources(self) -> dict[str, DataConfig]:
        return {"data": self.data} | ({} if self.validation is None else {"validation.data": self.validation.data})

    # ---- training data ------------------------------------------------------------------------------------------

    def samples_behind_prompts(self) -> bool:
        """True if training samples completions of the dataset's prompts."""
        return False

    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns that the dataset must have."""
        return ("prompt", "completion")

    def named_rewards(self) -> tuple[str, list[Any]]:
        """Return (the key under which the recipe names rewards, the list of these rewards)."""
        return "rewards", []

    # ---- batches ------------------------------------------------------------------------------------------------

    def update_rows(self) -> int:
        """Return the number of training rows in one update, over all processes."""
        training = self.training
        return training.per_device_train_batch_size * training.gradient_accumulation_steps * self.launch.processes

    def describe_batches(self, rows: int) -> str:
        """Describe the batches and steps for a dataset of `rows` rows. Raises UserError if the dataset is too small."""
        per_epoch = -(-rows // self.update_rows())
        return f"{self.update_rows()} rows a step, {per_epoch} steps an epoch, {self.count_steps(per_epoch)} steps"

    def count_steps(self, per_epoch: int) -> int:
        """Return the number of steps of the whole training, if one epoch has `per_epoch` steps."""
        training = self.training
        return training.max_steps if training.max_steps > 0 else max(1, round(per_epoch * training.num_train_epochs))

    # ---- memory -------------------------------------------------------------------------------------------------

    def longest_row(self, prompt: int) -> int | None:
        """Return the maximum number of tokens in a training row if a prompt has `prompt` tokens; None means unknown."""
        raise NotImplementedError

    def keeps_traces(self) -> bool:
        """True if recorded traces are kept for training."""
        return False

    def sequences_sampled(self) -> int:
        """Return the number of sequences that one call of the engine returns to one process."""
        return self.training.per_device_train_batch_size * self.training.gradient_accumulation_steps

    def further_models(self, own_engine: bool) -> list[tuple[str, str]]:
        """Return (name, note) of each further copy of the model. `own_engine` is True if the engine has one too."""
        return []
