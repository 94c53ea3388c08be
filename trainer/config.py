"""Every setting of a training, with its default. Imports no torch. options.py lists what is refused of TRL's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rollout.config import GRPORolloutConfig, RolloutConfig
from rollout.context.config import PromptCacheConfig
from sparse_rl.attention.config import AttentionKernel
from sparse_rl.config import (
    AtLeastOne,
    BelowOne,
    Configuration,
    Fraction,
    NonNegative,
    NonNegativeInt,
    PathText,
    Positive,
    PositiveInt,
    Probability,
    Rule,
    Text,
    at_most,
)
from sparse_rl.errors import UserError
from sparse_rl.methods.config import FullConfig, KVpopPolicyConfig, LearnedConfig, PolicyConfig
from sparse_rl.methods.kvpop.config import BoundaryConfig, TargetConfig

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
MaxSteps = Annotated[int, Rule(">= 1, or -1 to count epochs", lambda v: v >= 1 or v == -1), at_most(2**31 - 1)]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Configuration):
    """Settings of every training. Names and meanings are as in TRL.

    learning_rate, lr_scheduler_type : highest learning rate, and its course over the steps
    num_train_epochs : number of times that the training goes through the data
    per_device_train_batch_size : number of rows of a forward pass in each process
    gradient_accumulation_steps : number of forward passes before each step of the optimizer
    gradient_checkpointing : true computes activations again in the backward pass, which saves memory
    max_grad_norm : norm to which a larger gradient is scaled down
    adam_beta1, adam_beta2, weight_decay : settings of AdamW
    logging_steps : number of steps between lines of metrics.jsonl
    save_total_limit : number of checkpoints to keep, the newest; None keeps all
    report_to, run_name : services that receive the metrics, and the name of the run there
    warmup_steps : number of warm-up steps; a value below 1 is a share of all steps
    max_steps : number of steps; overrides num_train_epochs
    save_steps : number of steps between checkpoints; 0 writes only the final model
    """

    learning_rate: Positive = 1e-6
    lr_scheduler_type: Scheduler = "constant"
    warmup_steps: NonNegative = 0.0
    max_steps: MaxSteps = -1
    num_train_epochs: Annotated[Positive, at_most(1_000_000)] = 1.0
    per_device_train_batch_size: PositiveInt = 8
    gradient_accumulation_steps: PositiveInt = 1
    gradient_checkpointing: bool = True
    max_grad_norm: NonNegative = 1.0
    weight_decay: NonNegative = 0.0
    adam_beta1: BelowOne = 0.9
    adam_beta2: BelowOne = 0.999
    logging_steps: PositiveInt = 1
    save_steps: NonNegativeInt = 100
    save_total_limit: PositiveInt | None = 2
    report_to: list[Literal["wandb", "tensorboard", "trackio"]] = field(default_factory=list)
    run_name: str | None = None


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Configuration):
    """Attention in training under evictions.

    attention_kernel : kernel that computes attention. gather collects, for each chunk of queries, the keys that any
        query of the chunk sees. flex and flex_sorted (FlexAttention, on a GPU) visit only those 128 x 128 tiles in
        which a query sees a key; flex_sorted first sorts the keys by the time of their eviction. sdpa builds a [tokens,
        tokens] mask for each layer. dense is the reference. auto takes flex_sorted, else flex, if it passes a check of
        exactness on this machine, else gather
    match_gradient : gradient of the biases and values that policy am fits. `through` lets the gradient flow to the
        keys, values and queries of the fit; `constant` treats the fitted biases and values as constants
    """

    attention_kernel: Literal["auto", AttentionKernel] = "auto"
    match_gradient: Literal["through", "constant"] = "through"


ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Configuration):
    """Settings of low-rank adapters. They have no dropout, because dropout cannot be replayed.

    r, alpha : rank of an adapter; its output is multiplied by alpha / r
    target_modules : adapted layers: a list of the last parts of their names, or a regular expression for whole names.
        all-linear adapts all linear layers except the head and, in a model with experts, only those of the attention.
        Routers and experts cannot be adapted
    """

    r: PositiveInt = 16
    alpha: PositiveInt = 32
    target_modules: list[Text] | Text = ALL_LINEAR


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(Configuration):
    """Settings of the launch.

    processes : number of processes of all machines, one for each GPU
    rollout_gpus : number of servers of rollouts that each machine starts for its own processes, on its last GPUs, or
        without GPUs on the CPU. They end with the run
    zero_stage : ZeRO stage of DeepSpeed; 0 means no DeepSpeed
    offload : true keeps the optimizer's state and, at stage 3, the weights in the memory of the CPU
    machines, machine_rank : number of machines, and the number of this machine, from 0
    main_process_ip, main_process_port : address of machine 0, if there are several machines
    gradient_dtype : number format in which DeepSpeed adds up the gradients of micro-batches and of processes: float32,
        or that of the weights, which sends half as many bytes and, with 16-bit weights, keeps half as many
    """

    processes: Annotated[PositiveInt, at_most(4096)] = 1
    rollout_gpus: Annotated[NonNegativeInt, at_most(64)] = 0
    zero_stage: Literal[0, 1, 2, 3] = 0
    gradient_dtype: Literal["float32", "weights"] = "float32"
    offload: bool = False
    machines: PositiveInt = 1
    machine_rank: NonNegativeInt = 0
    main_process_ip: str | None = None
    main_process_port: Annotated[int, Rule("from 1 to 65535", lambda v: 1 <= v <= 65535)] = 29500

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.offload and self.zero_stage == 0:
            raise UserError("needs DeepSpeed; set zero_stage to 1, 2 or 3", "offload")
        if self.processes % self.machines:
            raise UserError(f"{self.processes} is not divisible by machines ({self.machines})", "processes")
        if self.machine_rank >= self.machines:
            raise UserError(f"must be below machines ({self.machines}), got {self.machine_rank}", "machine_rank")
        if self.machines > 1 and not self.main_process_ip:
            raise UserError("is required with several machines; set it to the address of machine 0", "main_process_ip")


@dataclass(frozen=True, kw_only=True)
class DistillationLossConfig(Configuration):
    """Settings of the loss per token of training with a teacher (trainer/losses.py).

    temperature : temperature of the teacher's and the student's distribution, and of sampling; tau in the formulas
    divergence : forward is KL(teacher || student), reverse is KL(student || teacher), and jsd is the generalised
        Jensen-Shannon divergence
    jsd_beta : weight of the teacher in the generalised Jensen-Shannon divergence
    top_k : number of the teacher's most probable tokens that the divergence distinguishes; all other tokens count as
        one outcome. None means the whole vocabulary
    renormalise : leave all other tokens out, and renormalise both distributions over the top_k tokens
    kl_weight : weight of the divergence, which is also multiplied by tau^2
    ce_weight : weight of the cross-entropy of the completion tokens
    chunk : number of positions whose logits are in memory at a time
    """

    temperature: Positive = 1.0
    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    jsd_beta: Probability = 0.5
    top_k: PositiveInt | None = None
    renormalise: bool = False
    kl_weight: NonNegative = 1.0
    ce_weight: NonNegative = 0.0
    chunk: PositiveInt = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_weight == 0 and self.ce_weight == 0:
            raise UserError("one of kl_weight and ce_weight must be above 0", "kl_weight")
        if self.divergence == "jsd" and not 0 < self.jsd_beta < 1:
            raise UserError("must be above 0 and below 1; for 0 or 1 use divergence forward or reverse", "jsd_beta")
        if self.renormalise and self.top_k is None:
            raise UserError("needs the teacher's top k; set top_k", "renormalise")


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


@dataclass(frozen=True, kw_only=True)
class ScorersConfig(Configuration):
    """Settings for training the scorers of a learned policy further. Without this block they are not trained.

    The scorers' boundary loss is added to the loss of the model.

    weight : weight of the boundary loss
    learning_rate : maximum learning rate of the scorers, which follows the schedule of the model's learning rate
    target : training target of the scorers, a measure of the future attention to each token
    boundary : settings of the boundary loss
    """

    weight: Positive = 1.0
    learning_rate: Positive = 1e-5
    target: TargetConfig = field(default_factory=TargetConfig)
    boundary: BoundaryConfig = field(default_factory=BoundaryConfig)


GROUPS_OF_THEIR_OWN = ("lomo", "adalomo", "galore", "apollo")  # optimizers with their own parameter groups


def refuse_own_groups(optim: Any) -> None:
    """Raise UserError for an optimizer that cannot use separate learning rates for model and scorers."""
    if str(getattr(optim, "value", optim)).startswith(GROUPS_OF_THEIR_OWN):
        raise UserError(
            "groups parameters itself, but model and scorers need separate learning rates; use another optimizer",
            "optim",
        )


def check_sampled(
    cache: PolicyConfig,
    rollout: RolloutConfig | None,
    scorers: ScorersConfig | None,
    *,
    lora: bool,
    optim: Any,
    prompt_cache: PromptCacheConfig | None = None,
) -> None:
    """Raise UserError for a cache under which a training cannot sample, or not with these settings."""
    if prompt_cache is not None:
        if not isinstance(cache, FullConfig):
            raise UserError("nothing is evicted after a context that prompt_cache compacts; set cache: full", "cache")
        if rollout is not None and rollout.engine not in ("auto", "hf"):
            wrong = "only hf compacts contexts with the weights that are trained; set rollout.engine: hf"
            raise UserError(wrong, "rollout.engine")
        try:
            prompt_cache.check_trainable()
        except UserError as error:
            raise UserError(error.message, f"prompt_cache.{error.key}") from None
    try:
        cache.check_trainable()
    except UserError as error:
        raise UserError(error.message, f"cache.{error.key}") from None
    if isinstance(cache, LearnedConfig) and lora:
        raise UserError(f"does not work with cache.policy {cache.name}; remove lora", "lora")
    if rollout is not None and rollout.tensor_parallel > 1:
        wrong = "in training each process has an engine of its own; use launch.processes instead of tensor_parallel"
        raise UserError(wrong, "rollout.tensor_parallel")
    if scorers is None:
        return
    if not isinstance(cache, KVpopPolicyConfig):
        wrong = f"{cache.name} has no scorers to train; remove scorers, or set cache.policy to kvpop"
        raise UserError(wrong, "scorers")
    if cache.scorer.name == "recency":
        raise UserError("the scorer recency has no parameters, so there is nothing to learn; remove scorers", "scorers")
    refuse_own_groups(optim)


@dataclass(frozen=True, kw_only=True)
class DistillConfig(Configuration):
    """Settings of KL distillation under recorded evictions (G-KV appendix C).

    The teacher has a full cache, and the student has the cache policy `cache` of the recipe.

    completions : source of the completions. `data`: the dataset has them, and an engine simulates the evictions.
        `student`: the student samples them, under eviction
    keep : reward that selects completions of the dataset; completions that score below `keep_from` are dropped
    keep_from : minimum score for `keep`
    refresh_every : number of steps after which the model that simulates the evictions gets the student's current
        weights; 0 means that it always has the weights of the starting model
    packing : put several short sequences into one row, without attention between the sequences
    max_length : maximum number of tokens in prompt and completion; null means the limit of the model and the engine
    max_completion_length : maximum number of tokens in the completion
    overlong : treatment of sequences that exceed a limit. `truncate` shortens the completion, as in G-KV section 7.4;
        `drop` leaves the sequence out
    """

    max_completion_length: PositiveInt = 4096
    completions: Literal["data", "student"] = "data"
    keep: dict[str, Any] | Text | None = None
    keep_from: Positive = 1.0
    refresh_every: NonNegativeInt = 0
    max_length: PositiveInt | None = None
    overlong: Literal["truncate", "drop"] = "truncate"
    packing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("keep", "refresh_every", "overlong"):
            if getattr(self, key) not in (None, 0, "truncate") and self.completions == "student":
                raise UserError("applies only to the dataset's completions (completions: data); remove it", key)

    def check(
        self,
        cache: PolicyConfig,
        *,
        scorers: bool,
        save_steps: float,
        cached_teacher: bool,
        prompt_cache: PromptCacheConfig | None = None,
    ) -> None:
        """Raise UserError if these settings do not work with the other settings of a distillation.

        save_steps : number of steps between checkpoints; 0 for none
        prompt_cache : settings for compacting contexts; None if none is compacted
        """
        if scorers and self.packing:
            raise UserError("scorers read each sequence from its start; set packing: false", "packing")
        if self.packing and not cache.packs:
            raise UserError(f"sequences under {cache.name} cannot be packed; set packing: false", "packing")
        if self.packing and prompt_cache is not None and prompt_cache.fits:
            raise UserError("sequences after contexts with fitted entries cannot be packed; set false", "packing")
        if self.completions == "student" and cached_teacher:
            wrong = "covers only the dataset's completions, but the student samples new ones; remove teacher_cache"
            raise UserError(wrong, "teacher_cache")
        if self.refresh_every and save_steps % self.refresh_every:
            why = "because resuming sends the checkpoint's weights to the engine"
            raise UserError(f"must divide save_steps ({save_steps}), {why}", "refresh_every")


@dataclass(frozen=True, kw_only=True)
class KVpopTrainingConfig(TrainingConfig):
    """TrainingConfig with the papers' optimizer settings as defaults.

    learning_rate is the learning rate of the model; KVpopConfig has the learning rate of the scorers.
    """

    learning_rate: Positive = 8e-5
    weight_decay: NonNegative = 1e-4
    adam_beta2: BelowOne = 0.95


@dataclass(frozen=True, kw_only=True)
class KVpopLossConfig(DistillationLossConfig):
    """DistillationLossConfig that by default uses only the teacher's most probable tokens, as in the paper."""

    top_k: PositiveInt | None = 256


