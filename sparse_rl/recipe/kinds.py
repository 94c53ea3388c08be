"""The kinds of recipe, each one dataclass: what its YAML may say, the defaults, and what must hold between keys.

To add a kind: a subclass of Recipe with a `kind` and a docstring for its keys, and one entry in KINDS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from rollout.config import RolloutConfig
from sparse_rl.attention.config import TargetConfig
from sparse_rl.attention.kernels import AttentionKernel
from sparse_rl.config import (
    AtLeastOne,
    BelowOne,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Probability,
    Rule,
    Text,
    as_mapping,
)
from sparse_rl.errors import UserError
from sparse_rl.policies.config import CONFIGS, accepted_parameters, cache_config
from sparse_rl.recipe.blocks import (
    DataConfig,
    SweepConfig,
    ValidationConfig,
)
from sparse_rl.recipe.schema import dump_yaml, parse_yaml
from trainer.config import LaunchConfig, LoraConfig
from trainer.grpo.config import GuardConfig
from trainer.losses.config import BoundaryConfig

Scheduler = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
    "greedy",
]
Loss = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]
Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
MaxSteps = Annotated[int, Rule(">= 1, or -1 to count epochs", lambda v: v >= 1 or v == -1)]
NOT_YAML = {"yaml": False}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What every kind of recipe has. `model` is a directory or a name on the hub."""

    kind: ClassVar[str]
    model: Text
    output_dir: Text
    seed: NonNegativeInt = 42
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    trainer_options: dict[str, Any] = field(default_factory=dict, metadata=NOT_YAML)
    warnings: list[str] = field(default_factory=list, init=False)

    def resolved(self) -> dict[str, Any]:
        """Every key with its value, as YAML would give it: make_recipe(recipe.resolved()) == recipe."""
        return {"kind": self.kind, **as_mapping(self), **self.trainer_options}

    def save_resolved(self, path: str | Path) -> None:
        Path(path).write_text(dump_yaml(self.resolved()), encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class TrainRecipe(Recipe):
    """What every training has; the names and, where not restated below, the meanings are those of TRL."""

    data: DataConfig
    learning_rate: Positive = 1e-6
    lr_scheduler_type: Scheduler = "constant"
    warmup_steps: NonNegative = 0.0  # below 1: a share of all steps
    max_steps: MaxSteps = -1  # above num_train_epochs where given
    num_train_epochs: Positive = 1.0
    per_device_train_batch_size: PositiveInt = 8
    gradient_accumulation_steps: PositiveInt = 1
    gradient_checkpointing: bool = True
    max_grad_norm: NonNegative = 1.0
    weight_decay: NonNegative = 0.0
    adam_beta1: BelowOne = 0.9
    adam_beta2: BelowOne = 0.999
    logging_steps: PositiveInt = 1
    save_steps: NonNegativeInt = 100  # 0: only at the end
    save_total_limit: PositiveInt | None = 2
    report_to: list[Literal["wandb", "tensorboard"]] = field(default_factory=list)
    run_name: str | None = None
    lora: LoraConfig | None = None
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self) -> None:
        options = self.trainer_options.get("gradient_checkpointing_kwargs")
        options = parse_yaml(options, "gradient_checkpointing_kwargs") if isinstance(options, str) else options
        if isinstance(options, dict) and options.get("use_reentrant"):
            mend = "the eviction trace does not survive reentrant checkpointing; set it to false or remove it"
            raise UserError(mend, "gradient_checkpointing_kwargs.use_reentrant")
        if self.lora is not None and self.launch.zero_stage == 3:
            mend = "LoRA under ZeRO-3 takes reentrant checkpointing, which cannot be replayed; use stage 2 or lower"
            raise UserError(mend, "launch.zero_stage")


