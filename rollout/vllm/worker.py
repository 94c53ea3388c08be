"""What the engine calls on each of vLLM's workers, by name (`worker_extension_cls`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from rollout.config import SamplingConfig
from rollout.context import Context
from rollout.context.files import load_context
from rollout.requests import forced_token
from rollout.sampling import Uniforms, sample
from rollout.vllm.compat.finite import NOT_FINITE
from rollout.vllm.compat.paged import live_state
from rollout.vllm.handover import received
from rollout.vllm.messages import Result
from rollout.vllm.record import RunRecord
from sparse_rl.models.directory import SCORERS
from sparse_rl.scorers.base import digests


class SequenceSampler(nn.Module):
    """The reference engine's sampler, where vLLM's own would apply top-k, top-p and its generators.

    So a sequence's tokens depend on its logits and its seed alone, on either engine. The log-probs go into the run's
    record: vLLM would rank the whole vocabulary in each step, and pass them on through every layer of itself.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.runner = runner
        self.begin_run(SamplingConfig(1), None)

    def begin_run(self, sampling: SamplingConfig, record: RunRecord | None) -> None:
        """record : of the run that begins; None: between two runs"""
        self.sampling, self.record = sampling, record
        self.streams: dict[int, Uniforms] = {}

    def forward(self, logits: torch.Tensor, generators: Any, k: Any, p: Any) -> tuple[torch.Tensor, None]:
        """Draw a token for each request, int64 [B], and record it with its log-probs; NOT_FINITE where those are not.

        logits : [B, V], as the model gave them: vLLM is told a temperature of 1
        """
        ids = list(self.runner.input_batch.req_ids)[: len(logits)]
        states = [self.runner.requests[i] for i in ids]
        asked = [state.sampling_params.extra_args for state in states]  # what the engine has asked of each request
        steps = [len(state.output_token_ids) for state in states]
        uniform = None
        if self.sampling.temperature > 0 and "forced" not in asked[0]:
            numbers = [self._uniform(each["seed"], step) for each, step in zip(asked, steps, strict=True)]
            uniform = _sent(numbers, torch.float64, logits.device)
        tokens = [forced_token(n, each.get("forced"), self.sampling) for each, n in zip(asked, steps, strict=True)]
        forced = _sent(tokens, torch.int64, logits.device) if max(tokens) >= 0 else None
        sampled, *logprobs = sample(logits, self.sampling, uniform, forced)
        sampled.masked_fill_(~logprobs[1].isfinite(), NOT_FINITE)
        if self.record is not None:
            self.record.draw(ids, [each["place"] for each in asked], steps, torch.stack(logprobs, dim=-1))
        return sampled, None

    def _uniform(self, seed: int, step: int) -> float:
        if seed not in self.streams:
            self.streams[seed] = Uniforms(seed)
        return self.streams[seed].at(step)


class WorkerExtension:
    """Mixed into vLLM's worker: what the engine calls in each of them."""

    model_runner: Any

    def begin_run(self, sampling: dict[str, Any]) -> None:
        """The SamplingConfig of the requests that follow; what is left of an earlier run is let go."""
        if not isinstance(self.model_runner.sampler.topk_topp_sampler, SequenceSampler):
            self.model_runner.sampler.topk_topp_sampler = SequenceSampler(self.model_runner)
        self._set_record(SamplingConfig(**sampling), RunRecord())

    def take_results(self, lengths: dict[int, int]) -> list[Result]:
        """What this rank has recorded of requests, place -> tokens, in this order; it forgets them."""
        record = self.model_runner.sampler.topk_topp_sampler.record
        assert record is not None
        if (state := live_state()) is not None:
            state.check_finite()
        return record.take(lengths)

    def end_run(self) -> None:
        """Whatever has not been taken is let go."""
        self._set_record(SamplingConfig(1), None)

    def _set_record(self, sampling: SamplingConfig, record: RunRecord | None) -> None:
        self.model_runner.sampler.topk_topp_sampler.begin_run(sampling, record)
        state = live_state()
        if state is not None:
            state.record = record
            state.failed.zero_()

    def hold_context(self, name: str, source: str | Context) -> None:
        """Keep a compacted context, or what a file has of one, for requests that go on from it, until another comes."""
        live_state().hold(name, load_context(source) if isinstance(source, str) else source)

    def receive_weights(self, path: str, places: list[list]) -> None:
        """`replace_weights` from another process, with what `handed_over` gives."""
        self.replace_weights(received(path, places))

    def replace_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load weights by checkpoint name."""
        scorers: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            self.model_runner.model.load_weights(_without_scorers(weights, scorers))
            if scorers:
                live_state().scorers.load(scorers)

    def scorer_digests(self) -> dict[str, list[str]]:
        """See `Engine.scorer_digests`; of this rank's heads."""
        scorers = getattr(live_state(), "scorers", None)
        return {} if scorers is None else digests(scorers.by_name())


def _sent(numbers: list[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers on the device, which is not waited for: it copies them from pinned memory when it comes to it."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _without_scorers(
    weights: Iterable[tuple[str, torch.Tensor]], scorers: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that vLLM's model has; those of our scorers go into `scorers` instead, by their stored names."""
    for name, tensor in weights:
        if name.startswith(f"{SCORERS}."):
            scorers[name.removeprefix(f"{SCORERS}.")] = tensor.detach()
        else:
            yield name, tensor.detach()