@dataclass(frozen=True, kw_only=True)
class GatesConfig(Configuration):
    """Settings for the training of DMS's gates (trainer/retrofit.py). KVpop's papers do not give these values.

    NVIDIA's published code has the temperature 0.1 and the weight 1, and raises the compression over all steps, or over
    a given number of them.

    temperature : temperature of the Gumbel-sigmoid (tau)
    weight : weight of the loss that is added if too few gates are open
    anneal_steps : number of steps in which the target compression ratio rises linearly from 1 to cache.compression
    """

    temperature: Positive = 0.5
    weight: Positive = 5.0
    anneal_steps: NonNegativeInt = 100


@dataclass(frozen=True, kw_only=True)
class KVpopConfig(Configuration):
    """Settings of the retrofit of the learned policy `kvpop`.

    The student attends under the mask that its own scorers decide, and the scorers are trained together with it. If
    `cache.prefill` is dense, prompt tokens see all tokens before them, as in sampling. Packed rows have no prompt.

    max_length : maximum number of tokens of a text; longer texts are dropped
    packing : true joins texts into rows of max_length tokens, where each text sees the texts before it (the papers'
        choice); false puts one text into a row, and only the completion of the text is learned
    target : training target of the scorers, a measure of the future attention to each token
    boundary : settings of the scorers' loss
    boundary_weight : weight of the scorers' loss
    gates : settings for the gates of policy dms; under dms, target and boundary have no effect
    scorer_learning_rate : maximum learning rate of the scorers; learning_rate and lr_scheduler_type apply to the model
    scorer_final_learning_rate : final learning rate of the scorers, after a cosine decay
    scorer_warmup_steps : number of steps in which the scorers' learning rate rises to its maximum
    train_base : train the model as well as the scorers, by KL and cross-entropy
    """

    max_length: PositiveInt = 16384
    packing: bool = True
    target: TargetConfig = field(default_factory=TargetConfig)
    boundary: BoundaryConfig = field(default_factory=BoundaryConfig)
    boundary_weight: NonNegative = 1.0
    gates: GatesConfig = field(default_factory=GatesConfig)
    scorer_learning_rate: Positive = 1e-3
    scorer_final_learning_rate: Positive = 8e-5
    scorer_warmup_steps: NonNegativeInt = 100
    train_base: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scorer_final_learning_rate > self.scorer_learning_rate:
            raise UserError("must not exceed scorer_learning_rate", "scorer_final_learning_rate")


