"""Settings of sampling and of the engine, and the record of how rollouts in files were sampled. Needs no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from sparse_rl.config import (
    Configuration,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Probability,
    Rule,
    Source,
    Text,
    as_mapping,
    at_most,
    build,
    show,
)
from sparse_rl.errors import UserError, unread
from sparse_rl.files import read_json

EngineName = Literal["hf", "vllm", "server"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
"""Names of the engines. In a recipe, the engine may also be `auto`, which chooses one of these."""
MOST_GIB = 1_000_000  # upper limit of kv_cache_gb
ALONE = 0.9  # share of a GPU's memory for an engine that does not share the GPU with training
KEY = "VLLM_API_KEY"  # environment variable with the key of servers of rollouts, which vLLM reads too
SERVERS = "SPARSE_RL_SERVERS"  # environment variable with the URLs of servers that a launch has started
SAMPLE_LIVE: tuple[EngineName, ...] = ("hf",)  # engines that can sample from a live module; the others load weights


URL = re.compile(r"https?://[^\s/]+/?")
ServerURL = Annotated[Text, Rule("such as http://host:8000", lambda v: URL.fullmatch(v) is not None)]


@dataclass(frozen=True)
class SamplingConfig(Configuration):
    """Settings of sampling.

    Random numbers are seeded by (seed, prompt, sample index), so a completion does not depend on the rest of the batch.

    max_tokens : maximum number of tokens in a completion
    temperature : 0 takes the most likely token at each step; the log-probs are then computed at temperature 1
    top_p : sampling is restricted to the smallest set of tokens with at least this total probability; 1 means all
    top_k : sampling is restricted to the top_k most likely tokens; None means all
    min_p : sampling is restricted to the tokens with at least min_p times the probability of the most likely one; 0
        means all. The order is that of vLLM: min_p, top_k, top_p, each on what the one before has left
    record_support : record from which tokens each token was drawn, if min_p, top_k or top_p restrict them
    n : completions per prompt
    seed : random seed; None draws a fresh one
    stop_token_ids : tokens that end a completion (the last token of the completion is then a stop token); None means
        the model's end-of-sequence tokens
    ignore_eos : True means no stop tokens if stop_token_ids is None: only max_tokens then ends a completion
    forced : tokens that replace the sampled tokens in every completion, from completion token `forced_from` on; their
        log-probs are those before truncation
    forced_from : number of completion tokens before the forced ones
    """

    max_tokens: PositiveInt
    temperature: NonNegative = 1.0
    top_p: Fraction = 1.0
    top_k: PositiveInt | None = None
    min_p: Probability = 0.0
    record_support: bool = False
    n: PositiveInt = 1
    seed: int | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    forced: Sequence[int] = ()
    forced_from: NonNegativeInt = 0

    @property
    def truncated_support(self) -> bool:
        """True if min_p, top_k or top_p cuts the distribution: `Rollout.logprobs` and `model_logprobs` then differ."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k is not None or self.min_p > 0)

    @property
    def distribution(self) -> dict[str, Any]:
        """The settings of the distribution from which tokens are drawn."""
        return {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}

    @property
    def records_support(self) -> bool:
        """True if the traces of sampled sequences have the sections of supports (sparse_rl/trace/support.py)."""
        return self.record_support and self.truncated_support


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Configuration):
    """The sampling engine. The keys from kv_cache_gb to full_graphs apply only to vllm.

    engine : hf is the reference engine; vllm is fast and keeps its own copy of the weights; server asks servers, which
        `sparse-rl serve MODEL --rollouts` or launch.rollout_gpus starts; auto is server if there are servers, else vllm
        if vLLM is installed and supports the model, else hf
    servers : URLs of the servers. Their key is read from the environment variable VLLM_API_KEY
    patience : number of seconds without any working server after which the run stops; it can then be resumed
    max_batch : maximum number of sequences that are sampled at the same time
    progress : show a progress bar
    kv_cache_gb : maximum GiB for keys and values; vllm never takes more than max_batch sequences can fill. None means
        1 on a CPU, and on a GPU the memory that gpu_memory_utilization leaves
    gpu_memory_utilization : share of the GPU's memory for the engine's weights and cache together
    tensor_parallel : number of GPUs that one engine is spread over; not available in training
    max_model_len : maximum length of prompt + completion; None means max_prompt_tokens + max_completion_length; without
        max_prompt_tokens, it means the model's own limit
    sleep : in training, release the engine's GPU memory while the weights are updated
    full_graphs : on a GPU, under an evicting policy, run a decode step as one CUDA graph instead of one graph per
        layer; written without a GPU and never run on one
    exact : on a CPU, compute float32 attention in float64, in the engine and in the trainer; hf and vllm then sample
        the same tokens, except at ties. false computes attention in float32 (in vllm with vLLM's own kernels), which is
        faster; the log-probs of engine and trainer then differ by about 1e-5
    """

    engine: Literal["auto", EngineName] = "auto"
    servers: list[ServerURL] = field(default_factory=list)
    patience: Positive = 600.0
    max_batch: PositiveInt = 64
    progress: bool = True
    kv_cache_gb: Annotated[Positive, at_most(MOST_GIB)] | None = None
    gpu_memory_utilization: Fraction = 0.3
    tensor_parallel: PositiveInt = 1
    max_model_len: PositiveInt | None = None
    sleep: bool = False
    full_graphs: bool = False
    exact: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.servers and self.engine not in ("auto", "server"):
            raise UserError(
                f"are not asked by the engine {self.engine}; set engine: server, or remove servers", "servers"
            )

    def arguments(self, dtype: str, prompt: int | None, completion: int) -> dict[str, Any]:
        """Return the arguments of `make_engine`, except model, policy and progress. The engine must be chosen.

        dtype : name of the dtype of the computation
        prompt, completion : maximum numbers of tokens; None means unknown
        """
        arguments = {"dtype": dtype, "max_batch": self.max_batch}
        if self.engine == "hf":
            return arguments
        if self.engine == "server":
            return {"dtype": dtype, "servers": self.servers, "patience": self.patience, "exact": self.exact}
        return {
            **arguments,
            "max_prompt": prompt,
            "max_model_len": self.max_model_len or (prompt and prompt + completion),
            "kv_cache_gb": self.kv_cache_gb,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "tensor_parallel": self.tensor_parallel,
            "sleep_mode": self.sleep,
            "full_graphs": self.full_graphs,
            "exact": self.exact,
        }