@dataclass(frozen=True, kw_only=True)
class ReplayedRecipe(TrainRecipe):
    """Training under evictions.

    attention_kernel : what computes attention. sdpa makes a layer's S x S mask; flex and flex_sorted (FlexAttention, on
        a GPU) visit the 128 x 128 tiles that hold something, with keys in natural order or sorted by eviction; dense is
        the reference. auto takes flex_sorted, else flex, where they are exact on this very machine, else sdpa
    """

    attention_kernel: Literal["auto", AttentionKernel] = "auto"

    @property
    def attending_models(self) -> list[str]:
        """The models that attend by this kernel."""
        return [self.model]


@dataclass(frozen=True, kw_only=True)
class SampledRecipe(ReplayedRecipe):
    """Training on sequences that an engine samples, or simulates, under `cache`: {policy: name, **its parameters}."""

    cache: dict[str, Any]
    max_completion_length: PositiveInt = 4096
    temperature: Positive = 1.0
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    validation: ValidationConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_cache(self.cache)
        if self.rollout.tensor_parallel > 1:
            mend = "in training each process has an engine of its own; set it to 1, and use launch.processes"
            raise UserError(mend, "rollout.tensor_parallel")
        check_model_len(self)

    @property
    def prompt_sources(self) -> list[DataConfig]:
        """Where the prompts come from."""
        return [self.data, *([self.validation.data] if self.validation is not None else [])]