@dataclass(frozen=True, kw_only=True)
class SFTTrainingConfig(TrainingConfig):
    """TrainingConfig with the usual learning rate and schedule of fine-tuning as defaults."""

    learning_rate: Positive = 2e-5
    lr_scheduler_type: Scheduler = "linear"


@dataclass(frozen=True, kw_only=True)
class SFTConfig(Configuration):
    """Settings of supervised fine-tuning with a full cache. With `data.traces` the recipe instead becomes one of kind
    distill with kl_weight 0 and ce_weight 1: of these settings it uses only `max_length`, and drops longer rows.

    With `packing: true`, TRL packs several documents into a row, and a token sees only its own document. With
    `packing_strategy: wrapped`, a token also sees the documents before its own in the row.

    max_length : largest number of tokens of a row, to which longer rows are cut; None cuts nothing
    completion_only_loss : false also trains on the tokens of the prompt
    from_scratch : initialise new weights from the recipe's seed; only configuration and tokenizer come from the model
    stop_at_accuracy : accuracy on newly generated problems, with a full cache, at which the training stops
    stop_check_every : number of steps between measurements of this accuracy
    """

    max_length: PositiveInt | None = 4096
    completion_only_loss: bool = True
    from_scratch: bool = False
    stop_at_accuracy: Fraction | None = None
    stop_check_every: PositiveInt = 50