@dataclass(frozen=True, kw_only=True)
class GRPORolloutConfig(RolloutConfig):
    """The sampling engine. The keys from kv_cache_gb to full_graphs apply only to vllm.

    ahead : 1 samples the next batch while the present one trains, with weights that are then one update old; 0 samples
        and trains in turns. 1 needs the engine server
    """

    ahead: Literal[0, 1] = 0


@dataclass(frozen=True, kw_only=True)
class EvalRolloutConfig(RolloutConfig):
    """The sampling engine. It does not share the GPU with a training. The keys from kv_cache_gb to full_graphs apply
    only to vllm.
    """

    gpu_memory_utilization: Fraction = ALONE


# ---- the record of the rollouts of a folder -------------------------------------------------------------------------

ORIGIN, COMPLETIONS, TRACES = "rollouts.json", "completions.jsonl", "traces-*.safetensors"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Origin(Configuration):
    """Record of how the rollouts of a folder were sampled.

    model : directory or hub name of the model
    vocabulary : size of the model's vocabulary
    engine, dtype, exact : values of these recipe keys when the rollouts were sampled
    sampling : settings of sampling
    evicts : true if entries can be evicted
    made_by : fingerprints that the trace files store: name (`model`, `policy`, ...) -> fingerprint
    weights : digest of the model's files of weights (`weights_digest`); empty if it is not recorded
    rollouts : number of rollouts that the folder has when it is complete; None if it is not recorded
    """

    model: Text
    vocabulary: PositiveInt
    engine: EngineName
    dtype: Literal["float32", "bfloat16", "float16"]
    exact: bool
    sampling: SamplingConfig
    evicts: bool
    made_by: dict[str, str]
    weights: str = ""
    rollouts: PositiveInt | None = None

    @property
    def has_traces(self) -> bool:
        """True if there are trace files: if entries can be evicted, or if supports are recorded."""
        return self.evicts or self.sampling.records_support


def write_origin(folder: Path, origin: Origin) -> None:
    record = {"format_version": FORMAT_VERSION, **as_mapping(origin)}
    (folder / ORIGIN).write_text(json.dumps(record, indent=2) + "\n")


def read_origin(folder: Path) -> Origin:
    """Read rollouts.json of a folder. Raises UserError if it is missing or cannot be read."""
    file = folder / ORIGIN
    if not file.is_file():
        mend = "name the folder that sparse-rl rollout RECIPE --out DIR has written"
        raise UserError(f"{folder} holds no rollouts with their log-probs: there is no {ORIGIN}; {mend}")
    try:
        record = read_json(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {unread(error)}") from error
    version = record.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise UserError(f"{file} has format version {show(version)}, but {FORMAT_VERSION} is needed; sample again")
    return build(Origin, record, "", Source(str(file)))