@dataclass(frozen=True, kw_only=True)
class GRPORecipe(SampledRecipe):
    """RL under a sparse cache; {policy: full} is RL with a full cache.

    train_attention : replay the recorded evictions, or attend to everything (a mismatch, for comparison)
    importance_correction, importance_clip : what the trainer does with the ratio trainer / sampler
    zero_truncated_advantages : no gradient from outputs that hit max_completion_length
    uniform_groups : groups without reward variance have advantage 0; `drop` also leaves them out of the loss's mean
    """

    kind: ClassVar[str] = "grpo"
    rewards: list[dict[str, Any] | Text]
    num_generations: Annotated[int, Rule(">= 2", lambda v: v >= 2)] = 8
    top_p: Fraction = 1.0
    top_k: PositiveInt | None = None
    loss_type: Loss = "grpo"
    epsilon: Positive = 0.2
    epsilon_high: Positive | None = None
    beta: NonNegative = 0.0
    scale_rewards: Literal["group", "batch", "none"] = "group"
    num_iterations: PositiveInt = 1
    steps_per_generation: PositiveInt | None = None
    train_attention: Literal["replay", "full"] = "replay"
    importance_correction: Correction = "token_truncate"
    importance_clip: AtLeastOne = 2.0
    zero_truncated_advantages: bool = True
    uniform_groups: Literal["keep", "drop"] = "keep"
    replay_guard: GuardConfig = field(default_factory=GuardConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rewards or not all(self.rewards):
            raise UserError("name at least one reward, for example [math]", "rewards")
        if self.loss_type == "vespo" and self.importance_correction.startswith("sequence"):
            raise UserError("loss_type vespo needs token_truncate, token_mask or none", "importance_correction")
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        batch = self.completions_per_generation
        if batch % self.num_generations:
            name = "steps_per_generation" if self.steps_per_generation else "gradient_accumulation_steps"
            raise UserError(
                f"{self.num_generations} does not divide the global batch {batch} (per_device_train_batch_size "
                f"{self.per_device_train_batch_size} × launch.processes {self.launch.processes} × {name} {steps}); "
                "groups must be whole",
                "num_generations",
            )
        if self.uniform_groups == "drop" and (self.beta or self.loss_type not in ("grpo", "sapo")):
            mend = "drop needs beta 0 and a loss that averages over responses: loss_type grpo or sapo"
            raise UserError(mend, "uniform_groups")
        if self.validation is not None and self.validation.data.thinking != self.data.thinking:
            raise UserError("must be as in data.thinking", "validation.data.thinking")
        if self.top_p < 1 or self.top_k is not None:
            self.warnings.append(
                "top_p < 1 or top_k truncates the sampler's support, which biases the policy ratio; "
                "train with top_p: 1.0 and top_k: null, and use them in evaluation"
            )

    @property
    def completions_per_generation(self) -> int:
        """Over all processes."""
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        return self.per_device_train_batch_size * self.launch.processes * steps

    def check_prompts(self, count: int) -> int:
        """The prompts of one generation. Raises UserError where the data hold fewer: TRL would train on nothing."""
        need = self.completions_per_generation // self.num_generations
        if count < need:
            raise UserError(
                f"holds {count} prompts, but one generation takes {need} (per_device_train_batch_size × processes × "
                "steps / num_generations); lower the batch, or add data",
                "data",
            )
        return need


@dataclass(frozen=True, kw_only=True)
class TaughtRecipe(ReplayedRecipe):
    """Training on what a dense teacher says of a text.

    teacher : a model with the student's vocabulary; None: the starting model itself
    teacher_cache : a folder that `sparse-rl teacher` writes and training reads; the teacher is then not loaded
    teacher_cache_dtype : of the log-probs in it
    temperature : tau, of both distributions, and of sampling
    divergence, jsd_beta : forward KL(teacher || student), reverse, or the generalised JSD between them
    top_k : the teacher's most probable tokens that count one by one, the rest as one; None: the whole vocabulary
    renormalise : drop the rest instead
    kl_weight, ce_weight : of tau^2 KL, and of the cross-entropy with the completions
    chunk : positions whose logits are alive at a time
    """

    teacher: Text | None = None
    teacher_cache: Text | None = None
    teacher_cache_dtype: Literal["float32", "bfloat16", "float16"] = "float16"
    temperature: Positive = 1.0
    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    jsd_beta: Probability = 0.5
    top_k: PositiveInt | None = None
    renormalise: bool = False
    kl_weight: NonNegative = 1.0
    ce_weight: NonNegative = 0.0
    chunk: PositiveInt = 512
    validation: ValidationConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_weight == 0 and self.ce_weight == 0:
            raise UserError("one of kl_weight and ce_weight must be above 0", "kl_weight")
        if self.divergence == "jsd" and not 0 < self.jsd_beta < 1:
            raise UserError("must be between 0 and 1; the ends are forward and reverse", "jsd_beta")
        if self.renormalise and self.top_k is None:
            raise UserError("is about the teacher's top k; name top_k", "renormalise")
        if self.teacher_cache is not None and self.top_k is None:
            raise UserError("needs top_k: that many log-probs are kept, for example 256", "teacher_cache")


@dataclass(frozen=True, kw_only=True)
class DistillRecipe(SampledRecipe, TaughtRecipe):
    """KL distillation under recorded evictions: a teacher with a full cache, a student with `cache` (G-KV appendix C).

    completions : those of the dataset, whose evictions are simulated; or the student's own, sampled under eviction
    keep : a reward that the dataset's completions must score `keep_from` with; the others are dropped
    refresh_every : steps after which the simulating model takes the student's weights; 0: it stays the starting model
    packing : put several short sequences into one row; none sees another
    max_length : longer sequences are dropped
    """

    kind: ClassVar[str] = "distill"
    completions: Literal["data", "student"] = "data"
    keep: dict[str, Any] | Text | None = None
    keep_from: Positive = 1.0
    refresh_every: NonNegativeInt = 0
    max_length: PositiveInt | None = None
    packing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        sampled = self.completions == "student"
        if sampled and self.teacher_cache is not None:
            mend = "holds what the teacher says of the dataset's completions; the student's own are new each time"
            raise UserError(mend, "teacher_cache")
        if sampled and (self.keep is not None or self.refresh_every):
            key = "keep" if self.keep is not None else "refresh_every"
            raise UserError("is for the dataset's completions; remove it", key)
        if self.refresh_every and self.save_steps % self.refresh_every:
            mend = f"must divide save_steps ({self.save_steps}): a resumed run takes the weights of its checkpoint"
            raise UserError(mend, "refresh_every")

    @property
    def attending_models(self) -> list[str]:
        """With packing a teacher of its own attends by the kernel too: no sequence of a row sees another."""
        return [self.model, *([self.teacher] if self.packing and self.teacher is not None else [])]


@dataclass(frozen=True, kw_only=True)
class KVpopRecipe(TaughtRecipe):
    """Retrofit of the learned policy `kvpop`: a student under the mask of its own scorers, which are trained beside it.

    max_length : S; longer texts are dropped
    packing : join texts into rows of S tokens; each sees those before it (the papers' choice). Off: one text to a row,
        and only its completion is learned
    prefill : masked, from the first token on; or dense, as in decoding: a prompt sees the whole of itself
    target : what the scorers are to foresee
    boundary, boundary_weight : their loss
    scorer_learning_rate, scorer_final_learning_rate, scorer_warmup_steps : theirs: it rises, and falls along a cosine;
        learning_rate and lr_scheduler_type are the model's
    train_base : whether the model learns too, from KL and cross-entropy
    """

    kind: ClassVar[str] = "kvpop"
    cache: dict[str, Any]
    learning_rate: Positive = 8e-5
    weight_decay: NonNegative = 1e-4
    adam_beta2: BelowOne = 0.95
    top_k: PositiveInt | None = 256
    max_length: PositiveInt = 16384
    packing: bool = True
    prefill: Literal["masked", "dense"] = "masked"
    target: TargetConfig = field(default_factory=TargetConfig)
    boundary: BoundaryConfig = field(default_factory=BoundaryConfig)
    boundary_weight: NonNegative = 1.0
    scorer_learning_rate: Positive = 1e-3
    scorer_final_learning_rate: Positive = 8e-5
    scorer_warmup_steps: NonNegativeInt = 100
    train_base: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_cache(self.cache, learned=True)
        if self.packing and self.prefill == "dense":
            raise UserError("needs packing: false, where it is known what is a prompt", "prefill")
        if self.lora is not None:
            raise UserError("the whole model is trained, or with train_base: false the scorers alone", "lora")
        policy: Any = cache_config(self.cache)
        if policy.scorer.name == "recency" and not self.train_base:
            raise UserError("the scorer recency has no parameters, so nothing would be trained", "train_base")
        if self.max_length <= policy.sinks + policy.window + policy.k:
            self.warnings.append(
                f"rows of at most {self.max_length} tokens never exceed the budget: nothing is evicted"
            )
        if self.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
            raise UserError("depends on a metric; name one that depends on the step alone", "lr_scheduler_type")
        if self.scorer_final_learning_rate > self.scorer_learning_rate:
            raise UserError("must not exceed scorer_learning_rate", "scorer_final_learning_rate")


@dataclass(frozen=True, kw_only=True)
class SFTRecipe(TrainRecipe):
    """Supervised fine-tuning with a full cache: the start of the quickstart, of cold starts, and uptraining.

    Packing is TRL's: packing: true keeps documents apart, with packing_strategy: wrapped they see each other.

    stop_at_accuracy : stop once full-cache accuracy on fresh problems reaches it, looked at every stop_check_every
    """

    kind: ClassVar[str] = "sft"
    learning_rate: Positive = 2e-5
    lr_scheduler_type: Scheduler = "linear"
    max_length: PositiveInt | None = 4096
    completion_only_loss: bool = True
    stop_at_accuracy: Fraction | None = None
    stop_check_every: PositiveInt = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stop_at_accuracy is not None and self.data.synthetic is None:
            raise UserError("needs fresh problems, so a data.synthetic dataset; remove it", "stop_at_accuracy")


@dataclass(frozen=True, kw_only=True)
class EvalRecipe(Recipe):
    """pass@1 over tasks × policies × budgets.

    cache : the policy, and the base parameters of a sweep; without it the model's own cache_policy.json, if any
    """

    kind: ClassVar[str] = "eval"
    tasks: dict[str, DataConfig]
    samples: PositiveInt = 32
    temperature: NonNegative = 0.6
    top_p: Fraction = 0.95
    top_k: PositiveInt | None = None
    max_completion_length: PositiveInt = 32768
    cache: dict[str, Any] | None = None
    sweep: SweepConfig = field(default_factory=SweepConfig)
    accuracy: Text | dict[str, Any] = "math"
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    def __post_init__(self) -> None:
        if not self.tasks:
            raise UserError("name at least one, for example tasks: {aime24: {path: aime24.jsonl}}", "tasks")
        self.caches()
        check_model_len(self)
        if self.temperature == 0 and self.samples > 1:
            self.warnings.append(
                f"temperature 0 gives {self.samples} equal samples per problem; samples: 1 says as much"
            )

    @property
    def prompt_sources(self) -> list[DataConfig]:
        """Where the prompts that are sampled come from."""
        return list(self.tasks.values())

    def caches(self) -> list[dict[str, Any] | None]:
        """The cache block of every point of the sweep; [None] leaves it to the model's directory.

        A parameter of the cache block goes to each swept policy that has it; one that none of them has is an error.
        """
        base = dict(self.cache or {})
        if not self.sweep.policy and not self.sweep.budget:
            if self.cache is not None:
                check_cache(base)
            return [self.cache]
        own = base.pop("policy", None)
        names = self.sweep.policy or ([own] if own is not None else [])
        if not names:
            raise UserError("name the policies too, here or as cache.policy", "sweep.budget")
        blocks: list[dict[str, Any] | None] = []
        used: set[str] = set()
        for name in names:
            if name not in CONFIGS:
                check_cache({"policy": name}, "sweep.policy")
            accepted = accepted_parameters(name)
            mine = {key: value for key, value in base.items() if key in accepted}
            used |= mine.keys()
            sweeps_budget = self.sweep.budget and "budget" in accepted
            for budget in self.sweep.budget if sweeps_budget else [None]:
                block = {"policy": name, **mine, **({"budget": budget} if budget is not None else {})}
                check_cache(block, "sweep")
                if block not in blocks:
                    blocks.append(block)
        for key in base:
            if key not in used and key != "budget":
                raise UserError(
                    f"none of the policies {', '.join(names)} has this parameter; remove it", f"cache.{key}"
                )
        return blocks


KINDS: dict[str, type[Recipe]] = {
    "grpo": GRPORecipe,
    "distill": DistillRecipe,
    "kvpop": KVpopRecipe,
    "sft": SFTRecipe,
    "eval": EvalRecipe,
}


def check_cache(block: Mapping[str, Any], key: str = "cache", *, learned: bool = False) -> None:
    """Raise a UserError unless `block` is {policy: a known name, its parameters with values in range}.

    learned : of a policy that is retrofitted to a model, instead of one that engines sample under
    """
    if not isinstance(block.get("policy"), str):
        raise UserError("missing; name a cache policy, for example full, streaming or gkv", f"{key}.policy")
    try:
        policy = cache_config(block)
    except UserError as error:
        raise UserError(str(error), key) from None
    unsampled = policy.schedule.before_attending
    if unsampled != learned:
        mend = "no engine samples under it yet; it is trained by recipes of kind kvpop"
        raise UserError(mend if unsampled else "recipes of kind kvpop train kvpop", f"{key}.policy")


def check_model_len(recipe: SampledRecipe | EvalRecipe) -> None:
    """Raise a UserError where the engine's longest sequence does not hold a prompt and a completion."""
    prompt = max(data.max_prompt_tokens or 1 for data in recipe.prompt_sources)
    need = prompt + recipe.max_completion_length
    if recipe.rollout.max_model_len is not None and recipe.rollout.max_model_len < need:
        mend = f"must hold a prompt and a completion, at least {need} tokens here; raise or remove it"
        raise UserError(mend, "rollout.max_model_len")
