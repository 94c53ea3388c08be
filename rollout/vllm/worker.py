"""What the engine calls on each of vLLM's workers, by name (`worker_extension_cls`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rollout.engine import SamplingConfig
from rollout.sampling import Uniforms, sample


class SequenceSampler(nn.Module):
    """The reference engine's sampler, where vLLM's own would apply top-k, top-p and its generators.

    So a sequence's tokens depend on its logits and its seed alone, on either engine. It keeps the log-probs until they
    are asked for: vLLM would rank the whole vocabulary in each step, and pass them on through every layer of itself.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.runner = runner
        self.begin(SamplingConfig(1))

    def begin(self, sampling: SamplingConfig) -> None:
        self.sampling = sampling
        self.streams: dict[int, Uniforms] = {}
        self.drawn: list[tuple[list[str], torch.Tensor]] = []  # per step: the requests, float32 [B, 2]

    def forward(self, logits: torch.Tensor, generators: Any, k: Any, p: Any) -> tuple[torch.Tensor, None]:
        """logits [B, V], as the model gave them: vLLM is told a temperature of 1. Returns tokens int64 [B]."""
        ids = list(self.runner.input_batch.req_ids)[: len(logits)]
        uniform = given = None
        if "given" in self._asked(ids[0]):
            given = torch.tensor([self._given(i) for i in ids]).to(logits.device)
        elif self.sampling.temperature > 0:
            uniform = torch.tensor([self._uniform(i) for i in ids], dtype=torch.float64).to(logits.device)
        tokens, *logprobs = sample(logits, self.sampling, uniform, given)
        self.drawn.append((ids, torch.stack(logprobs, dim=-1)))
        return tokens, None

    def _asked(self, request_id: str) -> dict[str, Any]:
        """What the engine has asked of a request: a seed, or the tokens that are given."""
        return self.runner.requests[request_id].sampling_params.extra_args

    def _step(self, request_id: str) -> int:
        return len(self.runner.requests[request_id].output_token_ids)

    def _uniform(self, request_id: str) -> float:
        seed = self._asked(request_id)["seed"]
        if seed not in self.streams:
            self.streams[seed] = Uniforms(seed)
        return self.streams[seed].at(self._step(request_id))

    def _given(self, request_id: str) -> int:
        return self._asked(request_id)["given"][self._step(request_id)]


class WorkerExtension:
    """Mixed into vLLM's worker."""

    model_runner: Any

    def begin_sampling(self, sampling: dict[str, Any]) -> None:
        """The SamplingConfig of the requests that follow."""
        sampler = self.model_runner.sampler
        if not isinstance(sampler.topk_topp_sampler, SequenceSampler):
            sampler.topk_topp_sampler = SequenceSampler(self.model_runner)
        sampler.topk_topp_sampler.begin(SamplingConfig(**sampling))

    def logprobs(self) -> dict[str, list[list[float]]]:
        """Request -> per token drawn, its log-prob and that before top-k and top-p.

        Draws of an unfinished prefill, which are void, come first.
        """
        drawn = self.model_runner.sampler.topk_topp_sampler.drawn
        found: dict[str, list[list[float]]] = {}
        if drawn:
            ids = [request_id for ids, _ in drawn for request_id in ids]
            for request_id, pair in zip(ids, torch.cat([values for _, values in drawn]).tolist(), strict=True):
                found.setdefault(request_id, []).append(pair)
        return found

    def replace_weights(self, source: str | Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load weights by checkpoint name, from an iterable or a safetensors file."""
        if isinstance(source, str):
            from safetensors.torch import load_file

            source = load_file(source).items()
        with torch.no_grad():
            self.model_runner.model.load_weights((name, tensor.detach()) for name, tensor in source)

    def cache_facts(self) -> dict[str, int]:
        """blocks: of the pool, the null block included; side_bytes: held beside the cache."""
        from rollout.vllm import compat

        state = compat.live_state()
        blocks = self.model_runner.kv_cache_config.num_blocks
        return {"blocks": blocks, "side_bytes": 0 if state is None else state.side_bytes()}
