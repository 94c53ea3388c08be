"""The blocks of a recipe (`data:`, `rollout:`, `lora:`, `launch:`, ...), each one dataclass with its own checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from sparse_rl.config import (
    AtLeastOne,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Probability,
    Rule,
    Text,
)
from sparse_rl.errors import UserError, nearest

LOCAL_FILES = (".jsonl", ".json", ".parquet", ".csv")
COLUMNS = ("prompt", "answer", "completion")


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Problems made on the spot (sparse_rl/running_sum.py). The three splits never share a problem."""

    task: Literal["running_sum"]
    size: PositiveInt
    split: Literal["train", "calibration", "evaluation"] = "train"
    seed: NonNegativeInt = 0
    n: Annotated[int, Rule("from 1 to 12", lambda v: 1 <= v <= 12)] = 8
    digits: Annotated[int, Rule("from 2 to 10", lambda v: 2 <= v <= 10)] = 5
    note_probability: Probability = 0.3


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """One dataset: where it is, which columns to use, and how a problem becomes a prompt.

    path : a .jsonl, .json, .parquet or .csv file, or a dataset on the hub (with `subset` and `split`)
    synthetic : instead of a path
    columns : our name -> theirs, for prompt, answer and completion, e.g. {prompt: problem}
    answer_after : keep what follows the last such marker of the answer ("####" for GSM8K's own files)
    prompt_template : text in which {prompt} stands for the problem; other braces, as in \\boxed{}, are left alone
    chat : use the tokenizer's chat template; by default if it has one
    thinking : given to the chat template as enable_thinking
    limit : use at most so many problems, after shuffling (with shuffle_seed) and dropping
    max_prompt_tokens : longer prompts are dropped, and counted in the log
    """

    path: Text | None = None
    split: Text = "train"
    subset: str | None = None
    synthetic: SyntheticConfig | None = None
    columns: dict[str, Text] = field(default_factory=dict)
    answer_after: Text | None = None
    system_prompt: str | None = None
    prompt_template: str | None = None
    chat: bool | None = None
    thinking: bool | None = None
    limit: PositiveInt | None = None
    max_prompt_tokens: PositiveInt | None = None
    shuffle_seed: NonNegativeInt | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.synthetic is None):
            raise UserError("give exactly one of: a file or hub name as path, or a synthetic block", "path")
        for name in self.columns:
            if name not in COLUMNS:
                near = nearest(name, COLUMNS)
                mend = f"did you mean {near}?" if near else f"it maps our {', '.join(COLUMNS)} to your column names"
                raise UserError(f"unknown column; {mend}", f"columns.{name}")
        if self.synthetic is not None:
            for key in ("columns", "subset", "answer_after"):
                if getattr(self, key):
                    raise UserError("a synthetic dataset has no use for it; remove it", key)
            if self.split != "train":
                raise UserError("name the split of a synthetic dataset in synthetic.split", "split")
        if self.local and not self.split.startswith("train"):
            raise UserError("a local file has one split; remove it, or take a slice such as train[:100]", "split")
        if self.prompt_template is not None and "{prompt}" not in self.prompt_template:
            raise UserError("must contain {prompt}, where the problem goes", "prompt_template")
        if self.chat is False:
            for key in ("system_prompt", "thinking"):
                if getattr(self, key) is not None:
                    raise UserError("has no effect with chat: false; remove one (prompt_template adds plain text)", key)

    @property
    def local(self) -> bool:
        """Whether the path is that of a file, by its suffix."""
        return self.path is not None and self.path.lower().endswith(LOCAL_FILES)


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """The replay guard (DESIGN §2): stop when a batch's mean |Δlogp| exceeds factor × the probe's, or the floor.

    floor : None takes 1e-4 in float32 and 2e-2 in half precision
    """

    enabled: bool = True
    factor: AtLeastOne = 10.0
    floor: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters. They have no dropout: a dropped weight could not be replayed."""

    r: PositiveInt = 16
    alpha: PositiveInt = 32
    target_modules: list[Text] | Text = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Processes over all machines, and what DeepSpeed partitions (zero_stage 0: no DeepSpeed)."""

    processes: PositiveInt = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    offload: bool = False
    machines: PositiveInt = 1
    machine_rank: NonNegativeInt = 0
    main_process_ip: str | None = None
    main_process_port: Annotated[int, Rule("from 1 to 65535", lambda v: 1 <= v <= 65535)] = 29500

    def __post_init__(self) -> None:
        if self.offload and self.zero_stage == 0:
            raise UserError("needs DeepSpeed; set zero_stage to 1, 2 or 3", "offload")
        if self.processes % self.machines:
            raise UserError(f"{self.processes} processes do not divide among {self.machines} machines", "processes")
        if self.machine_rank >= self.machines:
            raise UserError(f"must be below machines ({self.machines}), got {self.machine_rank}", "machine_rank")
        if self.machines > 1 and not self.main_process_ip:
            raise UserError("needed with several machines: the address of machine 0", "main_process_ip")


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """What GRPO measures on held-out problems every so many steps (rewards and entropy of samples), and distillation
    and KVpop also before their first step (KL and cross-entropy; `samples` does not count there).
    """

    data: DataConfig
    every: PositiveInt = 20
    problems: PositiveInt = 32
    samples: PositiveInt = 4


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """What KVpop's scorers are to foresee (sparse_rl/attention/learned.py): log(floor + mass of future attention).

    normaliser : of the attention: over what the student's query sees (sparse), or over all before it (dense)
    group : of the query heads of a kv head, the largest logarithm, or the logarithm of their mean
    lookahead : count only so many queries after the window; None: all
    normalise : divide by their number
    """

    normaliser: Literal["sparse", "dense"] = "sparse"
    group: Literal["max", "mean"] = "max"
    lookahead: PositiveInt | None = None
    normalise: bool = True
    floor: Positive = 1e-6


@dataclass(frozen=True, kw_only=True)
class BoundaryConfig:
    """The scorers' loss (trainer/losses.py, BoundaryLoss).

    temperature : tau
    margin, margin_floor, margin_temperature : weigh pairs by the target's margin; omega_min and tau_omega
    balance : the largest weight of the rarer of kept and dropped
    queries : drawn per row; None: all
    late : the share of them that is drawn with a bias towards the row's end
    """

    temperature: Positive = 1.0
    margin: bool = True
    margin_floor: Probability = 0.1
    margin_temperature: Positive = 1.0
    balance: AtLeastOne = 10.0
    queries: PositiveInt | None = 1024
    late: Probability = 0.5


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Evaluate every policy at every budget; an empty list keeps what the cache block says."""

    policy: list[Text] = field(default_factory=list)
    budget: list[PositiveInt] = field(default_factory=list)
