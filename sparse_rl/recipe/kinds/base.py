"""What every kind of recipe has, and what it answers about itself.

Commands ask a recipe such questions instead of which kind it is. Where a kind has no answer (an evaluation has no
teacher), it refuses in one line, which the user reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Self

from rollout.config import RolloutConfig, SamplingConfig
from rollout.context.config import PromptCacheConfig
from sparse_rl.config import Configuration, PathText, PositiveInt, Seed, as_mapping, flat
from sparse_rl.data.config import DataConfig
from sparse_rl.errors import UserError
from sparse_rl.methods.config import PolicyConfig
from sparse_rl.recipe.schema import dump_yaml, parse_yaml
from trainer.config import LaunchConfig, LoraConfig, TrainingConfig

NOT_YAML = {"yaml": False}


GROUPS_OF_THEIR_OWN = ("lomo", "adalomo", "galore", "apollo")  # optimizers that transformers hands its own groups


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


@dataclass(frozen=True)
class SampledProblems:
    """The problems that `sparse-rl rollout` samples from a recipe, each so many times; `where` is the key of `data`."""

    data: DataConfig
    where: str
    samples: int


@dataclass(frozen=True, kw_only=True)
class Recipe(Configuration):
    """What every kind of recipe has.

    model : the directory of a model, or of a run that has left one, or a name on the hub; weights are safetensors only
    output_dir : the folder of the run
    seed : of samples, of the order in which training takes the data, and of new weights
    dtype : of the computation
    """

    kind: ClassVar[str]
    trained: ClassVar[bool] = False
    completion_key: ClassVar[str] = "max_completion_length"  # bounds a completion
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

    def save_resolved(self, path: str | Path) -> None:
        """Write `as_yaml` to a file, in UTF-8."""
        Path(path).write_text(self.as_yaml(), encoding="utf-8")

    def with_models(self, directory_of: Callable[[str], str]) -> Self:
        """The same recipe with each model that it names replaced by what `directory_of` says of it."""
        return dataclasses.replace(self, model=directory_of(self.model))

    # ---- what it is for -----------------------------------------------------------------------------------------

    def as_training(self) -> TrainRecipe:
        """Itself, where it is trained. Raises UserError otherwise."""
        self._refuse(f"is not trained; use sparse-rl {self.kind}")

    def as_taught(self) -> Any:
        """Itself (a TaughtRecipe), where it has a teacher. Raises UserError otherwise."""
        self._refuse("has no teacher; use one of distill or kvpop")

    def as_evaluation(self) -> Any:
        """Itself (an EvalRecipe), where it is an evaluation. Raises UserError otherwise."""
        self._refuse("is not evaluated; it needs kind: eval")

    def as_perplexity(self) -> Any:
        """Itself (a PerplexityRecipe), where it has a text to decode. Raises UserError otherwise."""
        self._refuse("has no text to decode; it needs kind: perplexity")

    def as_swept(self) -> Any:
        """Itself (a SweptRecipe), where it measures under a sweep of caches. Raises UserError otherwise."""
        self._refuse("sweeps no caches; use one of eval or perplexity")

    def evaluation(self, run: str) -> dict[str, Any] | None:
        """The mapping of a recipe of kind eval for the model that a training by this recipe has left in the directory
        `run`; None where it does not say which problems tell how good that model is.
        """
        return None

    def sampled_problems(self) -> SampledProblems:
        """What `sparse-rl rollout` samples. Raises UserError where the kind has no cache to sample under."""
        self._refuse("has no cache to sample under; use one of grpo or eval")

    def _refuse(self, why: str) -> NoReturn:
        raise UserError(f"a recipe of kind {self.kind} {why}", "kind")

    # ---- sampling -----------------------------------------------------------------------------------------------

    def engine_config(self) -> RolloutConfig | None:
        """The sampling engine; None where none is used."""
        return None

    def with_engine_config(self, rollout: RolloutConfig) -> Self:
        """The same recipe with another engine."""
        raise NotImplementedError

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

    trained: ClassVar[bool] = True
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

    def as_training(self) -> TrainRecipe:
        return self

    def prompt_sources(self) -> dict[str, DataConfig]:
        held_out = self.held_out()
        return {"data": self.data, **({} if held_out is None else {"validation.data": held_out.data})}

    # ---- what it trains on --------------------------------------------------------------------------------------

    def samples_behind_prompts(self) -> bool:
        """Whether completions are sampled behind the prompts of its dataset, as it trains."""
        return False

    def held_out(self) -> ValidationConfig | None:
        """What is measured on held-out problems."""
        return None

    def columns(self) -> tuple[str, ...]:
        """The columns that its dataset must have."""
        return ("prompt",)

    def rewards_by_key(self) -> Mapping[str, list[Any]]:
        """The rewards that it names, by the key that names them."""
        return {}

    def taught(self) -> Any:
        """Itself (a TaughtRecipe), where a teacher is asked; else None."""
        return None

    def refuse_own_groups(self) -> None:
        """Raise UserError for an optimizer under which model and scorers cannot have a learning rate each."""
        if str(self.trainer_options.get("optim")).startswith(GROUPS_OF_THEIR_OWN):
            raise UserError("it groups the weights itself, and model and scorers have a learning rate each", "optim")

    def exported_cache(self) -> PolicyConfig | None:
        """The cache policy that the trained model carries; None: none, or the trainer writes it."""
        return None

    # ---- attention under evictions ------------------------------------------------------------------------------

    def attention_kernel(self) -> str | None:
        """The attention kernel that is asked for; None where nothing is replayed."""
        return None

    def with_attention_kernel(self, kernel: str) -> Self:
        """The same recipe with another attention kernel."""
        raise NotImplementedError

    def attending_models(self) -> list[str]:
        """The models that attend by this kernel."""
        return [self.model]

    def learned_cache(self) -> PolicyConfig | None:
        """The cache whose policy is learned in this training; None where none is."""
        return None

    def foresees(self) -> bool:
        """Whether KVpop's scorers learn: for that their target is computed, the mass of future attention."""
        return False

    def trains_model(self) -> bool:
        """Whether the model itself learns, and not only what is attached to it."""
        return True

    def reads_weights(self) -> bool:
        """Whether it starts from the model's own weights."""
        return True

    # ---- batches ------------------------------------------------------------------------------------------------

    def update_rows(self) -> int:
        """Rows of one update, over all processes."""
        return self.training.per_device_train_batch_size * self.training.gradient_accumulation_steps * self.processes

    @property
    def processes(self) -> int:
        """The training processes, over all machines."""
        return self.launch.processes

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

    def keeps_logits(self) -> bool:
        """Whether the logits of a whole row are alive in training."""
        return False

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
