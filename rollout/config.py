"""How to sample, and on which engine: the two configurations of this package. They are read without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from sparse_rl.config import Configuration, Fraction, NonNegative, NonNegativeInt, Positive, PositiveInt, at_most

EngineName = Literal["hf", "vllm"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
"""The names of the engines; `auto`, which recipes know too, stands for one of them."""
MOST_GIB = 1_000_000  # of a cache
ALONE = 0.9  # of a GPU's memory, for an engine that shares it with no training
SAMPLE_LIVE: tuple[EngineName, ...] = ("hf",)  # engines that can sample from a live module; the others load weights


@dataclass(frozen=True)
class SamplingConfig(Configuration):
    """How to sample.

    Sampling is seeded per (seed, prompt, sample index): the place in the batch, the batch's size and its order change
    nothing.

    max_tokens : of a completion, at most
    temperature : 0 is greedy; log-probs are then those at temperature 1
    top_p : the smallest set of tokens with at least this probability is sampled from; 1: all
    top_k : the so many most likely tokens are sampled from; None: all
    n : completions of each prompt
    seed : None draws a fresh one
    stop_token_ids : tokens that end a completion, of which they are a part; None: the model's end-of-sequence tokens
    ignore_eos : with stop_token_ids None, nothing ends a completion but max_tokens
    forced : tokens that every completion takes from step `forced_from` on, whatever the model says
    forced_from : so many tokens of a completion come before the forced ones

    Raises UserError where a value breaks its rule.
    """

    max_tokens: PositiveInt
    temperature: NonNegative = 1.0
    top_p: Fraction = 1.0
    top_k: PositiveInt | None = None
    n: PositiveInt = 1
    seed: int | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    forced: Sequence[int] = ()
    forced_from: NonNegativeInt = 0

    @property
    def truncated_support(self) -> bool:
        """Whether top-p or top-k cuts the distribution, so that `logprobs` differ from the model's own."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k is not None)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Configuration):
    """The sampling engine. The keys from kv_cache_gb to full_graphs are for vllm alone.

    engine : hf, the reference engine; vllm, fast, with its own copy of the weights; auto, which is vllm where it is
        installed and takes the model, else hf
    max_batch : sequences sampled at a time
    progress : show a progress bar
    kv_cache_gb : GiB for keys and values, at most: no more is taken than max_batch sequences can fill; None: what
        gpu_memory_utilization leaves, or 1 on a CPU
    gpu_memory_utilization : the engine's share of the GPU's memory, its weights included
    tensor_parallel : GPUs that one engine is spread over; not in training
    max_model_len : the longest prompt + completion; None: max_prompt_tokens + max_completion_length, or the model's own
    sleep : in training, give the engine's GPU memory back while the weights are updated
    full_graphs : on a GPU, under an evicting policy, run a decode step as one CUDA graph instead of one per layer;
        written without a GPU and never run on one
    exact : on a CPU, compute float32 attention in float64, in the engine and in the trainer: hf and vllm then sample
        the same tokens, but for ties. false: compute it in float32 (vllm by its own kernels), which is faster; the
        log-probs of engine and trainer then differ by about 1e-5
    """

    engine: Literal["auto", EngineName] = "auto"
    max_batch: PositiveInt = 64
    progress: bool = True
    kv_cache_gb: Annotated[Positive, at_most(MOST_GIB)] | None = None
    gpu_memory_utilization: Fraction = 0.3
    tensor_parallel: PositiveInt = 1
    max_model_len: PositiveInt | None = None
    sleep: bool = False
    full_graphs: bool = False
    exact: bool = True


@dataclass(frozen=True, kw_only=True)
class EvalRolloutConfig(RolloutConfig):
    """The sampling engine, which has the GPU to itself, as in `sparse-rl serve`. The keys from kv_cache_gb to
    full_graphs are for vllm alone.
    """

    gpu_memory_utilization: Fraction = ALONE
