"""What an engine is: prompts in, sampled completions with their log-probs and eviction traces out.

This file knows neither torch modules nor policies' insides; hf.py is the specification of how it is done.
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

# Sequences that are decoded at least, padding among them: attention over fewer rounds otherwise on a CPU (products.py).
LEAST_ROWS = 4


def sampling_stage(requests: Sequence[Request], shown: bool) -> AbstractContextManager[Stage]:
    """The stage in which an engine samples these, or decodes what they are told to be."""
    name = "decoding" if requests and requests[0].forced is not None else "sampling"
    return stage(name, total=len(requests), unit="sequence", shown=shown)


@dataclass
class Rollout:
    """One sampled sequence.

    prompt_ids, completion_ids : token ids
    logprobs : one per completion token, of the distribution that was sampled from (temperature, top-p, top-k)
    model_logprobs : the same before top-p and top-k; this is what replay is compared with
    trace : len(trace) = prompt + completion
    finish_reason : "stop" (a stop token ends the completion) or "length" (truncated)

    Raises TraceError where a trace of this prompt cannot have been recorded (`EvictionTrace.check`).
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
    """Prompts in an engine's cache, one row each, after what the policy drops at a prefill's end."""

    def fork(self, rows: Sequence[int]) -> Prefilled:
        """Copies of these rows, in this order, in a cache of their own; a row may be taken several times."""
        ...

    def queries(self, layer: int) -> Tensor:
        """The last queries of each row, oldest first: [B, Hq, W, D], as many as the policy scores by.

        Raises UserError where it scores by none.
        """
        ...


class Engine(Protocol):
    """Samples with eviction active and records every eviction.

    policy : the cache policy that it samples under, bound to the model
    max_batch : sequences sampled at a time
    shares_weights : whether it samples from the caller's live module, so that nothing needs to be synchronised
    """

    policy: Policy
    max_batch: int
    shares_weights: bool

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, context: Context | None = None
    ) -> list[Rollout]:
        """Sample `sampling.n` completions of each prompt: len(prompts) * n rollouts, prompt-major.

        prompts : token ids
        context : compacted, by `HFEngine.compact`; the prompts stand behind it, and rollouts have its tokens in front
            of their prompts. Behind it nothing is evicted.

        Raises UserError on an empty prompt, and NotFiniteError in the step in which a log-prob is not finite.
        """
        ...

    def simulate(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        temperature: float = 1.0,
        context: Context | None = None,
    ) -> list[Rollout]:
        """What `generate` would have recorded, had it sampled these completions: their log-probs and evictions.

        One rollout per prompt, by the very computation of decoding. `logprobs` are those at `temperature`.

        Raises UserError on an empty prompt or completion, and NotFiniteError as `generate` does.
        """
        ...

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefilled:
        """The prompts' cache after their prefill, a row each. Raises UserError in an engine that cannot hand it out."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace weights of the engine's copy.

        weights : (name in a Hugging Face checkpoint, tensor [...] of the shape that the weight has)

        Raises UserError for a name or a shape that the engine's model has not.
        """
        ...

    def scorer_digests(self) -> dict[str, list[str]]:
        """Digests of the scorers that it samples by (see scorers/base.py of kvpop), by stored names; {}: none."""
        ...

    def close(self) -> None:
        """Let the model, its cache and its processes go; the engine is of no use after that."""
        ...
