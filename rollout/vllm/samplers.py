"""Samplers for vLLM's V1 runner. They replace one part of vLLM's sampler: applying top-k and top-p, and sampling.

They use the reference engine's sampler (rollout/sampling.py). So in both engines and in a server, a sampled token
depends only on the logits and the seed. The settings of a request are in its `extra_args`, under KEY.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollout.config import SamplingConfig
from rollout.requests import forced_token
from rollout.sampling import Uniforms, sample
from rollout.vllm.compat.arguments import KEY
from rollout.vllm.compat.finite import NOT_FINITE
from rollout.vllm.record import RunRecord


class SequenceSampler(nn.Module):
    """Samples all requests of a run, under one SamplingConfig, and writes the log-probs to the run's record.

    vLLM itself is not asked for log-probs, because it would then rank the whole vocabulary in each step.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.runner = runner
        self.begin_run(SamplingConfig(1), None)

    def begin_run(self, sampling: SamplingConfig, record: RunRecord | None) -> None:
        """Begin a run, or end one if `record` is None."""
        self.sampling, self.record = sampling, record
        self.stream = cache(Uniforms)  # one stream per seed

    def forward(self, logits: Tensor, generators: Any, k: Any, p: Any) -> tuple[Tensor, None]:
        """Sample a token for each request, and record the token's log-probs.

        logits : [B, V], the model's logits, unchanged because the engine passes a temperature of 1 to vLLM

        Returns int64 [B], with NOT_FINITE for requests whose log-probs are not finite; and None in place of log-probs.
        """
        ids = list(self.runner.input_batch.req_ids)[: len(logits)]
        states = [self.runner.requests[i] for i in ids]
        settings = [state.sampling_params.extra_args[KEY] for state in states]  # written by the engine
        steps = [len(state.output_token_ids) for state in states]
        uniform = None
        if self.sampling.temperature > 0 and "forced" not in settings[0]:
            numbers = [self.stream(setting["seed"]).at(step) for setting, step in zip(settings, steps, strict=True)]
            uniform = _sent(numbers, torch.float64, logits.device)
        tokens = [
            forced_token(n, setting.get("forced"), self.sampling) for setting, n in zip(settings, steps, strict=True)
        ]
        forced = _sent(tokens, torch.int64, logits.device) if max(tokens) >= 0 else None
        sampled, *logprobs = sample(logits, self.sampling, uniform, forced)
        sampled.masked_fill_(~logprobs[1].isfinite(), NOT_FINITE)
        if self.record is not None:
            if (captured := self.runner.captured_experts) is not None:
                first = self.runner.input_batch.num_computed_tokens_cpu[: len(ids)]
                ends = self.runner.query_start_loc.np[: len(ids) + 1]
                self.record.route(ids, first, np.diff(ends), captured.experts[: int(ends[-1])])
            self.record.draw(ids, [setting["place"] for setting in settings], steps, torch.stack(logprobs, dim=-1))
        return sampled, None


class SeededSampler(nn.Module):
    """Samples a server's requests that have a seed (compat/seeds.py); vLLM's sampler `plain` samples the others.

    A request's n-th token is sampled with the n-th uniform number of its seed. After each chunk of a prompt except the
    last, vLLM discards the sampled token, so the next step uses the same uniform number again.
    """

    def __init__(self, runner: Any, plain: nn.Module) -> None:
        super().__init__()
        self.runner, self.plain = runner, plain
        # (request id, seed) -> stream and settings, for the requests of the previous step
        self.seeded: dict[tuple[str, int], tuple[Uniforms, SamplingConfig]] = {}

    def forward(self, logits: Tensor, generators: Any, k: Any, p: Any) -> tuple[Tensor, Any]:
        """Sample a token for each request. Returns the tokens and vLLM's log-probs.

        logits : [B, V], divided by the temperature, after all other processing
        """
        drawn = self._draw(logits)  # first, because vLLM's own sampler writes into the logits
        sampled, logprobs = self.plain(logits, generators, k, p)
        for rows, tokens in drawn:
            sampled.index_copy_(0, rows, tokens.to(sampled.dtype))
        return sampled, logprobs

    def _draw(self, logits: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Sample tokens for the requests that have a seed: for each pair of top_p and top_k, (rows, tokens), int64."""
        seeded: dict[tuple[str, int], tuple[Uniforms, SamplingConfig]] = {}
        by_support: dict[SamplingConfig, list[tuple[int, float]]] = {}
        for row, request_id in enumerate(self.runner.input_batch.req_ids[: len(logits)]):
            state = self.runner.requests[request_id]
            settings = (state.sampling_params.extra_args or {}).get(KEY)
            if settings is None:
                continue
            key = request_id, settings["seed"]
            stream, support = seeded[key] = self.seeded.get(key) or (Uniforms(key[1]), _support(state.sampling_params))
            by_support.setdefault(support, []).append((row, stream.at(len(state.output_token_ids))))
        self.seeded = seeded
        drawn = []
        for support, members in by_support.items():
            rows, numbers = map(list, zip(*members, strict=True))
            index = _sent(rows, torch.int64, logits.device)
            uniform = _sent(numbers, torch.float64, logits.device)
            drawn.append((index, sample(logits.index_select(0, index), support, uniform)[0]))
        return drawn


def _support(parameters: Any) -> SamplingConfig:
    """Return the top_p and top_k of vLLM's SamplingParams as a SamplingConfig."""
    return SamplingConfig(1, top_p=parameters.top_p, top_k=parameters.top_k if parameters.top_k > 0 else None)


def _sent(numbers: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to the device without waiting for it."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
