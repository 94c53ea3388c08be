"""Interface of an engine, which takes prompts and returns sampled completions with log-probs and eviction traces.

hf.py is the reference implementation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from rollout.config import SamplingConfig
from sparse_rl.policies.base import Policy
from sparse_rl.progress import Stage, stage
from sparse_rl.trace import EvictionTrace

if TYPE_CHECKING:
    from rollout.context import Context
    from rollout.requests import Request

# Minimum number of sequences in a decoded batch, padding included: on a CPU, attention over fewer sequences rounds
# differently (sparse_rl/kernels/products.py).
LEAST_ROWS = 4


def sampling_stage(requests: Sequence[Request], shown: bool) -> AbstractContextManager[Stage]:
    """Return the progress stage for these requests: "decoding" if their completions are given, else "sampling"."""
    name = "decoding" if requests and requests[0].forced is not None else "sampling"
    return stage(name, total=len(requests), unit="sequence", shown=shown)


@dataclass
class Rollout:
    """One sampled sequence.

    prompt_ids, completion_ids : token ids
    logprobs : log-prob of each completion token under the sampling distribution (after temperature, top-p, top-k)
    model_logprobs : log-prob of each completion token before top-p and top-k; replay is compared with these log-probs
    trace : eviction trace; len(trace) = number of tokens of prompt and completion
    finish_reason : "stop" (a stop token ends the completion) or "length" (max_tokens is reached)

    Raises TraceError if the trace cannot have been recorded with this prompt (`EvictionTrace.check`).
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    model_logprobs: list[float]
    trace: EvictionTrace
    finish_reason: Literal["stop", "length"]

    def __post_init__(self) -> None:
        self.trace.check(len(self.prompt_ids))


class Prefilled(Protocol):
    """Prompts in an engine's cache, one row each, after the evictions at the end of prefill."""

    def fork(self, rows: Sequence[int]) -> Prefilled:
        """Return a copy of the prompts in these rows, in the order of `rows`. A row may occur several times."""
        ...

    def queries(self, layer: int) -> Tensor:
        """Return the last W queries of each row in one layer, oldest first: [B, Hq, W, D].

        Layers with a sliding window are not counted: 0 is the first layer without one.

        W is `policy.last_queries`, the number of queries with which the policy scores. Raises UserError if W is 0.
        """
        ...


class Engine(Protocol):
    """Samples with eviction active and records every eviction.

    policy : cache policy under which the engine samples, bound to the model
    max_batch : maximum number of sequences that are sampled at the same time
    shares_weights : True if the engine samples from the caller's live module, so no weights need synchronising
    """

    policy: Policy
    max_batch: int
    shares_weights: bool

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, context: Context | None = None
    ) -> list[Rollout]:
        """Sample `sampling.n` completions of each prompt. Returns len(prompts) * n rollouts, prompt by prompt.

        prompts : token ids
        context : a context that `HFEngine.compact` has compacted, and that every prompt continues. `prompt_ids` of each
            rollout then begins with the context's tokens, and the tokens after the context are never evicted

        Raises UserError on an empty prompt, and NotFiniteError at the first step with a log-prob that is not finite.
        """
        ...

    def simulate(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        temperature: float = 1.0,
        context: Context | None = None,
    ) -> list[Rollout]:
        """Record the log-probs and evictions that `generate` would have recorded, had it sampled these completions.

        Returns one rollout per prompt, decoded token by token as in sampling. Log-probs are computed at `temperature`.

        context : a compacted context that every prompt continues; None means that there is none

        Raises UserError on an empty prompt or completion, and NotFiniteError as `generate` does.
        """
        ...

    def logprobs(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], context: Context
    ) -> list[Tensor]:
        """Return the log-probs that `simulate` returns for these completions after a context, at temperature 1.

        Returns a float32 tensor [T] on the CPU for each completion of T tokens.

        Raises UserError on an empty prompt or completion, and NotFiniteError if a log-prob is not finite.
        """
        ...

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefilled:
        """Prefill the prompts and return them in a cache with one row per prompt.

        Raises UserError if the engine cannot return its cache.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace weights in the engine's copy of the model.

        weights : pairs (name in a Hugging Face checkpoint, tensor [...] of the weight's shape)

        Raises UserError if the engine's model has no weight of that name and shape.
        """
        ...

    def scorer_digests(self) -> dict[str, list[str]]:
        """Return stored name -> digest of each kv head, for the weights of the policy's scorers; {} without scorers.

        `head_digests` in kvpop/scorers/base.py computes the digests.
        """
        ...

    def close(self) -> None:
        """Release the model, its cache and its processes. The engine cannot be used afterwards."""
        ...
