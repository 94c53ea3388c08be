"""What draws in vLLM's V1 runner, where its own sampler would apply top-k, top-p and its generators.

It is the reference engine's sampler: the token that is drawn depends on the logits and the seed alone, on both engines
and in a server. What is asked of a request stands in its `extra_args` under KEY.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from rollout.config import SamplingConfig
from rollout.requests import forced_token
from rollout.sampling import Uniforms, sample
from rollout.vllm.compat.arguments import KEY
from rollout.vllm.compat.finite import NOT_FINITE
from rollout.vllm.record import RunRecord


class SequenceSampler(nn.Module):
    """Draws all requests of a rollout, under one SamplingConfig.

    The log-probs go into the run's record: vLLM would rank the whole vocabulary in each step, and pass them on through
    every layer of itself.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.runner = runner
        self.begin_run(SamplingConfig(1), None)

    def begin_run(self, sampling: SamplingConfig, record: RunRecord | None) -> None:
        """record : of the run that begins; None: between two runs"""
        self.sampling, self.record = sampling, record
        self.stream = cache(Uniforms)  # by seed

    def forward(self, logits: Tensor, generators: Any, k: Any, p: Any) -> tuple[Tensor, None]:
        """Draw a token for each request, int64 [B], and record it with its log-probs; NOT_FINITE where those are not.

        logits : [B, V], as the model gave them: vLLM is told a temperature of 1
        """
        ids = list(self.runner.input_batch.req_ids)[: len(logits)]
        states = [self.runner.requests[i] for i in ids]
        asked = [state.sampling_params.extra_args[KEY] for state in states]  # by the engine
        steps = [len(state.output_token_ids) for state in states]
        uniform = None
        if self.sampling.temperature > 0 and "forced" not in asked[0]:
            numbers = [self.stream(each["seed"]).at(step) for each, step in zip(asked, steps, strict=True)]
            uniform = _sent(numbers, torch.float64, logits.device)
        tokens = [forced_token(n, each.get("forced"), self.sampling) for each, n in zip(asked, steps, strict=True)]
        forced = _sent(tokens, torch.int64, logits.device) if max(tokens) >= 0 else None
        sampled, *logprobs = sample(logits, self.sampling, uniform, forced)
        sampled.masked_fill_(~logprobs[1].isfinite(), NOT_FINITE)
        if self.record is not None:
            self.record.draw(ids, [each["place"] for each in asked], steps, torch.stack(logprobs, dim=-1))
        return sampled, None


class SeededSampler(nn.Module):
    """Draws the requests of a server that bring a seed (compat/seeds.py), each by its own top_p and top_k.

    plain : vLLM's sampler, which draws the others

    The step of a draw is the number of tokens that the request has. Between two chunks of a prompt vLLM throws the
    token away: the same number is then drawn again.
    """

    def __init__(self, runner: Any, plain: nn.Module) -> None:
        super().__init__()
        self.runner, self.plain = runner, plain
        self.seeded: dict[tuple[str, int], tuple[Uniforms, SamplingConfig]] = {}  # of the step before

    def forward(self, logits: Tensor, generators: Any, k: Any, p: Any) -> tuple[Tensor, Any]:
        """See vLLM's own. logits : [B, V], divided by the temperature, and changed by whatever else was asked for"""
        drawn = self._draw(logits)  # first: vLLM's own writes into the logits
        sampled, logprobs = self.plain(logits, generators, k, p)
        for rows, tokens in drawn:
            sampled.index_copy_(0, rows, tokens.to(sampled.dtype))
        return sampled, logprobs

    def _draw(self, logits: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Rows with a seed and their tokens, int64 each: those with the same top_p and top_k together."""
        seeded: dict[tuple[str, int], tuple[Uniforms, SamplingConfig]] = {}
        alike: dict[SamplingConfig, list[tuple[int, float]]] = {}
        for row, request_id in enumerate(self.runner.input_batch.req_ids[: len(logits)]):
            state = self.runner.requests[request_id]
            asked = (state.sampling_params.extra_args or {}).get(KEY)
            if asked is None:
                continue
            key = request_id, asked["seed"]
            stream, support = seeded[key] = self.seeded.get(key) or (Uniforms(key[1]), _support(state.sampling_params))
            alike.setdefault(support, []).append((row, stream.at(len(state.output_token_ids))))
        self.seeded = seeded
        drawn = []
        for support, members in alike.items():
            rows, numbers = map(list, zip(*members, strict=True))
            index = _sent(rows, torch.int64, logits.device)
            uniform = _sent(numbers, torch.float64, logits.device)
            drawn.append((index, sample(logits.index_select(0, index), support, uniform)[0]))
        return drawn


def _support(parameters: Any) -> SamplingConfig:
    """The top_p and top_k of vLLM's SamplingParams."""
    return SamplingConfig(1, top_p=parameters.top_p, top_k=parameters.top_k if parameters.top_k > 0 else None)


def _sent(numbers: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on the device, which is not waited for: it copies them from pinned memory when it comes to it."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