Loss = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]
Correction = Literal["none", "ppo", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True, kw_only=True)
class GuardConfig(Configuration):
    """Settings of the replay guard, which stops a run whose trainer and sampler disagree on log-probs.

    The guard limits the mean gap |log p_trainer - log p_sampler| of a batch. The limit is `floor`, or `factor` times
    the mean gap of the probe (texts that are sampled without evictions) if that is larger.

    enabled : false only shows the gap
    factor : multiple of the probe's mean gap; None means 10 in float32 and 3 in half precision
    floor : minimum of the limit; None means 1e-4 in float32, 0.1 in bfloat16 and 0.02 in float16
    """

    enabled: bool = True
    factor: AtLeastOne | None = None
    floor: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class RejectionConfig(Configuration):
    """Settings of the rejection of completions that the model with a full cache would hardly have written.

    below : a completion has advantage 0 if p_trainer / p_sampler of one of its tokens is below this ratio. It still
        counts in its group's baseline, and in the loss's mean
    """

    below: Annotated[Positive, Rule("below 1", lambda v: v < 1)] = 1e-4


@dataclass(frozen=True, kw_only=True)
class SparseGRPOConfig(Configuration):
    """Settings of RL under a sparse cache. Fields that TRL has too have the same meaning as in TRL.

    num_generations, max_completion_length : completions of each prompt, and the most tokens of a completion
    temperature : temperature of sampling
    top_p, top_k, min_p : truncation of the distribution that is sampled from, and then trained; 1.0, None and 0 keep
        all tokens
    loss_type, scale_rewards : TRL's loss, and the deviation that divides the advantages
    epsilon, epsilon_high : lower and upper bound of the ratio's clipping; epsilon_high None means epsilon
    beta : weight of the KL divergence from the start model; 0 loads no such model
    num_iterations, steps_per_generation : passes over each generation, and the steps of a pass; None means
        gradient_accumulation_steps
    train_attention : `replay` applies the recorded evictions in training. `full` attends to all tokens, as the sampler
        did not; it is meant for comparison, and with `rejection` for training a model with a full cache
    importance_correction : use of the importance ratio p_trainer / p_sampler in the loss: truncated or masked, per
        token or per sequence. With `none` the loss has no such ratio, and the old log-probs are the trainer's own.
        With `ppo` they are the sampler's, so that PPO clips this ratio
    importance_clip : value above which importance_correction truncates or masks the ratio
    zero_truncated_advantages : give advantage 0, and therefore no gradient, to outputs that reach max_completion_length
    uniform_groups : groups without reward variance have advantage 0; `drop` also excludes them from the loss's mean
    rejection : null rejects nothing
    tool_seconds : time limit of a call of a tool; a conversation with a late tool ends
    """

    num_generations: Annotated[int, Rule(">= 2", lambda v: v >= 2)] = 8
    max_completion_length: PositiveInt = 4096
    temperature: Positive = 1.0
    top_p: Fraction = 1.0
    top_k: PositiveInt | None = None
    min_p: Probability = 0.0
    loss_type: Loss = "grpo"
    epsilon: Annotated[Positive, at_most(1000)] = 0.2
    epsilon_high: Annotated[Positive, at_most(1000)] | None = None
    beta: Annotated[NonNegative, at_most(1000)] = 0.0
    scale_rewards: Literal["group", "batch", "none"] = "group"
    num_iterations: Annotated[PositiveInt, at_most(1000)] = 1
    steps_per_generation: PositiveInt | None = None
    train_attention: Literal["replay", "full"] = "replay"
    importance_correction: Correction = "token_truncate"
    importance_clip: Annotated[AtLeastOne, at_most(1_000_000)] = 2.0
    zero_truncated_advantages: bool = True
    uniform_groups: Literal["keep", "drop"] = "keep"
    replay_guard: GuardConfig = field(default_factory=GuardConfig)
    rejection: RejectionConfig | None = None
    tool_seconds: Annotated[Positive, at_most(86_400)] = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rejection and (self.train_attention, self.importance_correction) != ("full", "token_truncate"):
            raise UserError("needs train_attention full and importance_correction token_truncate", "rejection")
        if self.loss_type == "vespo" and self.importance_correction.startswith("sequence"):
            raise UserError("loss_type vespo needs token_truncate, token_mask or none", "importance_correction")
        if self.uniform_groups == "drop" and (self.beta or self.loss_type not in ("grpo", "sapo")):
            mend = "drop needs beta 0, and loss_type grpo or sapo, which average over responses"
            raise UserError(mend, "uniform_groups")

    @property
    def weighs(self) -> bool:
        """True if the loss is multiplied by the importance ratio."""
        return self.importance_correction not in ("none", "ppo")

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise UserError if an option of TRL (name -> value) contradicts these settings."""
        if self.uniform_groups == "drop" and options.get("multi_objective_aggregation") == "normalize_then_sum":
            raise UserError("drop needs multi_objective_aggregation sum_then_normalize", "uniform_groups")


def check_ahead(
    rollout: RolloutConfig | None, grpo: SparseGRPOConfig, accumulation: int, steps: int, *, served: bool, tools: bool
) -> None:
    """Raise UserError if `rollout.ahead` is 1 and a generation cannot be sampled while the one before it trains.

    accumulation : number of micro-batches of an update
    steps : number of micro-batches of a pass over a generation
    served : True if the engine samples elsewhere, with weights of its own
    """
    if not isinstance(rollout, GRPORolloutConfig) or not rollout.ahead:
        return
    length = steps * grpo.num_iterations
    if not served:
        wrong = "1 needs an engine that samples on other machines or GPUs; set rollout.engine: server"
    elif tools:
        wrong = "the turns of conversations with tools are sampled in step with the training; set 0"
    elif grpo.importance_correction == "none":
        wrong = "1 samples with older weights, so the loss needs their ratio; set importance_correction: token_truncate"
    elif length % accumulation and accumulation % length:
        wrong = f"1 needs whole updates of {accumulation} micro-batches in a generation of {length}, or the reverse"
    else:
        return
    raise UserError(wrong, "rollout.ahead")


def check_turns(
    cache: PolicyConfig, grpo: SparseGRPOConfig, scorers: ScorersConfig | None, *, compacts: bool, recorded: bool
) -> None:
    """Raise UserError if conversations with tools cannot be sampled and trained under these settings.

    recorded : True if rollouts are recorded, and nothing is sampled
    """
    if compacts:
        raise UserError("a compacted context is followed by one completion, not by turns; remove tools", "prompt_cache")
    if recorded:
        raise UserError("recorded rollouts sample nothing, so no tool is called; remove tools", "tools")
    if cache.turns == "kept":
        return
    if cache.view_class != PolicyConfig.view_class:
        wrong = f"prefilled turns are not replayed under {cache.name}, whose traces hold more than evictions"
        raise UserError(f"{wrong}; use kept", "cache.turns")
    if scorers is not None:
        raise UserError("prefilled turns do not train scorers; use kept, or remove scorers", "cache.turns")
    if grpo.top_p < 1 or grpo.top_k is not None or grpo.min_p > 0:
        raise UserError("prefilled turns do not record supports; use kept, or no top_p, top_k and min_p", "cache.turns")
