"""What every kind of recipe has, and what it answers about itself.

What kinds answer in different ways is a method here; what only one place asks, that place takes from the kind's class.
A command that needs a recipe of one class has it by `expect`, which refuses the others in one line.
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
    """What GRPO measures on held-out problems every so many steps (rewards and entropy of samples), and distillation
    and KVpop also before their first step (KL and cross-entropy; `samples` does not count there).
    """

    data: DataConfig
    every: PositiveInt = 20
    problems: PositiveInt = 32
    samples: PositiveInt = 4

    def limited_data(self) -> DataConfig:
        """The dataset, cut to so many problems."""
        return dataclasses.replace(self.data, limit=self.problems)


@dataclass(frozen=True, kw_only=True)
class Recipe(Configuration):
    """What every kind of recipe has.

    model : the directory of a model, or of a run that has left one, or a name on the hub; weights are safetensors only
    output_dir : the folder of the run
    seed : of samples, of the order in which training takes the data, and of new weights
    dtype : of the computation
    """

    kind: ClassVar[str]
    wanting: ClassVar[str]  # what a recipe that is none of a class lacks, said by `expect`; {} is its kind
    completion_key: ClassVar[str] = "max_completion_length"  # bounds a completion
    rollout = cast(RolloutConfig | None, None)  # the sampling engine: a key of the kinds that have one
    model: PathText
    output_dir: PathText
    seed: Seed = 42
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    trainer_options: dict[str, Any] = field(default_factory=dict, metadata=NOT_YAML)
    """Options of TRL's and transformers' trainers (passed_through.py), which are flat keys of the YAML."""
    warnings: list[str] = field(default_factory=list, init=False)
    """What is allowed and unwise, a line each."""

    def resolved(self) -> dict[str, Any]:
        """Every key with its value, as YAML would give it: make_recipe(recipe.resolved()) == recipe."""
        return {"kind": self.kind, **as_mapping(self), **self.trainer_options}

    def as_yaml(self) -> str:
        """The text of a recipe file that says the same, every key written out."""
        return dump_yaml(self.resolved())

    def with_models(self, directory_of: Callable[[str], str]) -> Self:
        """The same recipe with each model that it names replaced by what `directory_of` says of it."""
        return dataclasses.replace(self, model=directory_of(self.model))

    def expect(self, cls: type[R]) -> R:
        """Itself, where it is a recipe of this class. Raises UserError otherwise."""
        if not isinstance(self, cls):
            raise UserError(f"a recipe of kind {self.kind} {cls.wanting.format(self.kind)}", "kind")
        return self

    def evaluation(self, run: str) -> dict[str, Any] | None:
        """The mapping of a recipe of kind eval for the model that a training by this recipe has left in the directory
        `run`; None where it does not say which problems tell how good that model is.
        """
        return None

    # ---- sampling -----------------------------------------------------------------------------------------------

    def with_rollout(self, **changed: Any) -> Self:
        """The same recipe with other settings of its engine."""
        assert self.rollout is not None
        key: dict[str, Any] = {"rollout": dataclasses.replace(self.rollout, **changed)}
        return dataclasses.replace(self, **key)

    def check_model_len(self) -> None:
        """Raise a UserError where the engine's longest sequence does not hold a prompt and a completion."""
        need = max(bound or 1 for bound in self.prompt_bounds()) + self.sampling().max_tokens
        if self.rollout is not None and (self.rollout.max_model_len or need) < need:
            wrong = f"must hold a prompt and a completion, at least {need} tokens here; raise or remove it"
            raise UserError(wrong, "rollout.max_model_len")

    def sampling(self, samples: int = 1) -> SamplingConfig:
        """How its engine samples. samples : completions of each prompt"""
        raise NotImplementedError

    def caches(self) -> list[PolicyConfig | None]:
        """The caches that its engine samples under, in turn; None: the one that the model's directory names."""
        return []

    def prompt_caches(self) -> list[PromptCacheConfig]:
        """How the contexts of its prompts are compacted, in turn; empty: they are not."""
        return []

    def prompt_sources(self) -> dict[str, DataConfig]:
        """Where its prompts come from: dotted key -> dataset."""
        return {}

    def prompt_bounds(self) -> list[int | None]:
        """The most tokens of a prompt, of each source of prompts; None: not known."""
        return [data.max_prompt_tokens for data in self.prompt_sources().values()]


@dataclass(frozen=True, kw_only=True)
class TrainRecipe(Recipe):
    """What every training has."""

    wanting: ClassVar[str] = "is not trained; use sparse-rl {}"
    validation = cast(ValidationConfig | None, None)  # a key of the kinds that hold problems out
    data: DataConfig
    training: TrainingConfig = flat(TrainingConfig)
    lora: LoraConfig | None = None
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        options = self.trainer_options.get("gradient_checkpointing_kwargs")
        options = parse_yaml(options, "gradient_checkpointing_kwargs") if isinstance(options, str) else options
        if isinstance(options, dict) and options.get("use_reentrant"):
            wrong = "the eviction trace does not survive reentrant checkpointing; set it to false or remove it"
            raise UserError(wrong, "gradient_checkpointing_kwargs.use_reentrant")
        if self.lora is not None and self.launch.zero_stage == 3:
            wrong = "LoRA under ZeRO-3 takes reentrant checkpointing, which cannot be replayed; use stage 2 or lower"
            raise UserError(wrong, "launch.zero_stage")

    def prompt_sources(self) -> dict[str, DataConfig]:
        return {"data": self.data} | ({} if self.validation is None else {"validation.data": self.validation.data})

    # ---- what it trains on --------------------------------------------------------------------------------------

    def samples_behind_prompts(self) -> bool:
        """Whether completions are sampled behind the prompts of its dataset, as it trains."""
        return False

    def columns(self) -> tuple[str, ...]:
        """The columns that its dataset must have."""
        return ("prompt", "completion")

    def named_rewards(self) -> tuple[str, list[Any]]:
        """(the key that names rewards, what it names)"""
        return "rewards", []

    # ---- batches ------------------------------------------------------------------------------------------------

    def update_rows(self) -> int:
        """Rows of one update, over all processes."""
        training = self.training
        return training.per_device_train_batch_size * training.gradient_accumulation_steps * self.launch.processes

    def describe_batches(self, rows: int) -> str:
        """The arithmetic of batches in words, for a dataset of so many rows.

        Raises UserError where these do not fill what the training takes at once.
        """
        per_epoch = -(-rows // self.update_rows())
        return f"{self.update_rows()} rows a step, {per_epoch} steps an epoch, {self.count_steps(per_epoch)} steps"

    def count_steps(self, per_epoch: int) -> int:
        """Steps of the whole training. per_epoch : steps of one epoch"""
        training = self.training
        return training.max_steps if training.max_steps > 0 else max(1, round(per_epoch * training.num_train_epochs))

    # ---- memory -------------------------------------------------------------------------------------------------

    def longest_row(self, prompt: int) -> int | None:
        """Tokens of the longest row that is trained on, where a prompt has so many; None: no bound is known."""
        raise NotImplementedError

    def keeps_traces(self) -> bool:
        """Whether recorded traces are kept for training."""
        return False

    def sequences_sampled(self) -> int:
        """Sequences that one process has from its engine at a time."""
        return self.training.per_device_train_batch_size * self.training.gradient_accumulation_steps

    def further_models(self, own_engine: bool) -> list[tuple[str, str]]:
        """(name, note) of each further copy of the model that one process holds.

        own_engine : the engine has weights of its own, which are counted with it
        """
        return []
